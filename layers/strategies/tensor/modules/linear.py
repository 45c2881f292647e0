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
from linop.layers.parameters.packing import Packing
from linop.layers.parameters.weights import hold
from linop.operators.collectives import repartition
from linop.spaces.decomposition import COPIES, REPLICATED
from linop.spaces.partition import Partition
from linop.spaces.tensor import TensorSpace
from linop.strategies.mesh import Axis
from linop.strategies.tensor.layouts import Layout
from linop.strategies.tensor.modules.layer import ParallelLayer, laid_out_as
from linop.strategies.tensor.modules.pieces import check_even, copies, cut, joined, summed
from linop.strategies.tensor.packed import in_parts


def is_conv1d(module: Any) -> bool:
    """True for `transformers.pytorch_utils.Conv1D`, a linear layer whose weight is transposed."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def features(module: Any) -> tuple[int, int]:
    """Features of the input and of the output of a linear layer."""
    if is_conv1d(module):
        return int(module.nx), int(module.nf)
    return int(module.in_features), int(module.out_features)


class _Linear(ParallelLayer):
    """``y = x W^T + b`` with the weight in blocks; ``y = x W + b`` of a Conv1D.

    Args:
        axis: the axis.
        whole: the sequential module, a `torch.nn.Linear` or a Conv1D.
        input, output: layouts.
        sizes: lengths of the weight's blocks along the dimension that is cut.

    Attributes:
        outputs, inputs_of: the weight's dimensions of output and of input features.
        packings: the order of the rows of parameters of several parts, by name.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self, axis: Axis, whole: Any, input: Layout, output: Layout, sizes: Sequence[int]
    ) -> None:
        super().__init__(axis, [input], output)
        self.in_features, self.out_features = features(whole)
        self.sizes, self.transposed = tuple(sizes), is_conv1d(whole)
        self.outputs, self.inputs_of = (1, 0) if self.transposed else (0, 1)
        self.packings: dict[str, Packing] = {}

    @property
    def in_pieces(self) -> bool:  # type: ignore[override]
        return not (self.transposed or getattr(self, "parts", None))

    def cut_into(self, pieces: int) -> None:
        super().cut_into(pieces)
        check_even(self._name, "features", self.sizes, pieces)

    def _products(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        weight = weight.T if self.transposed else weight
        return torch.nn.functional.linear(x, weight, bias)

    def _shape_of_products(self, X: TensorSpace) -> tuple[int, ...]:
        if not X.ndim or X.global_shape[-1] != self.in_features:
            raise ShapeError(
                f"{self._name}: an input of global shape {X.global_shape}; (…, "
                f"{self.in_features}) expected"
            )
        return (*X.global_shape[:-1], self.out_features)


class ColwiseLinear(_Linear):
    """Every worker has the whole input, and makes some of the output's features.

    Args:
        parts: of a projection of several parts, the lengths of the blocks of each, by worker: of
            each part a worker has some features, one part after the other.
    """

    def __init__(
        self,
        axis: Axis,
        whole: Any,
        input: Layout,
        output: Layout,
        sizes: Sequence[int],
        parts: Sequence[Sequence[int]] = (),
    ) -> None:
        super().__init__(axis, whole, input, output, sizes)
        self.parts = tuple(map(tuple, parts))
        for name, dim in ("weight", self.outputs), ("bias", 0):
            p = getattr(whole, name)
            if self.parts and p is not None:
                self.packings[name] = packing = Packing(dim, self.parts)
                p = torch.nn.Parameter(packing.packed(p.detach()), p.requires_grad)
            self.hold_cut(name, p, dim, self.sizes)

    def bind(self, *inputs: TensorSpace) -> Function:
        (X,) = inputs
        shape, last = self._shape_of_products(X), X.ndim - 1
        _, spread = self.converted(X, COPIES, of=0)
        cut = {last: self.sizes}
        products = TensorSpace(shape, X.partition, X.dtype, [last], X.name, sizes=cut)
        Y, laid_out = self.converted(products, self.output_layout)

        def affine(x: Tensor) -> Tensor:
            y = laid_out(self._features(spread(x)))
            return in_parts(y, self.parts, self.axis.index) if self.parts else y

        return laid_out_as(Y, affine)

    def _features(self, x: Tensor) -> Tensor:
        """This worker's features of the output."""
        many, bias = self.pieces, self.bias
        if not many:
            return self._products(x, self.weight, bias)
        biases = [None] * many if bias is None else cut(bias, many, 0)
        every = zip(copies(x, many), cut(self.weight, many, 0), biases, strict=True)
        return joined([self._products(*one) for one in every], -1)


class SharedColwiseLinear(_Linear):
    """Fewer blocks than workers: of t workers, t / len(sizes) neighbours share a block.

    On the axis as a grid (blocks, workers of each) the weight is cut along the first and replicated
    along the second, and used by way of E: nothing moves, and the gradient is all-reduced among the
    workers that share, bias and weight in one message.
    """

    in_pieces = False

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
        self.hold_cut("weight", whole.weight, self.inputs_of, self.sizes)
        self.hold_cut("bias", whole.bias, 0, grid=axis.partition[:1])

    def bind(self, *inputs: TensorSpace) -> Function:
        (X,) = inputs
        shape, last = self._shape_of_products(X), X.ndim - 1
        _, own = self.converted(X, last, self.sizes, of=0)
        terms = TensorSpace(shape, X.partition, X.dtype, [COPIES], X.name)
        Y, laid_out = self.converted(terms, self.output_layout)

        def affine(x: Tensor) -> Tensor:
            return laid_out(self._term(own(x)))

        return laid_out_as(Y, affine)

    def _term(self, x: Tensor) -> Tensor:
        """This worker's term of the output."""
        many = self.pieces
        if not many:
            return self._products(x, self.weight, self.bias)
        biases = [self.bias, *[None] * (many - 1)]
        every = zip(cut(x, many, -1), cut(self.weight, many, 1), biases, strict=True)
        return summed([self._products(*one) for one in every])
