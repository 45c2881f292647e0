"""Base class of losses: each worker's terms are of its blocks, and an all-reduce gives their sum to
all workers. The losses are in the other modules of this folder."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from linop.backends.autograd.dtypes import torch_dtype
from linop.backends.autograd.real_calls import really
from linop.errors import ArgumentError, DTypeError, ShapeError
from linop.layers.layer import Function, Layer
from linop.layers.moments import wide
from linop.layers.parameters.weights import hold_buffer
from linop.layers.zero_volume import zero_volume_result
from linop.operators.named_movement import collective
from linop.spaces.decomposition import COPIES, REPLICATED, Axis
from linop.spaces.partition import Partition
from linop.spaces.tensor import TensorSpace

Measure = Callable[..., tuple[Tensor, Any, Any]]
"""From this worker's blocks of the inputs: the terms of the loss, or their sum; the sum of their
weights, if the mean divides by that, else 0; and 1 if a value is not as `Loss.expected` says, else
0."""


class Loss(Layer):
    """Loss between an input and a target, both in the same blocks over `P_x`.

    With reduction "mean" or "sum" every worker of the program gets the loss, workers outside of
    `P_x` too. It is replicated, and counts once: every worker calls ``loss.backward()``, and the
    gradients are those of the sequential loss. The mean is over the global tensor. With "none" the
    result is this worker's block of the terms.

    Args:
        P_x: the partition of input and target; grid axis k splits dimension k.
        reduction: "none", "mean" or "sum".

    Raises:
        ArgumentError: there is no such reduction; or, from a call, some values are not as expected.
            ShapeError, DTypeError: the target does not fit the input. All on every worker.

    Example:
        >>> P, x = linop.Partition((2,)), torch.tensor([1.0, 2.0, 3.0, 6.0])
        >>> def main(backend):
        ...     mine = x.chunk(2)[backend.worker].clone().requires_grad_()
        ...     loss = layers.L1Loss(P)(mine, torch.zeros(2))
        ...     loss.backward()
        ...     return loss.item(), mine.grad.tolist()
        >>> linop.launch(main, workers=2)  # of the mean of all four
        [(3.0, [0.25, 0.25]), (3.0, [0.25, 0.25])]
    """

    reductions: tuple[str, ...] = ("none", "mean", "sum")
    names: tuple[str, ...] = ("input", "target")
    """Names of the tensors, as errors and torch's `forward` say them."""

    def __init__(self, P_x: Partition, reduction: str) -> None:
        if reduction not in self.reductions:
            raise ArgumentError(
                f"{self._name}: reduction={reduction!r}; one of {', '.join(self.reductions)} "
                f"expected"
            )
        super().__init__([P_x] * len(self.names), P_x if reduction == "none" else None)
        self.reduction = reduction

    def forward(self, *tensors: Tensor | None, **named: Tensor | None) -> Tensor:
        """The loss of this worker's blocks, in torch's order, or by torch's names. A worker outside
        of `P_x` passes zero-volume tensors, or None."""
        for name in self.names[len(tensors) :]:
            tensors = (*tensors, named.pop(name, None))
        if named or len(tensors) > len(self.names):
            given = f"{next(iter(named))}=" if named else f"{len(tensors)} tensors"
            raise ArgumentError(f"{self._name}: {given} given; {', '.join(self.names)} expected")
        return super().forward(*tensors)

    # To be overridden

    def check(self, X: TensorSpace, *others: TensorSpace) -> None:
        """Check that the target, and what else there is, fits an input X.

        Raises:
            ShapeError, DTypeError: it does not; on every worker.
        """
        for name, T in zip(self.names[1:], others, strict=True):
            self.check_blocks(X, name, T)
            self.check_dtype(X, name, T)

    def check_blocks(
        self, X: TensorSpace, name: str, T: TensorSpace, without: int | None = None
    ) -> None:
        """Check that a tensor is in the blocks of X.

        Args:
            name: of the tensor.
            without: dimension of X that the tensor lacks; None if it has all.

        Raises:
            ShapeError: it is not; on every worker.
        """
        kept = [d for d in range(X.ndim) if d != without]
        shape, bounds = tuple(X.global_shape[d] for d in kept), tuple(X.bounds[d] for d in kept)
        but = "" if without is None else f" but for dimension {without},"
        if (T.global_shape, T.bounds) != (shape, bounds):
            raise ShapeError(
                f"{self._name}: {_a(self.names[0])} of shape {X.global_shape} in blocks {X.bounds}"
                f", and {_a(name)} of shape {T.global_shape} in blocks {T.bounds}; the same{but} "
                f"expected"
            )

    def check_dtype(self, X: TensorSpace, name: str, T: TensorSpace) -> None:
        """Check that a tensor has the dtype of X.

        Raises:
            DTypeError: it has not; on every worker.
        """
        if X.dtype != T.dtype:
            raise DTypeError(
                f"{self._name}: {_a(self.names[0])} of {X.dtype} and {_a(name)} of {T.dtype}; "
                f"convert one of them"
            )

    def expected(self, X: TensorSpace) -> str:
        """Description of valid values, for errors; empty if all are valid."""
        del X
        return ""

    def count(self, X: TensorSpace, *others: TensorSpace) -> int | None:
        """Divisor of the mean; None if it is the sum of the weights."""
        del others
        return prod(X.global_shape)

    def shared(self, X: TensorSpace) -> Collection[int]:
        """Dimensions of X along which terms are replicated: they were summed over these."""
        del X
        return ()

    def measure(self, X: TensorSpace, *others: TensorSpace) -> Measure:
        """The `Measure` for this worker's blocks. Collective; its result is called on workers of
        `P_x` only."""
        raise NotImplementedError

    def finish(self, X: TensorSpace, *others: TensorSpace) -> Function:
        """Function from a worker's terms to its block of the result, for reduction "none"."""
        del X, others
        return lambda terms: terms

    def output_axes(self, grid: Partition, ndim: int) -> Sequence[Axis]:
        return ()  # dimensions of the input are missing in most; `Elementwise` knows

    # Binding

    def bind(self, *inputs: TensorSpace) -> Function:
        X, dtype = inputs[0], torch_dtype(wide(self, inputs[0]))
        result = torch_dtype(X.dtype)
        self.check(*inputs)
        shared = self.shared(X)
        roles = [REPLICATED if axis in shared else COPIES for axis in X.axes]
        mine = TensorSpace((3,), X.partition, wide(self, X), roles)
        everyone = mine.like(Partition((self._agreement.workers,)), [REPLICATED])
        total = self.moved(collective, "R", f"{X.partition}→all", mine, everyone)
        measure, finish, count = self.measure(*inputs), self.finish(*inputs), self.count(*inputs)
        expected, inside = self.expected(X), self.worker in X.partition

        def judge(wrong: Any) -> Sequence[Tensor]:
            if wrong > 0:
                raise ArgumentError(
                    f"{self._name}: {expected} expected; {int(wrong)} blocks hold others"
                )
            return ()

        def judged(wrong: Any) -> None:
            if expected:
                really(self, judge, (), wrong.detach())

        def measured(*blocks: Tensor) -> tuple[Tensor, Any, Any]:
            return measure(*(x.to(dtype) if x.is_floating_point() else x for x in blocks))

        def reduced(*blocks: Tensor) -> Tensor:
            numbers = (
                _vector(dtype, *measured(*blocks)) if inside else zero_volume_result(X, *blocks)
            )
            loss: Tensor
            loss, weight, wrong = total(numbers)
            judged(wrong)
            if self.reduction != "sum":
                loss = loss / (weight if count is None else count)
            return loss.to(result)

        def each(*blocks: Tensor) -> Tensor:
            terms, _, wrong = (
                measured(*blocks) if inside else (zero_volume_result(X, *blocks), 0, 0)
            )
            if expected:
                with torch.no_grad():
                    judged(total(_vector(dtype, 0, 0, wrong) if inside else None)[2])
            return (finish(terms) if inside else terms).to(result)

        return each if self.reduction == "none" else reduced

    def extra_repr(self) -> str:
        return f"{self.inputs[0]}, reduction={self.reduction!r}"


