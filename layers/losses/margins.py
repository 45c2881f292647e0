"""Margin losses over classes, whose dimension, the last one, may be split too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from linop.errors import ArgumentError, DTypeError, ShapeError
from linop.layers.layer import Function
from linop.layers.losses.elementwise import Elementwise
from linop.layers.losses.loss import (
    Loss,
    Measure,
    check_weight,
    whole_buffer,
    without_dimension,
)
from linop.layers.moments import wide
from linop.layers.reductions import summed_over
from linop.operators.collectives import all_gather, all_reduce
from linop.spaces.decomposition import COPIES, REPLICATED, Axis
from linop.spaces.partition import Partition
from linop.spaces.tensor import TensorSpace


class _OverClasses(Loss):
    """Base class of losses whose terms are averages over classes, the last dimension of the input.

    With reduction "none", the result is cut as the input without that dimension, and replicated
    along the grid axis that splits it.
    """

    def count(self, X: TensorSpace, *others: TensorSpace) -> int | None:
        return prod(X.global_shape[:-1])

    def check(self, X: TensorSpace, *others: TensorSpace) -> None:
        if not X.ndim or not X.global_shape[-1]:
            raise ShapeError(
                f"{self._name}: an input of shape {X.global_shape}; (…, classes) expected"
            )

    def output_axes(self, grid: Partition, ndim: int) -> Sequence[Axis]:
        return ()

    def parts(self, X: TensorSpace) -> Callable[[Tensor], Tensor]:
        """Function from this worker's parts of the averages, of the shape of its block of X, to
        what `Measure` wants."""
        classes = X.global_shape[-1]
        each = self.reduction == "none"
        return lambda x: (x.sum(-1) if each else x.sum()) / classes

    def finish(self, X: TensorSpace, *others: TensorSpace) -> Function:
        summed = summed_over(self, X, [X.ndim - 1], REPLICATED)
        return lambda terms: summed(terms.unsqueeze(-1)).squeeze(-1)


class MultiLabelSoftMarginLoss(_OverClasses, Elementwise):
    """Binary cross entropies of all classes, averaged over these; see `Loss`.

    Args:
        P_x: the partition of input and target, (…, classes); grid axis k splits dimension k. With
            reduction "none", the result is cut as the input without the classes, and replicated
            along the grid axis that splits them.
        weight: of each class; the whole of it on every worker.
        reduction: "none", "mean" or "sum".

    Raises:
        ShapeError, DTypeError: from a call, the target does not fit the input; on every worker.

    Example:
        >>> P, x = linop.Partition((1, 2)), torch.tensor([[200.0, -200.0]])
        >>> t = torch.tensor([[0.0, 1.0]])
        >>> blocks = list(zip(x.chunk(2, dim=1), t.chunk(2, dim=1)))
        >>> linop.launch(
        ...     lambda b: layers.MultiLabelSoftMarginLoss(P)(*blocks[b.worker]).item(), workers=2
        ... )
        [200.0, 200.0]
        >>> torch.nn.MultiLabelSoftMarginLoss()(x, t).item()
        200.0
    """

    def __init__(
        self, P_x: Partition, weight: Tensor | None = None, *, reduction: str = "mean"
    ) -> None:
        weights = {"weight": weight}
        Elementwise.__init__(self, P_x, reduction, "binary_cross_entropy_with_logits", weights)

    def check(self, X: TensorSpace, *others: TensorSpace) -> None:
        super().check(X, *others)
        Elementwise.check(self, X, *others)

    def measure(self, X: TensorSpace, *others: TensorSpace) -> Measure:
        inside, parts = Elementwise.measure(self, X, *others), self.parts(X)

        def terms(*blocks: Tensor) -> tuple[Tensor, Any, Any]:
            loss, _, _ = inside(*blocks)
            return parts(loss if loss.ndim else loss.unsqueeze(0)), 0, 0

        return terms


class MultiMarginLoss(_OverClasses):
    """How far the right class is above the others, less than a margin; see `Loss`.

    Args:
        P_x: the partition of the input: batch, classes; or classes alone. Every worker passes the
            block of the target, int64 of shape (batch,), that belongs to its block of the input:
            the same one along the grid axis that splits the classes. With reduction "none", the
            result is cut in the same way, and replicated along that axis.
        p: 1 or 2, the power of what is missing.
        margin: the margin.
        weight: of each class; the whole of it on every worker.
        reduction: "none", "mean" or "sum".

    Raises:
        ArgumentError: there is no such p; or, from a call, a target is no class. ShapeError,
            DTypeError: the target does not fit the input. All on every worker.

    Example:
        >>> P, x = linop.Partition((1, 2)), torch.tensor([[0.0, 2.0], [3.0, 0.0]])
        >>> t = torch.tensor([0, 0])
        >>> blocks = [(half, t) for half in x.chunk(2, dim=1)]  # the target on both
        >>> linop.launch(lambda b: layers.MultiMarginLoss(P)(*blocks[b.worker]).item(), workers=2)
        [0.75, 0.75]
        >>> torch.nn.MultiMarginLoss()(x, t).item()
        0.75
    """

    weight: Tensor | None

    def __init__(
        self,
        P_x: Partition,
        p: int = 1,
        margin: float = 1.0,
        weight: Tensor | None = None,
        *,
        reduction: str = "mean",
    ) -> None:
        super().__init__(P_x, reduction)
        if p not in (1, 2):
            raise ArgumentError(f"{self._name}: p={p!r}; 1 or 2 expected")
        self.p, self.margin = p, margin
        whole_buffer(self, "weight", weight)

    def axes(self, number: int, ndim: int) -> Sequence[Axis]:
        if number == 0:
            return super().axes(number, ndim)
        return without_dimension(self.inputs[0], ndim, ndim, COPIES)

    def check(self, X: TensorSpace, *others: TensorSpace) -> None:
        super().check(X, *others)
        if X.ndim > 2:
            raise ShapeError(
                f"{self._name}: an input of shape {X.global_shape}; (batch, classes) or "
                f"(classes,) expected"
            )
        self.check_blocks(X, "target", others[0], without=X.ndim - 1)
        check_classes(self, others[0])
        check_weight(self, X.global_shape[-1])

    def expected(self, X: TensorSpace) -> str:
        return f"targets from 0 to {X.global_shape[-1] - 1}"

    def measure(self, X: TensorSpace, *others: TensorSpace) -> Measure:
        classes, parts = X.global_shape[-1], self.parts(X)
        where = X.slices(self.worker)[-1] if self.worker in X.partition else slice(0)
        total = summed_over(self, X, [X.ndim - 1], COPIES)

        def terms(x: Tensor, t: Tensor) -> tuple[Tensor, Any, Any]:
            t = t.unsqueeze(-1)
            wrong = ((t < 0) | (t >= classes)).any()
            other = torch.arange(where.start, where.stop, device=x.device) != t
            right = total(torch.where(other, 0, x).sum(-1, keepdim=True))
            missing = (self.margin - right + x).clamp_min(0) ** self.p
            if self.weight is not None:
                missing = missing * self.weight.to(x.dtype)[t.clamp(0, classes - 1)]
            return parts(torch.where(other, missing, 0)), 0, wrong

        return terms


class MultiLabelMarginLoss(_OverClasses):
    """How far the right classes of a sample are above its others, less than 1; see `Loss`.

    Where the classes are split, workers exchange the targets, and the input at these.

    Args:
        P_x: the partition of input and target, (batch, classes) or (classes,). The target, int64,
            lists the right classes of each sample, and ends with -1, if there are fewer than
            classes. With reduction "none", the result is cut as the input without the classes, and
            replicated along the grid axis that splits them.
        reduction: "none", "mean" or "sum".

    Raises:
        ArgumentError: from a call, a target is no class, or -1. ShapeError, DTypeError: the target
            does not fit the input. All on every worker.

    Example:
        >>> P, x = linop.Partition((1, 2)), torch.tensor([[0.0, 2.0, 1.0, 0.0]])
        >>> t = torch.tensor([[3, 0, -1, 1]])
        >>> blocks = list(zip(x.chunk(2, dim=1), t.chunk(2, dim=1)))
        >>> linop.launch(
        ...     lambda b: layers.MultiLabelMarginLoss(P)(*blocks[b.worker]).item(), workers=2
        ... )
        [2.5, 2.5]
        >>> torch.nn.MultiLabelMarginLoss()(x, t).item()
        2.5
    """

    def __init__(self, P_x: Partition, *, reduction: str = "mean") -> None:
        super().__init__(P_x, reduction)

    def check(self, X: TensorSpace, *others: TensorSpace) -> None:
        super().check(X, *others)
        if X.ndim > 2:
            raise ShapeError(
                f"{self._name}: an input of shape {X.global_shape}; (batch, classes) or "
                f"(classes,) expected"
            )
        self.check_blocks(X, "target", others[0])
        check_classes(self, others[0])

    def expected(self, X: TensorSpace) -> str:
        return f"targets from -1, for the end, to {X.global_shape[-1] - 1}"

    def measure(self, X: TensorSpace, *others: TensorSpace) -> Measure:
        classes, parts, last = X.global_shape[-1], self.parts(X), X.ndim - 1
        where = X.slices(self.worker)[-1] if self.worker in X.partition else slice(0)
        cut = [k for k, axis in enumerate(X.axes) if axis == last]
        gather = self.moved(all_gather, others[0], cut) if cut else _itself
        copies = TensorSpace(
            X.global_shape,
            X.partition,
            wide(self, X),
            [COPIES if axis == last else axis for axis in X.axes],
            bounds={d: X.bounds[d] for d in range(last)},
        )
        total = self.moved(all_reduce, copies, cut)

        def terms(x: Tensor, t: Tensor) -> tuple[Tensor, Any, Any]:
            t = gather(t)
            wrong = ((t < -1) | (t >= classes)).any()
            listed = (t >= 0).cumprod(-1).bool()
            here = torch.arange(where.start, where.stop, device=x.device)
            among = listed.unsqueeze(-1) & (t.unsqueeze(-1) == here)  # (…, listed, of this block)
            right = total(torch.where(among, x.unsqueeze(-2), 0).sum(-1))
            missing = (1 - right.unsqueeze(-1) + x.unsqueeze(-2)).clamp_min(0)
            counts = listed.unsqueeze(-1) & ~among.any(-2, keepdim=True)
            return parts(torch.where(counts, missing, 0).sum(-2)), 0, wrong

        return terms


def check_classes(loss: Loss, T: TensorSpace) -> None:
    """Check that a target is of class indices.

    Raises:
        DTypeError: it is not; on every worker.
    """
    if T.dtype != np.int64:
        raise DTypeError(
            f"{loss._name}: a target of {T.dtype}; int64 expected, the classes: use .long()"
        )


def _itself(x: Tensor) -> Tensor:
    return x
