"""Tensors without elements: arguments and results of layers on workers that hold no block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from linop.backends.autograd.dtypes import torch_dtype
from linop.backends.autograd.functions import add_dependency
from linop.spaces.tensor import TensorSpace


def empty_block(shape: Sequence[int], *tied: Tensor) -> Tensor:
    """Empty block of an output, of a given shape without elements. Its backward runs through the
    tied tensors, whose own backward passes are collective."""
    return add_dependency(tied[0].new_zeros(tuple(shape)), *tied)


def zero_volume_result(X: TensorSpace, *tensors: Tensor | None) -> Tensor:
    """Zero-volume result, of shape (0,) and the dtype of X, for a worker that holds no block. Its
    backward runs through those of the given tensors that are not None, as in `empty_block`."""
    result = torch.zeros(0, dtype=torch_dtype(X.dtype))
    if torch.is_grad_enabled() and (result.is_floating_point() or result.is_complex()):
        result.requires_grad_()
    return add_dependency(result, *[x for x in tensors if x is not None])


def zero_volume_tensor(batch: int | None = None, **options: Any) -> Tensor:
    """Argument of a layer on a worker that holds no block: shape (batch, 0), or (0,).

    Args:
        batch: the batch size, which zero-volume results keep.
        options: of ``torch.empty``.

    Example:
        >>> P, Q = linop.Partition((1, 1)), linop.Partition((1, 2))
        >>> x = [torch.arange(4.0).view(1, 4), layers.zero_volume_tensor(batch=1)]  # on 0 and 1
        >>> linop.launch(lambda b: layers.Repartition(P, Q)(x[b.worker]).tolist(), workers=2)
        [[[0.0, 1.0]], [[2.0, 3.0]]]
        >>> list(x[1].shape)
        [1, 0]
    """
    return torch.empty((0,) if batch is None else (batch, 0), **options)
