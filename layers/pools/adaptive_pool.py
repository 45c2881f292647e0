"""Distributed adaptive pooling. Each worker reduces its own block to partial results, of the
windows that its elements are part of; these move to the workers of the outputs, and are reduced
there. So messages are as large as outputs, also for a pool of the whole image."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from linop.backends.autograd.dtypes import torch_dtype
from linop.errors import ArgumentError, ShapeError
from linop.layers.layer import Function, Layer
from linop.layers.moments import wide
from linop.layers.sliding import (
    adaptive_range,
    check_dimensions,
    largest,
    numbers,
    of_windows,
    spatial,
)
from linop.operators.named_movement import collective
from linop.spaces.decomposition import Bounds, even
from linop.spaces.partition import Partition
from linop.spaces.tensor import TensorSpace

Windows = list[tuple[int, int]]


class _Along:
    """Partial results along one dimension: for each block, one of every output that it has elements
    of, in order; so outputs are in order along the dimension.

    Args:
        n, m: inputs and outputs.
        blocks: of the inputs.
        outputs: of the outputs.

    Attributes:
        sizes: the number of partial results of each block.
        needed: ranges of partial results that blocks of outputs need.
    """

    def __init__(self, n: int, m: int, blocks: Bounds, outputs: Bounds) -> None:
        self.n, self.m, self._blocks, self._outputs = n, m, blocks, outputs
        ranges = [adaptive_range(m, n, a, b) if a < b else (0, 0) for a, b in blocks]
        self._of = ranges
        self.sizes = [b - a for a, b in ranges]
        self._order = [o for pair in ranges for o in range(*pair)]
        self.needed = tuple((self._position(a), self._position(b)) for a, b in outputs)

    def _position(self, output: int) -> int:
        return bisect_left(self._order, output)

    def own(self, k: int) -> Windows:
        """Windows of block k's elements whose reductions are its partial results."""
        first, last = self._blocks[k]
        windows = [adaptive_range(self.n, self.m, o, o + 1) for o in range(*self._of[k])]
        return [(max(a, first) - first, min(b, last) - first) for a, b in windows]

    def joined(self, k: int) -> Windows:
        """Windows of partial results whose reductions are block k of the outputs."""
        first, last = self._outputs[k]
        places = [self._position(o) - self.needed[k][0] for o in range(first, last + 1)]
        return list(pairwise(places))

    def counts(self, k: int) -> Tensor:
        """Number of inputs that each output of block k is of; int64."""
        windows = [adaptive_range(self.n, self.m, o, o + 1) for o in range(*self._outputs[k])]
        return torch.tensor([b - a for a, b in windows], dtype=torch.int64)


class _AdaptivePool(Layer):
    """Base class of adaptive pools."""

    ndim = 0
    mean = False

    def __init__(self, P_x: Partition, output_size: Any) -> None:
        super().__init__([P_x], P_x)
        spatial(self._name, P_x, self.ndim)
        self.output_size = output_size
        given = list(output_size) if hasattr(output_size, "__len__") else [output_size]
        self._free = [k is None for k in given] * (self.ndim if len(given) == 1 else 1)
        sizes = [1 if k is None else k for k in given]
        self._sizes = numbers(self._name, "output_size", sizes, self.ndim, 1)

    def bind(self, *inputs: TensorSpace) -> Function:
        (X,) = inputs
        check_dimensions(self._name, X, self.ndim)
        extents = X.global_shape[2:]
        if 0 in extents:
            raise ShapeError(
                f"{self._name}: an input of shape {X.global_shape}; no extent 0 in space expected"
            )
        dtype, result = wide(self, X), torch_dtype(X.dtype)
        rows = zip(extents, self._free, self._sizes, strict=True)
        shape = [n if free else m for n, free, m in rows]
        grid = X.partition.shape[2:]
        lines = [
            _Along(n, m, blocks, even(m, parts))
            for n, m, blocks, parts in zip(extents, shape, X.bounds[2:], grid, strict=True)
        ]
        kept = {d: X.bounds[d] for d in (0, 1)}
        partial = TensorSpace(
            [*X.global_shape[:2], *(sum(line.sizes) for line in lines)],
            X.partition,
            dtype,
            X.axes,
            bounds=kept | {d: _bounds(line.sizes) for d, line in enumerate(lines, start=2)},
        )
        bounds = kept | {d: line.needed for d, line in enumerate(lines, start=2)}
        needed = TensorSpace(partial.global_shape, X.partition, dtype, X.axes, bounds=bounds)
        arrive = self.moved(collective, "H", "", partial, needed, of=0)
        if self.worker not in X.partition:
            return arrive
        at = X.partition.coordinates(self.worker)[2:]
        own = [line.own(k) for line, k in zip(lines, at, strict=True)]
        joined = [line.joined(k) for line, k in zip(lines, at, strict=True)]
        counts = torch.ones((), dtype=torch.int64)
        for line, k in zip(lines, at, strict=True):
            counts = counts[..., None] * line.counts(k)

        def pool(x: Tensor) -> Tensor:
            x = self._reduced(arrive(self._reduced(x.to(torch_dtype(dtype)), own)), joined)
            return (x / counts.to(x) if self.mean else x).to(result)

        return pool

    def _reduced(self, x: Tensor, windows: Sequence[Windows]) -> Tensor:
        # The last dimension first: of equal maxima in a block, the first in the order of rows gets
        # the gradient, as in torch.
        for d in reversed(range(self.ndim)):
            x = of_windows(x, d + 2, windows[d], torch.sum if self.mean else largest)
        return x

    def extra_repr(self) -> str:
        return f"{self.inputs[0]}, output_size={self.output_size}"


