"""The base class of normalisation layers: their weight and bias, and the dtype of sums. The
reductions are in `linop.layers.moments`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from linop.backends.autograd.dtypes import torch_dtype
from linop.layers.layer import Function, Layer
from linop.layers.moments import wide
from linop.layers.parameters.weights import hold
from linop.layers.zero_volume import zero_volume_result
from linop.operators.collectives import repartition
from linop.spaces.decomposition import COPIES, Axis
from linop.spaces.tensor import TensorSpace


class Norm(Layer):
    """Base class of normalisation layers: a weight and a bias over some dimensions of the input."""

    constants = MappingProxyType(
        {"weight": 1, "bias": 0, "running_mean": 0, "running_var": 1, "num_batches_tracked": 0}
    )
    weight: Tensor | None
    bias: Tensor | None

    def _hold_affine(self, whole: Any, axes: Sequence[Axis], bias: bool) -> None:
        """Register blocks of weight and bias, on the workers at coordinate 0 of the grid axes whose
        role is `linop.COPIES`."""
        (grid,) = self.inputs
        owners = grid[tuple(slice(0, 1) if axis is COPIES else slice(None) for axis in axes)]
        for name in ("weight", "bias"):
            parameter = getattr(whole, name, None)
            if parameter is None or (name == "bias" and not bias):
                self.register_parameter(name, None)
            else:
                hold(self, name, TensorSpace(parameter.shape, owners, axes=axes), parameter)

    def _affine(
        self, X: TensorSpace, first: int, dims: int
    ) -> Callable[[], Sequence[Tensor | None]]:
        """Function without arguments that gives weight and bias, or None for either, as this
        worker's block of X needs them. Both travel in one message.

        Args:
            first, dims: the parameters' dimensions are first to first + dims - 1 of X.
        """
        names = [name for name in ("weight", "bias") if name in self.spaces]
        if not names:
            return lambda: (None, None)
        held = self.spaces["weight"]
        shape = len(names), *held.global_shape
        axes = [axis + 1 if isinstance(axis, int) else axis for axis in held.axes]
        here = TensorSpace(shape, held.partition, wide(self, X), axes)
        wanted: list[Axis] = []
        for axis in X.axes:
            if isinstance(axis, int):
                own = first <= axis < first + dims
                wanted.append(axis - first + 1 if own else COPIES)
            else:
                wanted.append(axis)
        bounds = {1 + k: X.bounds[first + k] for k in range(dims)}
        spread = self.moved(repartition, here, here.like(X.partition, wanted, bounds))
        dtype = torch_dtype(here.dtype)

        def parameters() -> Sequence[Tensor | None]:
            mine = [getattr(self, name) for name in names]
            held = None if mine[0] is None else torch.stack([p.to(dtype) for p in mine])
            return (*spread(held), None)[:2]

        return parameters

    def _on_blocks(self, X: TensorSpace, compute: Function) -> Function:
        """Function of this worker's block of X that computes in the dtype of sums, and gives a
        result of the dtype of X; a zero-volume one on workers without a block."""
        dtype, result = torch_dtype(wide(self, X)), torch_dtype(X.dtype)
        if self.worker not in X.partition:
            return lambda x: zero_volume_result(X, x)
        return lambda x: compute(x.to(dtype)).to(result)


def scaled(x: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    if scale is None:
        return x
    return x * scale if bias is None else torch.addcmul(bias, x, scale)
