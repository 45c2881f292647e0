"""Modules that give a tensor another shape, or its channels another order. A cut goes with its
dimension; blocks whose elements would not follow each other in the new shape move first."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from linop.errors import ArgumentError, PartitionError, ShapeError
from linop.layers.layer import Function, Layer
from linop.layers.zero_volume import empty_block
from linop.normal_form.matching import Segment
from linop.operators.collectives import repartition
from linop.operators.named_movement import collective
from linop.spaces.decomposition import COPIES, Axis, Bounds, even, in_multiples
from linop.spaces.partition import Partition
from linop.spaces.tensor import TensorSpace


class _Moved(Layer):
    """Base class of modules that move blocks, and compute with each by itself."""

    def then(
        self,
        X: TensorSpace,
        grid: Partition,
        axes: Sequence[Axis],
        bounds: dict[int, Bounds],
        local: Any,
    ) -> Function:
        """Function that moves blocks of X, and computes with them.

        Args:
            grid, axes, bounds: of the moved blocks. In dimensions without bounds that are cut into
                as many blocks as in X, cuts stay.
            local: takes this worker's block and its shape.
        """
        for d, cuts in enumerate(X.bounds):
            parts = grid.shape[axes.index(d)] if d in axes else 1
            bounds.setdefault(d, cuts if len(cuts) == parts else even(X.global_shape[d], parts))
        Z = X.like(grid, axes, bounds)
        arrive = self.moved(repartition, X, Z, of=0)
        if self.worker not in grid:
            return arrive
        shape = Z.local_shape(self.worker)
        return lambda x: local(arrive(x), shape)

    def _dim(self, dim: int, ndim: int, name: str = "dim") -> int:
        if not isinstance(dim, int) or not -ndim <= dim < ndim:
            raise ShapeError(
                f"{self._name}: {name}={dim!r} of an input of {ndim} dimensions, on the grid "
                f"{self.inputs[0]!r}"
            )
        return dim % ndim

    def _check_grid(self, P_y: Partition, ndim: int) -> None:
        if P_y.ndim > ndim:
            raise PartitionError(
                f"{self._name}: an output of {ndim} dimensions on {P_y!r}; grid axis k splits "
                f"dimension k: give P_y"
            )


class Flatten(_Moved):
    """Several dimensions in one, as in torch.nn. Blocks of the result are whole rows of the first
    of these dimensions that is longer than 1, for these follow each other.

    If `P_x` splits no other of these dimensions, nothing moves.

    Args:
        P_x: the partition of the input; grid axis k splits dimension k.
        start_dim, end_dim: as in torch.nn.
        P_y: the partition of the output; grid axis k splits dimension k. By default that of the
            input, with its axes of these dimensions in one.

    Raises:
        ShapeError, PartitionError: from a call, the input has no such dimensions, or the output
            less than `P_y` has axes; on every worker.

    Example:
        >>> P, whole = linop.Partition((1, 2)), torch.arange(8.0).view(1, 2, 4)
        >>> x = whole.chunk(2, dim=1)
        >>> parts = linop.launch(lambda b: layers.Flatten(P)(x[b.worker]), workers=2)
        >>> [part.tolist() for part in parts]
        [[[0.0, 1.0, 2.0, 3.0]], [[4.0, 5.0, 6.0, 7.0]]]
        >>> torch.nn.Flatten()(whole).tolist()
        [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]]
    """

    def __init__(
        self,
        P_x: Partition,
        start_dim: int = 1,
        end_dim: int = -1,
        *,
        P_y: Partition | None = None,
    ) -> None:
        super().__init__([P_x], _joined(P_x, start_dim, end_dim) if P_y is None else P_y)
        self.start_dim, self.end_dim = start_dim, end_dim
        self._ndim = P_x.ndim if P_y is None and (start_dim < 0 or end_dim < -1) else None

    def bind(self, *inputs: TensorSpace) -> Function:
        (X,) = inputs
        ndim = X.ndim if self._ndim is None else self._ndim
        a, b = (self._dim(getattr(self, n), ndim, n) for n in ("start_dim", "end_dim"))
        if a > b or ndim != X.ndim:
            raise ShapeError(
                f"{self._name}: start_dim={self.start_dim} and end_dim={self.end_dim} of an input "
                f"of shape {X.global_shape} on {self.inputs[0]!r}; the first not after the last "
                f"expected, and, for negative ones, a grid of as many axes, or P_y"
            )
        assert self.output is not None
        self._check_grid(self.output, X.ndim - (b - a))
        cut = next((d for d in range(a, b + 1) if X.global_shape[d] != 1), a)
        roles = [*range(a), cut, *range(b + 1, X.ndim)]
        axes = roles[: self.output.ndim]
        return self.then(X, self.output, axes, {}, lambda x, n: _merge(x, n, a, b))

    def extra_repr(self) -> str:
        return f"{self.inputs[0]} → {self.output}, {self.start_dim}, {self.end_dim}"


def _joined(P: Partition, start: int, end: int) -> Partition:
    """The grid with the axes of dimensions start to end in one."""
    a, b = (k + P.ndim if k < 0 else k for k in (start, end))
    if not 0 <= a <= b or a >= P.ndim:
        return P
    shape = *P.shape[:a], prod(P.shape[a : b + 1]), *P.shape[b + 1 :]
    return Partition(shape, P.workers)


def _merge(x: Tensor, shape: tuple[int, ...], a: int, b: int) -> Tensor:
    return x.reshape((*shape[:a], prod(shape[a : b + 1]), *shape[b + 1 :]))


class Unflatten(_Moved):
    """One dimension in several, as in torch.nn. The result is cut in the first of these that is
    longer than 1; blocks that begin inside one of its rows move.

    Args:
        P_x: the partition of the input; grid axis k splits dimension k.
        dim, unflattened_size: as in torch.nn, without names.
        P_y: the partition of the output; grid axis k splits dimension k. By default that of the
            input, with axes of extent 1 for the other new dimensions.

    Raises:
        ArgumentError: the size is none. PartitionError: `P_y` splits another of the new dimensions.
            ShapeError: from a call, the input has no such dimension, or one of another length; on
            every worker.

    Example:
        >>> P, whole = linop.Partition((1, 2)), torch.arange(8.0).view(1, 8)
        >>> x = whole.chunk(2, dim=1)
        >>> parts = linop.launch(lambda b: layers.Unflatten(P, 1, (2, 4))(x[b.worker]), workers=2)
        >>> [part.tolist() for part in parts]
        [[[[0.0, 1.0, 2.0, 3.0]]], [[[4.0, 5.0, 6.0, 7.0]]]]
        >>> torch.nn.Unflatten(1, (2, 4))(whole).tolist()
        [[[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]]
    """

    def __init__(
        self,
        P_x: Partition,
        dim: int,
        unflattened_size: Sequence[int],
        *,
        P_y: Partition | None = None,
    ) -> None:
        sizes = tuple(unflattened_size)
        if not sizes or any(not isinstance(n, int) or n < -1 for n in sizes) or sizes.count(-1) > 1:
            raise ArgumentError(
                f"{self._name}: unflattened_size={unflattened_size!r}; whole numbers expected, of "
                f"which one may be -1"
            )
        cut = next((k for k, n in enumerate(sizes) if n != 1), 0)
        at = dim + P_x.ndim if isinstance(dim, int) and dim < 0 else dim
        grid = P_x if P_y is None else P_y
        if P_y is None and isinstance(at, int) and 0 <= at < P_x.ndim:
            ones = (1,) * (len(sizes) - 1)
            shape = *P_x.shape[:at], *ones[:cut], P_x.shape[at], *ones[cut:], *P_x.shape[at + 1 :]
            grid = Partition(shape, P_x.workers)
        super().__init__([P_x], grid)
        self.dim = dim
        self.unflattened_size: tuple[int, ...] = sizes
        self._place, self._ndim = cut, P_x.ndim if P_y is None and dim < 0 else None
        others = [k for k in range(at, at + len(sizes)) if k < grid.ndim and k != at + cut]
        if any(grid.shape[k] > 1 for k in others):
            raise PartitionError(
                f"{self._name}: {grid!r} given as P_y, which splits other new dimensions than the "
                f"first of {sizes} that is longer than 1; add a Repartition"
            )

    def bind(self, *inputs: TensorSpace) -> Function:
        (X,) = inputs
        d, sizes = self._dim(self.dim, X.ndim), list(self.unflattened_size)
        n, known = X.global_shape[d], prod(k for k in sizes if k != -1)
        if -1 in sizes and known:
            sizes[sizes.index(-1)] = n // known
        if prod(sizes) != n or self._ndim not in (None, X.ndim):
            raise ShapeError(
                f"{self._name}: dimension {self.dim} of an input of shape {X.global_shape} as "
                f"{self.unflattened_size}; a dimension of that size expected, and, for a negative "
                f"one, a grid of as many axes as dimensions, or P_y"
            )
        grid, more = self.output, len(sizes) - 1
        assert grid is not None
        self._check_grid(grid, X.ndim + more)
        new: list[Axis] = [d if k == self._place else COPIES for k in range(more + 1)]
        axes = [*range(d), *new, *range(d + 1, X.ndim)][: grid.ndim]
        inner, parts = prod(sizes[self._place + 1 :]), grid.shape[axes.index(d)] if d in axes else 1
        cuts = X.bounds[d] if len(X.bounds[d]) == parts else even(n, parts)
        rows = in_multiples(cuts, sizes[self._place], inner)
        bounds = {d: tuple((a * inner, b * inner) for a, b in rows)}

        def split(x: Tensor, shape: tuple[int, ...]) -> Tensor:
            mine = sizes.copy()
            mine[self._place] = shape[d] // inner if inner else mine[self._place]
            return x.reshape((*shape[:d], *mine, *shape[d + 1 :]))

        return self.then(X, grid, axes, bounds, split)

    def extra_repr(self) -> str:
        return f"{self.inputs[0]} → {self.output}, {self.dim}, {self.unflattened_size}"


class _Pixels(_Moved):
    """Base class of modules that exchange channels and pixels."""

    def __init__(self, P_x: Partition, factor: int, name: str) -> None:
        super().__init__([P_x], P_x)
        if not isinstance(factor, int) or factor < 1:
            raise ArgumentError(f"{self._name}: {name}={factor!r}; a whole number from 1 expected")

    def exchanged(self, X: TensorSpace, factors: Sequence[int], function: Any) -> Function:
        """Function from a block of X to torch's result.

        Args:
            factors: those that the last three dimensions are divided by; they have to be multiples,
                and so have blocks.
            function: torch's.
        """
        last = dict(zip(range(X.ndim - 3, X.ndim), factors, strict=True))
        if X.ndim < 3 or any(X.global_shape[d] % k for d, k in last.items()):
            raise ShapeError(
                f"{self._name}: an input of shape {X.global_shape}; (…, channels, rows, columns) "
                f"expected, in multiples of {tuple(factors)}"
            )
        bounds: dict[int, Bounds] = {}
        for d, k in last.items():
            rows = in_multiples(X.bounds[d], X.global_shape[d] // k, k)
            bounds[d] = tuple((a * k, b * k) for a, b in rows)
        probe = torch.empty(X.global_shape, device="meta")
        grown = [(m, n) for m, n in zip(function(probe).shape, X.global_shape, strict=True)]

        def local(x: Tensor, shape: tuple[int, ...]) -> Tensor:
            if 0 not in shape:
                y: Tensor = function(x)
                return y
            mine = [k * m // n if n else 0 for k, (m, n) in zip(shape, grown, strict=True)]
            return empty_block(mine, x)

        return self.then(X, X.partition, X.axes, bounds, local)


class PixelShuffle(_Pixels):
    """Channels as pixels, as in torch.nn. Blocks of pixels grow, and stay where they are; blocks of
    channels begin at multiples of r².

    Args:
        P_x: the partition of input and output; grid axis k splits dimension k.
        upscale_factor: r, as in torch.nn.

    Raises:
        ArgumentError: the factor is no whole number from 1. ShapeError: from a call, the channels
            are no multiple of r²; on every worker.

    Example:
        >>> P, whole = linop.Partition((1, 1, 2, 1)), torch.arange(8.0).view(1, 4, 2, 1)
        >>> x = whole.chunk(2, dim=2)
        >>> parts = linop.launch(lambda b: layers.PixelShuffle(P, 2)(x[b.worker]), workers=2)
        >>> [part.tolist() for part in parts]
        [[[[[0.0, 2.0], [4.0, 6.0]]]], [[[[1.0, 3.0], [5.0, 7.0]]]]]
        >>> torch.nn.PixelShuffle(2)(whole).tolist()
        [[[[0.0, 2.0], [4.0, 6.0], [1.0, 3.0], [5.0, 7.0]]]]
    """

    def __init__(self, P_x: Partition, upscale_factor: int) -> None:
        super().__init__(P_x, upscale_factor, "upscale_factor")
        self.upscale_factor = upscale_factor

    def bind(self, *inputs: TensorSpace) -> Function:
        r = self.upscale_factor
        shuffle = torch.nn.functional.pixel_shuffle
        return self.exchanged(inputs[0], (r * r, 1, 1), lambda x: shuffle(x, r))

    def extra_repr(self) -> str:
        return f"{self.inputs[0]}, {self.upscale_factor}"


class PixelUnshuffle(_Pixels):
    """Pixels as channels, as in torch.nn. Blocks of pixels begin at multiples of r; blocks of
    channels grow.

    Args:
        P_x: the partition of input and output; grid axis k splits dimension k.
        downscale_factor: r, as in torch.nn.

    Raises:
        ArgumentError: the factor is no whole number from 1. ShapeError: from a call, rows or
            columns are no multiple of r; on every worker.

    Example:
        >>> P, whole = linop.Partition((1, 1, 2, 1)), torch.arange(8.0).view(1, 1, 4, 2)
        >>> x = whole.chunk(2, dim=2)
        >>> parts = linop.launch(lambda b: layers.PixelUnshuffle(P, 2)(x[b.worker]), workers=2)
        >>> [part.squeeze().tolist() for part in parts]
        [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]
        >>> torch.nn.PixelUnshuffle(2)(whole).squeeze().tolist()
        [[0.0, 4.0], [1.0, 5.0], [2.0, 6.0], [3.0, 7.0]]
    """

    def __init__(self, P_x: Partition, downscale_factor: int) -> None:
        super().__init__(P_x, downscale_factor, "downscale_factor")
        self.downscale_factor = downscale_factor

    def bind(self, *inputs: TensorSpace) -> Function:
        r = self.downscale_factor
        unshuffle = torch.nn.functional.pixel_unshuffle
        return self.exchanged(inputs[0], (1, r, r), lambda x: unshuffle(x, r))

    def extra_repr(self) -> str:
        return f"{self.inputs[0]}, {self.downscale_factor}"


class ChannelShuffle(Layer):
    """Channels of groups in turn, as in torch.nn; they move if they are cut.

    Args:
        P_x: the partition of input and output; grid axis k splits dimension k.
        groups: as in torch.nn.

    Raises:
        ArgumentError: `groups` is no whole number from 1. ShapeError: from a call, the channels
            are no multiple of it; on every worker.

    Example:
        >>> P, whole = linop.Partition((1, 2)), torch.arange(4.0).view(1, 4, 1)
        >>> x = whole.chunk(2, dim=1)
        >>> parts = linop.launch(lambda b: layers.ChannelShuffle(P, 2)(x[b.worker]), workers=2)
        >>> [part.flatten().tolist() for part in parts]
        [[0.0, 2.0], [1.0, 3.0]]
        >>> torch.nn.ChannelShuffle(2)(whole).flatten().tolist()
        [0.0, 2.0, 1.0, 3.0]
    """

    def __init__(self, P_x: Partition, groups: int) -> None:
        super().__init__([P_x], P_x)
        if not isinstance(groups, int) or groups < 1:
            raise ArgumentError(f"{self._name}: groups={groups!r}; a whole number from 1 expected")
        self.groups = groups

    def bind(self, *inputs: TensorSpace) -> Function:
        (X,) = inputs
        if X.ndim < 3 or X.global_shape[1] % self.groups:
            raise ShapeError(
                f"{self._name}: an input of shape {X.global_shape}; (batch, channels, space) "
                f"expected, with a multiple of {self.groups} channels"
            )
        channels = X.global_shape[1]
        each = channels // self.groups
        order = tuple(
            Segment(c, c % self.groups * each + c // self.groups, 1) for c in range(channels)
        )
        return self.moved(collective, "P", "", X, X, segments={1: order}, of=0)

    def extra_repr(self) -> str:
        return f"{self.inputs[0]}, {self.groups}"