def _bounds(sizes: Sequence[int]) -> Bounds:
    stops = accumulate(sizes)
    return tuple((b - m, b) for b, m in zip(stops, sizes, strict=True))


class _AdaptiveAvgPool(_AdaptivePool):
    """Average pooling to an output of a given size, as in torch.nn. The output is balanced in
    space, and cut as the input in batch and channels.

    Args:
        P_x: the partition of input and output: batch, channels, space.
        output_size: as in torch.nn; None keeps the extent of the input.

    Raises:
        PartitionError: a grid of another number of axes. ArgumentError, ShapeError: not so many
            whole numbers from 1; or, from a call, they do not fit the input; on every worker.
    """

    mean = True


class _AdaptiveMaxPool(_AdaptivePool):
    """Max pooling to an output of a given size, as in torch.nn. The output is balanced in space,
    and cut as the input in batch and channels. Of equal maxima, one gets the gradient.

    Args:
        P_x: the partition of input and output: batch, channels, space.
        output_size: as in torch.nn; None keeps the extent of the input.
        return_indices: not supported.

    Raises:
        PartitionError: a grid of another number of axes. ArgumentError, ShapeError: indices are
            asked for; not so many whole numbers from 1; or, from a call, they do not fit the input;
            on every worker.
    """

    def __init__(self, P_x: Partition, output_size: Any, return_indices: bool = False) -> None:
        if return_indices:
            raise ArgumentError(f"{self._name}: return_indices=True; distributed layers give none")
        super().__init__(P_x, output_size)


class AdaptiveAvgPool1d(_AdaptiveAvgPool):
    """
    Example:
        >>> P, whole = linop.Partition((1, 1, 2)), torch.arange(6.0).view(1, 1, 6)
        >>> x = whole.chunk(2, dim=2)
        >>> parts = linop.launch(lambda b: layers.AdaptiveAvgPool1d(P, 3)(x[b.worker]), workers=2)
        >>> [part.flatten().tolist() for part in parts]
        [[0.5, 2.5], [4.5]]
        >>> torch.nn.AdaptiveAvgPool1d(3)(whole).flatten().tolist()
        [0.5, 2.5, 4.5]
    """

    ndim = 1


class AdaptiveAvgPool2d(_AdaptiveAvgPool):
    """
    Example:
        >>> P, whole = linop.Partition((1, 1, 2, 1)), torch.arange(12.0).view(1, 1, 6, 2)
        >>> x = whole.chunk(2, dim=2)
        >>> parts = linop.launch(lambda b: layers.AdaptiveAvgPool2d(P, 1)(x[b.worker]), workers=2)
        >>> [part.flatten().tolist() for part in parts]
        [[5.5], []]
        >>> torch.nn.AdaptiveAvgPool2d(1)(whole).flatten().tolist()
        [5.5]
    """

    ndim = 2


class AdaptiveAvgPool3d(_AdaptiveAvgPool):
    """
    Example:
        >>> P, whole = linop.Partition((1, 1, 2, 1, 1)), torch.arange(24.0).view(1, 1, 6, 2, 2)
        >>> x = whole.chunk(2, dim=2)
        >>> parts = linop.launch(lambda b: layers.AdaptiveAvgPool3d(P, 1)(x[b.worker]), workers=2)
        >>> [part.flatten().tolist() for part in parts]
        [[11.5], []]
        >>> torch.nn.AdaptiveAvgPool3d(1)(whole).flatten().tolist()
        [11.5]
    """

    ndim = 3


class AdaptiveMaxPool1d(_AdaptiveMaxPool):
    """
    Example:
        >>> P, whole = linop.Partition((1, 1, 2)), torch.arange(6.0).view(1, 1, 6)
        >>> x = whole.chunk(2, dim=2)
        >>> parts = linop.launch(lambda b: layers.AdaptiveMaxPool1d(P, 3)(x[b.worker]), workers=2)
        >>> [part.flatten().tolist() for part in parts]
        [[1.0, 3.0], [5.0]]
        >>> torch.nn.AdaptiveMaxPool1d(3)(whole).flatten().tolist()
        [1.0, 3.0, 5.0]
    """

    ndim = 1


class AdaptiveMaxPool2d(_AdaptiveMaxPool):
    """
    Example:
        >>> P, whole = linop.Partition((1, 1, 2, 1)), torch.arange(12.0).view(1, 1, 6, 2)
        >>> x = whole.chunk(2, dim=2)
        >>> parts = linop.launch(lambda b: layers.AdaptiveMaxPool2d(P, 1)(x[b.worker]), workers=2)
        >>> [part.flatten().tolist() for part in parts]
        [[11.0], []]
        >>> torch.nn.AdaptiveMaxPool2d(1)(whole).flatten().tolist()
        [11.0]
    """

    ndim = 2


class AdaptiveMaxPool3d(_AdaptiveMaxPool):
    """
    Example:
        >>> P, whole = linop.Partition((1, 1, 2, 1, 1)), torch.arange(24.0).view(1, 1, 6, 2, 2)
        >>> x = whole.chunk(2, dim=2)
        >>> parts = linop.launch(lambda b: layers.AdaptiveMaxPool3d(P, 1)(x[b.worker]), workers=2)
        >>> [part.flatten().tolist() for part in parts]
        [[23.0], []]
        >>> torch.nn.AdaptiveMaxPool3d(1)(whole).flatten().tolist()
        [23.0]
    """

    ndim = 3
