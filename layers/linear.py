"""The distributed affine layer (paper, section 4, dense layers)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from linop.errors import PartitionError, ShapeError, expect
from linop.layers.layer import Function, Layer
from linop.layers.parameters.weights import drawn, hold
from linop.layers.zero_volume import empty_block
from linop.operators.collectives import repartition
from linop.operators.named_movement import collective
from linop.spaces.decomposition import COPIES, Axis
from linop.spaces.partition import Partition
from linop.spaces.tensor import TensorSpace


class Linear(Layer):
    """``y = x W^T + b``, as `torch.nn.Linear`, with the weight in blocks over a grid of workers.

    x is broadcast along the columns of `P_W`, every worker multiplies with its block of W, and the
    products are summed along the rows of `P_W` into y. The bias is held, and added, in column 0.
    With a `P_W` of shape (p, 1) that is the column-parallel form, with (1, p) the row-parallel one.

    Args:
        P_x: the partition of the input, of shape (batch, …, in_features). A grid of two axes splits
            the first and the last dimension; any other, axis k dimension k.
        in_features, out_features, bias, device, dtype: as in torch.nn.
        P_y: the partition of the output, of shape (batch, …, out_features), likewise; by default
            `P_x`.
        P_W: the partition of the weight, of shape (out_features, in_features): any grid of two
            axes, of workers of `P_x` and `P_y` or others. By default the workers of `P_x`, in
            columns by their features of x.
        x_axes, y_axes: roles of the grid axes of `P_x` and `P_y`, where they are others, as in
            `linop.TensorSpace`: a dimension, or `linop.REPLICATED`. A replicated x makes the
            broadcast the identity, with an all-reduce as gradient; a replicated y makes the
            sum an all-reduce, with the identity as gradient.

    Raises:
        PartitionError: `P_W` has not two axes.

    Example:
        >>> P, x = linop.Partition((1, 2)), torch.tensor([[1.0, 2.0, 3.0, 4.0]])
        >>> def main(backend):
        ...     linear = layers.Linear(P, 4, 2, bias=False)
        ...     layers.initialize(linear, "weight", torch.nn.init.ones_)
        ...     return list(linear.weight.shape), linear(x.chunk(2, dim=1)[backend.worker]).tolist()
        >>> linop.launch(main, workers=2)
        [([2, 2], [[10.0]]), ([2, 2], [[10.0]])]
        >>> torch.nn.functional.linear(x, torch.ones(2, 4)).tolist()
        [[10.0, 10.0]]
    """

    partitions_once = ("P_y", "P_W")
    weight: Tensor | None
    bias: Tensor | None

    def __init__(
        self,
        P_x: Partition,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        P_y: Partition | None = None,
        P_W: Partition | None = None,
        x_axes: Sequence[Axis] | None = None,
        y_axes: Sequence[Axis] | None = None,
    ) -> None:
        if P_W is None:
            P_W = work_partition(self._name, P_x, x_axes)
        super().__init__([P_x], P_x if P_y is None else P_y, P_W)
        if P_W.ndim != 2:
            raise PartitionError(f"Linear: {P_W!r} for a weight; a grid of two axes expected")
        self.P_W = P_W
        self.in_features, self.out_features = in_features, out_features
        self.x_axes, self.y_axes = x_axes, y_axes
        whole = drawn(self, lambda: torch.nn.Linear(in_features, out_features, bias, device, dtype))
        hold(self, "weight", TensorSpace((out_features, in_features), P_W), whole.weight)
        if bias:
            hold(self, "bias", TensorSpace((out_features,), P_W[:, 0]), whole.bias)
        else:
            self.register_parameter("bias", None)

    def axes(self, number: int, ndim: int) -> Sequence[Axis]:
        return dense_axes(self._name, self.inputs[0], ndim, self.x_axes)

    def output_axes(self, grid: Partition, ndim: int) -> Sequence[Axis]:
        return dense_axes(self._name, grid, ndim, self.y_axes)

    def bind(self, *inputs: TensorSpace) -> Function:
        (X,) = inputs
        if X.ndim < 1 or X.global_shape[-1] != self.in_features:
            raise ShapeError(
                f"Linear: an input of shape {X.global_shape}; (…, {self.in_features}) expected"
            )
        last, shape = X.ndim - 1, (*X.global_shape[:-1], self.out_features)
        assert self.output is not None
        wanted = TensorSpace(X.global_shape, self.P_W, X.dtype, [COPIES, last])
        products = TensorSpace(shape, self.P_W, X.dtype, [last, COPIES])
        y_axes = dense_axes(self._name, self.output, X.ndim, self.y_axes)
        Y = TensorSpace(shape, self.output, X.dtype, y_axes)
        spread = self.moved(repartition, X, wanted, of=0)
        summed = self.moved(collective, "R", f"{self.P_W}→{self.output}", products, Y)
        mine = products.local_shape(self.worker) if self.worker in self.P_W else None

        def affine(x: Tensor) -> Tensor:
            x = spread(x)
            if mine is None:
                return summed(x)
            assert self.weight is not None
            if 0 in self.weight.shape:
                tied = [p for p in (x, self.weight, self.bias) if p is not None]
                return summed(empty_block(mine, *tied))
            return summed(torch.nn.functional.linear(x, self.weight, self.bias))

        return affine

    def extra_repr(self) -> str:
        return (
            f"{self.inputs[0]} → {self.P_W} → {self.output}, in_features={self.in_features}, "
            f"out_features={self.out_features}, bias={'bias' in self.spaces}"
        )


def work_partition(name: str, P_x: Partition, x_axes: Sequence[Axis] | None) -> Partition:
    """The workers of `P_x` as a grid of two axes for a weight, (out_features, in_features): columns
    are those that have different features of x."""
    grid = expect(name, P_x, Partition)
    known = [axis for axis in x_axes or () if isinstance(axis, int)]
    ndim = max(2, grid.ndim, *(1 + axis for axis in known))
    axes = [*dense_axes(name, grid, ndim, x_axes)]
    workers = np.array(grid.workers).reshape(grid.shape)
    if ndim - 1 in axes:
        workers = np.moveaxis(workers, axes.index(ndim - 1), -1)
        workers = workers.reshape(-1, workers.shape[-1])
    else:
        workers = workers.reshape(-1, 1)
    return Partition(workers.shape, workers.ravel().tolist())


def dense_axes(
    name: str, grid: Partition, ndim: int, axes: Sequence[Axis] | None = None
) -> Sequence[Axis]:
    """Roles of the grid axes for a tensor of (batch, …, features): two axes split the first and the
    last dimension; of any other number, axis k splits dimension k.

    Args:
        name: of the layer, for errors.
        axes: roles that replace these, if given; negative dimensions count from the last.

    Raises:
        PartitionError: the grid has more axes than the tensor has dimensions.
    """
    if axes is not None:
        return [k + ndim if isinstance(k, int) and k < 0 else k for k in axes]
    if grid.ndim == 2 <= ndim:
        return [0, ndim - 1]
    if grid.ndim > ndim:
        raise PartitionError(f"{name}: a tensor of {ndim} dimensions on {grid!r}")
    return range(grid.ndim)
