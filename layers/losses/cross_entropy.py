"""Losses over classes, whose dimension may be split too: workers exchange two numbers for each
element of the batch, never the logits."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from linop.errors import ArgumentError, DTypeError, ShapeError
from linop.layers.layer import Function
from linop.layers.losses.loss import (
    Loss,
    Measure,
    check_weight,
    whole_buffer,
    without_dimension,
)
from linop.layers.moments import log_softmax
from linop.layers.reductions import summed_over
from linop.spaces.decomposition import COPIES, REPLICATED, Axis
from linop.spaces.partition import Partition
from linop.spaces.tensor import TensorSpace


class NLLLoss(Loss):
    """The negative logarithm of the probability of the right class; see `Loss`.

    The target has the shape of the input without its dimension of classes, 1. Every worker passes
    the block that belongs to its block of the input: the same one along the grid axis that splits
    the classes. With reduction "none", the result is cut in the same way, and replicated along that
    axis.

    Args:
        P_x: the partition of the input: batch, classes, space. A grid with fewer axes does not
            split the last dimensions.
        weight: of each class; the whole of it on every worker.
        ignore_index: a target that does not count.
        reduction: "none", "mean" (divided by the sum of the weights) or "sum".

    Example:
        >>> P, x = linop.Partition((1, 2)), -torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> t = torch.tensor([0, 1])
        >>> blocks = [(half, t) for half in x.chunk(2, dim=1)]  # the target on both
        >>> linop.launch(lambda b: layers.NLLLoss(P)(*blocks[b.worker]).item(), workers=2)
        [2.5, 2.5]
        >>> torch.nn.NLLLoss()(x, t).item()
        2.5
    """

    label_smoothing = 0.0
    weight: Tensor | None

    def __init__(
        self,
        P_x: Partition,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
    ) -> None:
        super().__init__(P_x, reduction)
        self.ignore_index = ignore_index
        self._split = P_x.ndim > 1 and P_x.shape[1] > 1
        whole_buffer(self, "weight", weight)

    def axes(self, number: int, ndim: int) -> Sequence[Axis]:
        if number == 0:
            self._ndim = ndim  # called for the input before the target
        if number == 0 or ndim == self._ndim:
            return super().axes(number, ndim)
        super().axes(number, ndim + 1)
        return without_dimension(self.inputs[0], ndim, 1, COPIES)

    def check(self, X: TensorSpace, *others: TensorSpace) -> None:
        if X.ndim < 2:
            raise ShapeError(
                f"{self._name}: an input of shape {X.global_shape}; (batch, classes, …) expected"
            )
        (T,) = others
        check_weight(self, X.global_shape[1])
        if self._probabilities(X, T):
            super().check(X, T)
            if self.ignore_index >= 0:
                raise ArgumentError(
                    f"{self._name}: ignore_index={self.ignore_index} with a target of "
                    f"probabilities, which has no such elements"
                )
            return
        self.check_blocks(X, "target", T, without=1)
        if T.dtype != np.int64:
            raise DTypeError(
                f"{self._name}: a target of {T.dtype}; int64 expected, the classes: use .long()"
            )

    def _probabilities(self, X: TensorSpace, T: TensorSpace) -> bool:
        del X, T
        return False

    def expected(self, X: TensorSpace) -> str:
        last = X.global_shape[1] - 1
        return f"targets from 0 to {last}, or ignore_index={self.ignore_index},"

    def count(self, X: TensorSpace, *others: TensorSpace) -> int | None:
        if not self._probabilities(X, *others):
            return None
        # torch's mean is over the elements of the batch, whatever the weights.
        return prod((*X.global_shape[:1], *X.global_shape[2:]))

    def log_probabilities(self, X: TensorSpace) -> Function:
        """Function from a block of the input to its log-probabilities."""
        del X
        return lambda x: x

    def measure(self, X: TensorSpace, *others: TensorSpace) -> Measure:
        logarithms, classes = self.log_probabilities(X), X.global_shape[1]
        where = X.slices(self.worker)[1] if self.worker in X.partition else slice(0)
        smooth, none = self.label_smoothing, self.reduction == "none"
        shape = 1, -1, *[1] * (X.ndim - 2)

        def weighted(x: Tensor) -> tuple[Tensor, Tensor]:
            if self.weight is None:
                return x, x.new_ones(x.shape[1])
            weight = self.weight[where].to(x.dtype)
            return x * weight.view(shape), weight

        def by_index(x: Tensor, t: Tensor) -> tuple[Tensor, Any, Any]:
            x, weight = weighted(logarithms(x))
            counts = t != self.ignore_index
            wrong = (counts & ((t < 0) | (t >= classes))).any()
            mine = counts & (t >= where.start) & (t < where.stop)
            if x.shape[1]:
                at = (t - where.start).clamp(0, x.shape[1] - 1)
                terms = torch.where(mine, -x.gather(1, at.unsqueeze(1)).squeeze(1), 0)
                weights = torch.where(mine, weight[at], 0)
            else:  # zeros that depend on x, whose backward is collective
                terms = weights = x.sum(1)
            if smooth:
                rest = torch.where(counts, -x.sum(1), 0)
                terms = (1 - smooth) * terms + smooth / classes * rest
            return (terms if none else terms.sum()), weights.sum(), wrong

        def by_probability(x: Tensor, t: Tensor) -> tuple[Tensor, Any, Any]:
            x, _ = weighted(logarithms(x))
            if smooth:
                t = t * (1 - smooth) + smooth / classes
            terms = -(x * t)
            return (terms.sum(1) if none else terms.sum()), 0, 0

        return by_probability if self._probabilities(X, *others) else by_index

    def finish(self, X: TensorSpace, *others: TensorSpace) -> Function:
        if not self._split:
            return super().finish(X, *others)
        summed = summed_over(self, X, [1], REPLICATED)
        return lambda terms: summed(terms.unsqueeze(1)).squeeze(1)


class CrossEntropyLoss(NLLLoss):
    """The negative logarithm of the softmax at the right class; see `Loss`.

    Where the classes are split, workers exchange the largest logit of their block, and the sum of
    the exponentials beside it, for each element of the batch.

    The target holds classes: int64, with the shape of the input without its dimension of classes,
    1; every worker passes the block that belongs to its block of the input, the same one along the
    grid axis that splits the classes. Or it holds probabilities, in the blocks of the input. With
    reduction "none", the result is cut as the input without dimension 1, and replicated along the
    axis that splits that.

    Args:
        P_x: the partition of the input: batch, classes, space. A grid with fewer axes does not
            split the last dimensions.
        weight: of each class; the whole of it on every worker.
        ignore_index: a target that does not count.
        reduction: "none", "mean" (divided by the sum of the weights) or "sum".
        label_smoothing: how much of the target is spread over all classes.

    Raises:
        ArgumentError: label_smoothing is not between 0 and 1.

    Example:
        >>> P, x = linop.Partition((1, 2)), torch.tensor([[0.0, 200.0], [400.0, 0.0]])
        >>> t = torch.tensor([0, 1])
        >>> blocks = [(half, t) for half in x.chunk(2, dim=1)]  # the target on both
        >>> linop.launch(lambda b: layers.CrossEntropyLoss(P)(*blocks[b.worker]).item(), workers=2)
        [300.0, 300.0]
        >>> torch.nn.CrossEntropyLoss()(x, t).item()
        300.0
    """

    def __init__(
        self,
        P_x: Partition,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        if not 0 <= label_smoothing <= 1:
            raise ArgumentError(
                f"{self._name}: label_smoothing={label_smoothing}; from 0 to 1 expected"
            )
        super().__init__(P_x, weight, ignore_index=ignore_index, reduction=reduction)
        self.label_smoothing = label_smoothing

    def _probabilities(self, X: TensorSpace, T: TensorSpace) -> bool:
        return T.ndim == X.ndim

    def log_probabilities(self, X: TensorSpace) -> Function:
        if not self._split:
            return lambda x: torch.nn.functional.log_softmax(x, 1)
        return log_softmax(self, X, 1)
