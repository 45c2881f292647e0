"""Elementwise losses, and their base class: each worker's terms are torch's, of its blocks, and an
all-reduce gives their sum to all workers. Losses over classes are in `linop.layers.cross_entropy`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from linop.backends.autograd.dtypes import torch_dtype
from linop.errors import ArgumentError, DTypeError, ShapeError
from linop.layers.layer import Function, Layer, zero_volume_result
from linop.layers.moments import wide
from linop.layers.parameters.weights import hold_buffer
from linop.operators.named_movement import collective
from linop.spaces.decomposition import COPIES, REPLICATED
from linop.spaces.partition import Partition
from linop.spaces.tensor import TensorSpace

Measure = Callable[[Tensor, Tensor], tuple[Tensor, Any, Any]]
"""From this worker's blocks of input and target: the terms of the loss, or their sum; the sum of
their weights, if the mean divides by that, else 0; and 1 if a value is not as `Loss.expected` says,
else 0."""


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
    """

    reductions: tuple[str, ...] = ("none", "mean", "sum")

    def __init__(self, P_x: Partition, reduction: str) -> None:
        if reduction not in self.reductions:
            raise ArgumentError(
                f"{self._name}: reduction={reduction!r}; one of {', '.join(self.reductions)} "
                f"expected"
            )
        super().__init__([P_x, P_x], P_x if reduction == "none" else None)
        self.reduction = reduction

    def forward(  # type: ignore[override]  # of two tensors, no more
        self, input: Tensor | None = None, target: Tensor | None = None
    ) -> Tensor:
        """The loss. A worker outside of `P_x` passes zero-volume tensors, or None."""
        return super().forward(input, target)

    # To be overridden

    def check(self, X: TensorSpace, T: TensorSpace) -> None:
        """Check that a target T fits an input X.

        Raises:
            ShapeError, DTypeError: it does not; on every worker.
        """
        if (X.global_shape, X.bounds, X.axes) != (T.global_shape, T.bounds, T.axes):
            raise ShapeError(
                f"{self._name}: an input of shape {X.global_shape} in blocks {X.bounds}, and a "
                f"target of shape {T.global_shape} in blocks {T.bounds}; the same expected"
            )
        if X.dtype != T.dtype:
            raise DTypeError(
                f"{self._name}: an input of {X.dtype} and a target of {T.dtype}; convert one of "
                f"them"
            )

    def expected(self, X: TensorSpace) -> str:
        """Description of valid values, for errors; empty if all are valid."""
        del X
        return ""

    def count(self, X: TensorSpace, T: TensorSpace) -> int | None:
        """Divisor of the mean; None if it is the sum of the weights."""
        del T
        return prod(X.global_shape)

    def measure(self, X: TensorSpace, T: TensorSpace) -> Measure:
        """The `Measure` for this worker's blocks. Collective; its result is called on workers of
        `P_x` only."""
        raise NotImplementedError

    def finish(self, X: TensorSpace, T: TensorSpace) -> Function:
        """Function from a worker's terms to its block of the result, for reduction "none"."""
        del X, T
        return lambda terms: terms

    # Binding

    def bind(self, *inputs: TensorSpace) -> Function:
        X, T = inputs
        dtype, result = torch_dtype(wide(self, X)), torch_dtype(X.dtype)
        self.check(X, T)
        mine = TensorSpace((3,), X.partition, wide(self, X), [COPIES] * X.partition.ndim)
        everyone = mine.like(Partition((self._agreement.workers,)), [REPLICATED])
        total = self.moved(collective, "R", f"{X.partition}→all", mine, everyone)
        measure, finish, count = self.measure(X, T), self.finish(X, T), self.count(X, T)
        expected, inside = self.expected(X), self.worker in X.partition

        def judged(wrong: Any) -> None:
            if expected and wrong > 0:
                raise ArgumentError(
                    f"{self._name}: {expected} expected; {int(wrong)} blocks hold others"
                )

        def measured(x: Tensor, t: Tensor) -> tuple[Tensor, Any, Any]:
            return measure(x.to(dtype), t.to(dtype) if t.is_floating_point() else t)

        def reduced(x: Tensor, t: Tensor) -> Tensor:
            numbers = _vector(dtype, *measured(x, t)) if inside else zero_volume_result(X, x, t)
            loss: Tensor
            loss, weight, wrong = total(numbers)
            judged(wrong)
            if self.reduction != "sum":
                loss = loss / (weight if count is None else count)
            return loss.to(result)

        def each(x: Tensor, t: Tensor) -> Tensor:
            terms, _, wrong = measured(x, t) if inside else (zero_volume_result(X, x, t), 0, 0)
            if expected:
                with torch.no_grad():
                    judged(total(_vector(dtype, 0, 0, wrong) if inside else None)[2])
            return finish(terms).to(result)

        return each if self.reduction == "none" else reduced

    def extra_repr(self) -> str:
        return f"{self.inputs[0]}, reduction={self.reduction!r}"


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


