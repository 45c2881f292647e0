"""Sums, means and variances of a tensor in blocks, over some of its dimensions and, perhaps, over
groups of channels; and softmax."""

from __future__ import annotations

from collections.abc import Collection
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from linop.backends.autograd.dtypes import numpy_dtype, torch_dtype
from linop.errors import DTypeError
from linop.layers.layer import Function, Layer
from linop.operators.collectives import all_gather, all_reduce
from linop.operators.named_movement import collective
from linop.spaces.blocks import is_tiled
from linop.spaces.decomposition import COPIES
from linop.spaces.tensor import TensorSpace


class Sums:
    """Sums over some dimensions, by an all-reduce. Collective among the workers of X; empty blocks
    add nothing. The gradient is autograd's, through the all-reduce.

    Args:
        layer: the layer that applies them.
        X: the space of the tensor.
        dims: the dimensions that are summed over; without groups, one at least.
        groups: of channels, dimension 1, which are summed over too; blocks may cut them. 0: none.

    Attributes:
        count: the number of elements that each sum is over.
    """

    def __init__(
        self, layer: Layer, X: TensorSpace, dims: Collection[int], groups: int = 0
    ) -> None:
        self._dims, self._groups = tuple(dims), groups
        self.count = prod(X.global_shape[d] for d in dims)
        shape = [1 if d in dims else n for d, n in enumerate(X.global_shape)]
        bounds = {d: X.bounds[d] for d in range(X.ndim) if d not in dims}
        if groups:
            each = shape[1] // groups
            self.count *= each
            shape[1] = groups
            bounds[1] = tuple((a // each, -(-b // each)) if a < b else (0, 0) for a, b in bounds[1])
            if layer.worker in X.partition:
                mine = X.slices(layer.worker)[1]
                group = torch.arange(mine.start, mine.stop) // each
                self._group, self._number = group - mine.start // each, len(group.unique())
        axes = [COPIES if axis in dims else axis for axis in X.axes]
        sums = TensorSpace(shape, X.partition, wide(layer, X), axes, bounds=bounds)
        if not groups or is_tiled(sums):
            summed = [k for k, axis in enumerate(X.axes) if axis in dims]
            self._total = layer.moved(all_reduce, sums, summed)
        else:  # workers of two blocks have terms of one group
            self._total = layer.moved(collective, "B R", "", sums, sums)

    def __call__(self, x: Tensor) -> Tensor:
        """The sums that this worker's block needs, of extent 1 in the dimensions that are summed
        over; of groups, one for each channel."""
        # Of no dimensions, torch's sum is over all.
        parts = x.sum(self._dims, keepdim=True) if self._dims else x
        if not self._groups:
            return self._total(parts)
        shape = [self._number if d == 1 else n for d, n in enumerate(parts.shape)]
        group = self._group.to(x.device)
        sums = self._total(parts.new_zeros(shape).index_add(1, group, parts))
        return sums.index_select(1, group)


class Moments:
    """Mean and variance by two all-reduces: of the sums, then of the squared differences from the
    mean, which avoids cancellation where the mean is large. Collective among the workers of X.

    Args:
        layer, X, dims, groups: as for `Sums`.

    Attributes:
        count: the number of elements that each mean is over.
    """

    def __init__(
        self, layer: Layer, X: TensorSpace, dims: Collection[int], groups: int = 0
    ) -> None:
        self._sums = Sums(layer, X, dims, groups)
        self.count = self._sums.count

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mean, differences from it, and biased variance, of this worker's block. Mean and variance
        have extent 1 in the dimensions that are averaged over."""
        count = max(self.count, 1)  # of no elements, zeros: no gradient becomes NaN
        mean = self._sums(x) / count
        centered = x - mean
        return mean, centered, self._sums(centered.square()) / count


def log_softmax(layer: Layer, X: TensorSpace, d: int) -> Function:
    """Function from this worker's block of X to that of its log-softmax along dimension d, which is
    cut. Collective among the workers of X.

    Workers exchange the largest element of their block, and the sum of the exponentials beside it:
    two numbers for each element of the other dimensions.
    """
    parts = X.partition.shape[X.axes.index(d)]
    bounds = {e: X.bounds[e] for e in range(X.ndim) if e != d}
    shape = [2 * parts if e == d else n for e, n in enumerate(X.global_shape)]
    each = TensorSpace(shape, X.partition, wide(layer, X), X.axes, bounds=bounds)
    gather = layer.moved(all_gather, each, X.axes.index(d))

    def normalised(x: Tensor) -> Tensor:
        least = torch.finfo(x.dtype).min
        one = [1 if e == d else n for e, n in enumerate(x.shape)]
        top = x.detach().amax(d, True) if x.shape[d] else x.new_full(one, least)
        top = top.clamp(min=least)  # a block may be all -inf: the subtrahend stays finite
        blocks = gather(torch.cat([top, (x - top).exp().sum(d, True)], d))
        tops, sums = blocks.unflatten(d, (parts, 2)).unbind(d + 1)
        tops = tops.detach()
        top = tops.amax(d, True)
        # The largest first: elements that are far from 0 lose no digits.
        result: Tensor = x - top - (sums * (tops - top).exp()).sum(d, True).log()
        return result

    return normalised


def wide(layer: Layer, X: TensorSpace) -> np.dtype[Any]:
    """NumPy dtype in which elements of X are summed: float32 at least.

    Raises:
        DTypeError: X is not of a floating-point dtype; on every worker.
    """
    dtype = torch_dtype(X.dtype)
    if not dtype.is_floating_point:
        raise DTypeError(
            f"{type(layer).__name__}: an input of {dtype}; a floating-point dtype expected"
        )
    return numpy_dtype(torch.promote_types(dtype, torch.float32))
