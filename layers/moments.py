"""Mean and variance of a tensor in blocks, over some of its dimensions."""

from __future__ import annotations

from collections.abc import Collection
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from linop.backends.autograd.dtypes import numpy_dtype, torch_dtype
from linop.errors import DTypeError
from linop.layers.layer import Layer
from linop.operators.collectives import all_reduce
from linop.spaces.decomposition import COPIES
from linop.spaces.tensor import TensorSpace


class Moments:
    """Mean and variance by two all-reduces: of the sums, then of the squared differences from the
    mean, which avoids cancellation where the mean is large. Collective among the workers of X;
    empty blocks add nothing. The gradient is autograd's, through both all-reduces.

    Args:
        layer: the layer that applies them.
        X: the space of the tensor.
        dims: the dimensions that are averaged over, one at least.

    Attributes:
        count: the number of elements that each mean is over.
    """

    def __init__(self, layer: Layer, X: TensorSpace, dims: Collection[int]) -> None:
        self._dims = tuple(dims)
        self.count = prod(X.global_shape[d] for d in dims)
        summed = [k for k, axis in enumerate(X.axes) if axis in dims]
        sums = TensorSpace(
            [1 if d in dims else n for d, n in enumerate(X.global_shape)],
            X.partition,
            wide(layer, X),
            [COPIES if axis in dims else axis for axis in X.axes],
            bounds={d: X.bounds[d] for d in range(X.ndim) if d not in dims},
        )
        self._total = layer.moved(all_reduce, sums, summed)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mean, differences from it, and biased variance, of this worker's block. Mean and variance
        have extent 1 in the dimensions that are averaged over."""
        mean = self._total(x.sum(self._dims, keepdim=True)) / self.count
        centered = x - mean
        return (
            mean,
            centered,
            self._total(centered.square().sum(self._dims, keepdim=True)) / self.count,
        )


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