class _Elementwise(Loss):
    """Base class of torch's losses with one term for each element.

    Args:
        function: its name in torch.nn.functional.
        weights: tensors of weights, by parameter name, which broadcast to the input; None for none.
        options: its other arguments.
    """

    def __init__(
        self,
        P_x: Partition,
        reduction: str,
        function: str,
        weights: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(P_x, reduction)
        apiece = "none" if reduction == "none" else "sum"
        self._torch_s = partial(getattr(functional, function), reduction=apiece, **options)
        self._weights = tuple(name for name, given in (weights or {}).items() if given is not None)
        for name, given in (weights or {}).items():
            whole_buffer(self, name, given)
        try:
            self._torch_s(torch.zeros(1), torch.zeros(1))
        except (RuntimeError, TypeError, ValueError) as error:
            raise ArgumentError(f"{self._name}: {str(error).splitlines()[0]}") from None

    def check(self, X: TensorSpace, T: TensorSpace) -> None:
        super().check(X, T)
        for name in self._weights:
            shape = self.spaces[name].global_shape
            pairs = zip(reversed(shape), reversed(X.global_shape), strict=False)
            if len(shape) > X.ndim or any(m not in (1, n) for m, n in pairs):
                raise ShapeError(
                    f"{self._name}: {name} of shape {shape} for an input of shape {X.global_shape}"
                )

    def measure(self, X: TensorSpace, T: TensorSpace) -> Measure:
        where = X.slices(self.worker) if self.worker in X.partition else ()

        def terms(x: Tensor, t: Tensor) -> tuple[Tensor, int, int]:
            weights = {
                name: getattr(self, name).to(x.dtype).expand(X.global_shape)[where]
                for name in self._weights
            }
            return self._torch_s(x, t, **weights), 0, 0

        return terms


class MSELoss(_Elementwise):
    __doc__ = Loss.__doc__

    def __init__(self, P_x: Partition, *, reduction: str = "mean") -> None:
        super().__init__(P_x, reduction, "mse_loss")


class L1Loss(_Elementwise):
    __doc__ = Loss.__doc__

    def __init__(self, P_x: Partition, *, reduction: str = "mean") -> None:
        super().__init__(P_x, reduction, "l1_loss")


class SmoothL1Loss(_Elementwise):
    __doc__ = Loss.__doc__

    def __init__(self, P_x: Partition, *, reduction: str = "mean", beta: float = 1.0) -> None:
        super().__init__(P_x, reduction, "smooth_l1_loss", beta=beta)


class HuberLoss(_Elementwise):
    __doc__ = Loss.__doc__

    def __init__(self, P_x: Partition, *, reduction: str = "mean", delta: float = 1.0) -> None:
        super().__init__(P_x, reduction, "huber_loss", delta=delta)


class KLDivLoss(_Elementwise):
    __doc__ = Loss.__doc__
    reductions = ("none", "mean", "sum", "batchmean")

    def __init__(
        self, P_x: Partition, *, reduction: str = "mean", log_target: bool = False
    ) -> None:
        super().__init__(P_x, reduction, "kl_div", log_target=log_target)

    def count(self, X: TensorSpace, T: TensorSpace) -> int | None:
        return X.global_shape[0] if self.reduction == "batchmean" else super().count(X, T)


class BCELoss(_Elementwise):
    __doc__ = Loss.__doc__

    def __init__(
        self, P_x: Partition, weight: Tensor | None = None, *, reduction: str = "mean"
    ) -> None:
        super().__init__(P_x, reduction, "binary_cross_entropy", {"weight": weight})

    def expected(self, X: TensorSpace) -> str:
        del X
        return "elements of the input between 0 and 1"

    def measure(self, X: TensorSpace, T: TensorSpace) -> Measure:
        inside = super().measure(X, T)

        def terms(x: Tensor, t: Tensor) -> tuple[Tensor, Any, Any]:
            if ((x >= 0) & (x <= 1)).all():
                return inside(x, t)
            return x.new_zeros(()), 0, 1

        return terms


class BCEWithLogitsLoss(_Elementwise):
    __doc__ = Loss.__doc__

    def __init__(
        self,
        P_x: Partition,
        weight: Tensor | None = None,
        *,
        reduction: str = "mean",
        pos_weight: Tensor | None = None,
    ) -> None:
        weights = {"weight": weight, "pos_weight": pos_weight}
        super().__init__(P_x, reduction, "binary_cross_entropy_with_logits", weights)