def _a(name: str) -> str:
    return f"an {name}" if name[0] in "aei" else f"a {name}"


def _vector(dtype: Any, *numbers: Any) -> Tensor:
    return torch.stack([torch.as_tensor(number).to(dtype) for number in numbers])


def whole_buffer(layer: Layer, name: str, whole: Tensor | None) -> None:
    """Register a buffer that every worker of the input's partition holds whole."""
    if whole is None:
        layer.register_buffer(name, None)
        return
    (grid, *_) = layer.inputs
    axes = [REPLICATED] * grid.ndim
    hold_buffer(layer, name, TensorSpace(whole.shape, grid, axes=axes), whole)


def check_weight(layer: Layer, classes: int) -> None:
    """Check that the buffer `weight`, if there is one, has a number for each class.

    Raises:
        ShapeError: it has not; on every worker.
    """
    # On workers outside of the partition the buffer is None; its space is known to all.
    shape = layer.spaces["weight"].global_shape if "weight" in layer.spaces else (classes,)
    if shape != (classes,):
        raise ShapeError(f"{layer._name}: weight of shape {shape} for {classes} classes")


def without_dimension(grid: Partition, ndim: int, dim: int, role: Axis) -> list[Axis]:
    """Roles of the grid axes of an input, for a tensor that lacks one of its dimensions.

    Args:
        ndim: dimensions of the tensor that lacks one.
        dim: the dimension.
        role: of the grid axis that splits it.
    """
    whole = range(ndim + 1)
    left = [role if d == dim else d - (d > dim) for d in whole]
    return left[: grid.ndim]
