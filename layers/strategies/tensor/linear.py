"""Linear modules whose weight is cut by output (column-parallel) or by input (row-parallel), as
Megatron's pair."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from linop.backends.autograd.dtypes import numpy_dtype
from linop.errors import ShapeError
from linop.layers.layer import Function
from linop.layers.parameters.weights import hold
from linop.operators.collectives import repartition
from linop.spaces.decomposition import COPIES, REPLICATED
from linop.spaces.partition import Partition
from linop.spaces.tensor import TensorSpace
from linop.strategies.mesh import Axis
from linop.strategies.tensor.layer import ParallelLayer, laid_out_as
from linop.strategies.tensor.layouts import Layout


class _Linear(ParallelLayer):
    """``y = x W^T + b`` with the weight in blocks.

    Args:
        axis: the axis.
        whole: the sequential module, a `torch.nn.Linear`.
        input, output: layouts.
        sizes: lengths of the weight's blocks along the dimension that is cut.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self, axis: Axis, whole: Any, input: Layout, output: Layout, sizes: Sequence[int]
    ) -> None:
        super().__init__(axis, [input], output)
        self.in_features, self.out_features = whole.in_features, whole.out_features
        self.sizes = tuple(sizes)

    def _shape_of_products(self, X: TensorSpace) -> tuple[int, ...]:
        if not X.ndim or X.global_shape[-1] != self.in_features:
            raise ShapeError(
                f"{self._name}: an input of global shape {X.global_shape}; (…, "
                f"{self.in_features}) expected"
            )
        return (*X.global_shape[:-1], self.out_features)


class ColwiseLinear(_Linear):
    """Every worker has the whole input, and makes some of the output's features."""

    def __init__(
        self, axis: Axis, whole: Any, input: Layout, output: Layout, sizes: Sequence[int]
    ) -> None:
        super().__init__(axis, whole, input, output, sizes)
        self.hold_cut("weight", whole.weight, 0, self.sizes)
        self.hold_cut("bias", whole.bias, 0, self.sizes)

    def bind(self, *inputs: TensorSpace) -> Function:
        (X,) = inputs
        shape, last = self._shape_of_products(X), X.ndim - 1
        _, spread = self.converted(X, COPIES, of=0)
        cut = {last: self.sizes}
        products = TensorSpace(shape, X.partition, X.dtype, [last], X.name, sizes=cut)
        Y, laid_out = self.converted(products, self.output_layout)

        def affine(x: Tensor) -> Tensor:
            return laid_out(torch.nn.functional.linear(spread(x), self.weight, self.bias))

        return laid_out_as(Y, affine)


class SharedColwiseLinear(_Linear):
    """Fewer blocks than workers: of t workers, t / len(sizes) neighbours share a block.

    On the axis as a grid (blocks, workers of each) the weight is cut along the first and replicated
    along the second, and used by way of E: nothing moves, and the gradient is all-reduced among the
    workers that share, bias and weight in one message.
    """

    def __init__(
        self, axis: Axis, whole: Any, input: Layout, output: Layout, sizes: Sequence[int]
    ) -> None:
        super().__init__(axis, whole, input, output, sizes)
        shared = axis.size // len(sizes)
        self.grid = Partition((len(sizes), shared), axis.partition.workers)
        for name in ("weight", "bias"):
            p = getattr(whole, name)
            if p is None:
                self.register_parameter(name, None)
            else:
                hold(self, name, TensorSpace(p.shape, self.grid, axes=[0, REPLICATED]), p)

    def bind(self, *inputs: TensorSpace) -> Function:
        (X,) = inputs
        (*_, features), biased = self._shape_of_products(X), "bias" in self.spaces
        _, spread = self.converted(X, COPIES, of=0)
        kind = numpy_dtype(self.dtypes["weight"])
        shape = features, self.in_features + biased
        whole = TensorSpace(shape, self.grid, kind, [0, REPLICATED], "parameters")
        embed = self.moved(repartition, whole, whole.like(self.grid, [0, COPIES]))

        def affine(x: Tensor) -> Tensor:
            own = [self.weight] if self.bias is None else [self.weight, self.bias[:, None]]
            both = embed(torch.cat(own, 1))
            bias = both[:, -1] if biased else None
            return torch.nn.functional.linear(spread(x), both[:, : self.in_features], bias)

        made = TensorSpace((*X.global_shape[:-1], features), self.grid, kind, [X.ndim - 1, COPIES])
        return laid_out_as(made, affine)


class RowwiseLinear(_Linear):
    """Every worker has some of the input's features, and makes a term of the output. The first one
    adds the bias to its term, and so holds it alone."""

    def __init__(
        self, axis: Axis, whole: Any, input: Layout, output: Layout, sizes: Sequence[int]
    ) -> None:
        super().__init__(axis, whole, input, output, sizes)
        self.hold_cut("weight", whole.weight, 1, self.sizes)
        self.hold_cut("bias", whole.bias, 0, grid=axis.partition[:1])

    def bind(self, *inputs: TensorSpace) -> Function:
        (X,) = inputs
        shape, last = self._shape_of_products(X), X.ndim - 1
        _, cut = self.converted(X, last, self.sizes, of=0)
        terms = TensorSpace(shape, X.partition, X.dtype, [COPIES], X.name)
        Y, summed = self.converted(terms, self.output_layout)

        def affine(x: Tensor) -> Tensor:
            return summed(torch.nn.functional.linear(cut(x), self.weight, self.bias))

        return laid_out_as(Y, affine)
