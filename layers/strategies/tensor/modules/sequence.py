"""Modules on a split sequence: norms, and modules without parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from linop.backends.autograd.dtypes import numpy_dtype
from linop.errors import PartitionError
from linop.layers.layer import Function
from linop.spaces.decomposition import COPIES, REPLICATED
from linop.spaces.tensor import TensorSpace
from linop.strategies.mesh import Axis
from linop.strategies.tensor.layouts import Layout, between
from linop.strategies.tensor.modules import pieces
from linop.strategies.tensor.modules.layer import ParallelLayer, laid_out_as


class SequenceNorm(ParallelLayer):
    """`torch.nn.LayerNorm` or `torch.nn.RMSNorm` of this worker's part of a sequence.

    Weight and bias are replicated, and used by way of E: nothing moves, and their gradients are
    all-reduced in one message; so they are the same on all workers.

    Args:
        axis: the axis.
        whole: the sequential module.
        dim: the dimension that is split.
        input, output: layouts of the input and the output.

    Raises:
        PartitionError: from a call, the split dimension is one of those that are normalised.
    """

    in_pieces = True

    def __init__(self, axis: Axis, whole: Any, dim: int, input: Layout, output: Layout) -> None:
        super().__init__(axis, [input], output)
        self.normalized_shape, self.eps, self.dim = whole.normalized_shape, whole.eps, dim
        self._layer_norm = isinstance(whole, torch.nn.LayerNorm)
        for name in ("weight", "bias") if self._layer_norm else ("weight",):
            self.hold_cut(name, getattr(whole, name), REPLICATED)

    def bind(self, *inputs: TensorSpace) -> Function:
        (X,) = inputs
        first, dim = X.ndim - len(self.normalized_shape), self.dim % X.ndim
        if dim >= first:
            raise PartitionError(
                f"{self._name}: dimension {dim} of a tensor of shape {X.global_shape} is to be "
                f"split; it normalises dimensions {first} to {X.ndim - 1}"
            )
        Y, cut = self.converted(X, dim, of=0)
        Z, laid_out = self.converted(Y, self.output_layout)
        names = [name for name in ("weight", "bias") if name in self.spaces]
        parameters = self._parameters_by_E(names) if names else list

        def normalise(x: Tensor) -> Tensor:
            x = cut(x)
            weight, bias = _two(parameters())
            if not self.pieces:
                return laid_out(self._normalised(x, weight, bias))
            self._check_even(Y, dim)
            every = [pieces.cut(x, self.pieces, dim)]
            for p in weight, bias:
                same = [None] * self.pieces if p is None else pieces.copies(p, self.pieces)
                every.append(same)  # type: ignore[arg-type]
            parts = [self._normalised(*one) for one in zip(*every, strict=True)]
            return laid_out(pieces.joined(parts, dim))

        return laid_out_as(Z, normalise)

    def _normalised(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        shape, eps = self.normalized_shape, self.eps
        if self._layer_norm:
            return torch.nn.functional.layer_norm(x, shape, weight, bias, eps)
        return torch.nn.functional.rms_norm(x, shape, weight, eps)

    def _check_even(self, Y: TensorSpace, dim: int) -> None:
        sizes = [b - a for a, b in Y.bounds[dim]]
        pieces.check_even(self._name, f"elements of dimension {dim}", sizes, self.pieces)

    def _parameters_by_E(self, names: Sequence[str]) -> Any:
        """Function that gives the parameters as independent copies, whose gradients are summed."""
        shape = len(names), *self.normalized_shape
        kind, grid = numpy_dtype(self.dtypes[names[0]]), self.inputs[0]
        whole = TensorSpace(shape, grid, kind, [REPLICATED], "parameters")
        embed = self.moved(between, whole, whole.like(grid, [COPIES]))
        return lambda: embed(torch.stack([getattr(self, name) for name in names])).unbind()


class Pointwise(ParallelLayer):
    """A module without parameters, element by element, on this worker's part of a tensor.

    Args:
        axis: the axis.
        module: the module.
        dim: the dimension that is split.
        input, output: layouts of the input and the output.
    """

    floating = False
    in_pieces = True

    def __init__(self, axis: Axis, module: Any, dim: int, input: Layout, output: Layout) -> None:
        super().__init__(axis, [input], output)
        self.dim, self._module = dim, [module]  # a list: no submodule, whose name would be in paths

    def bind(self, *inputs: TensorSpace) -> Function:
        (X,) = inputs
        Y, cut = self.converted(X, self.dim, of=0)
        Z, laid_out = self.converted(Y, self.output_layout)
        (module,) = self._module
        return laid_out_as(Z, lambda x: laid_out(module(cut(x))))


def _two(given: Any) -> tuple[Tensor | None, Tensor | None]:
    """Weight and bias, where None stands for an absent one."""
    return (*given, None, None)[:2]
