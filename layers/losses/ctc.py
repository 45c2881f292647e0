"""Connectionist temporal classification, cut over the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from linop.backends.autograd.real_calls import by_autograd, really
from linop.errors import ArgumentError, DTypeError, PartitionError, ShapeError
from linop.layers.losses.loss import Loss, Measure
from linop.spaces.decomposition import COPIES, Axis
from linop.spaces.partition import Partition
from linop.spaces.tensor import TensorSpace


class CTCLoss(Loss):
    """The negative logarithm of the probability of a sequence of labels, of all its alignments with
    a longer sequence; see `Loss`.

    Calls take (log_probs, targets, input_lengths, target_lengths): blocks of shapes (T, N, C),
    (N, S), (N,) and (N,), all of the same samples; the last three int32 or int64.

    Args:
        P_x: the partition of `log_probs`: time, batch, classes. It splits the batch alone: a step
            in time needs the one before, and each needs all labels.
        blank, reduction, zero_infinity: as in torch.nn.

    Raises:
        PartitionError: `P_x` splits time or classes. ArgumentError: from a call, a length or a
            label is not possible. ShapeError, DTypeError: the tensors do not fit each other;
            targets that are concatenated, of one dimension, are refused. All on every worker.

    Example:
        >>> P, x = linop.Partition((1, 2)), -torch.tensor([[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]])
        >>> labels, ones = torch.tensor([[1], [2]]), torch.ones(2, dtype=torch.int64)
        >>> def main(backend):
        ...     mine = [x.chunk(2, dim=1), *(y.chunk(2) for y in (labels, ones, ones))]
        ...     return layers.CTCLoss(P)(*(blocks[backend.worker] for blocks in mine)).item()
        >>> linop.launch(main, workers=2)
        [4.0, 4.0]
        >>> torch.nn.CTCLoss()(x, labels, ones, ones).item()
        4.0
    """

    names = ("log_probs", "targets", "input_lengths", "target_lengths")

    def __init__(
        self,
        P_x: Partition,
        blank: int = 0,
        *,
        reduction: str = "mean",
        zero_infinity: bool = False,
    ) -> None:
        super().__init__(P_x, reduction)
        if P_x.ndim > 3 or any(n > 1 for k, n in enumerate(P_x.shape) if k != 1):
            raise PartitionError(
                f"{self._name}: {P_x!r}; a grid that splits the batch alone, dimension 1 of (time, "
                f"batch, classes), expected, as Partition((1, {len(P_x.workers)}, 1))"
            )
        self.blank, self.zero_infinity = blank, zero_infinity

    def axes(self, number: int, ndim: int) -> Sequence[Axis]:
        wanted = (3, 2, 1, 1)[number]
        if ndim != wanted:
            raise ShapeError(
                f"{self._name}: {self.names[number]} of {ndim} dimensions; {wanted} expected: (time"
                f", batch, classes), and targets of shape (batch, labels) with lengths (batch,)"
            )
        grid = self.inputs[0]
        return (
            range(grid.ndim) if number == 0 else [0 if k == 1 else COPIES for k in range(grid.ndim)]
        )

    def check(self, X: TensorSpace, *others: TensorSpace) -> None:
        for name, T in zip(self.names[1:], others, strict=True):
            if (T.global_shape[0], T.bounds[0]) != (X.global_shape[1], X.bounds[1]):
                raise ShapeError(
                    f"{self._name}: log_probs of shape {X.global_shape} in blocks {X.bounds}, and "
                    f"{name} of shape {T.global_shape} in blocks {T.bounds}; the same samples "
                    f"expected"
                )
            if T.dtype.kind != "i" or T.dtype.itemsize < 4:
                raise DTypeError(f"{self._name}: {name} of {T.dtype}; int64 expected")
        if not 0 <= self.blank < X.global_shape[2]:
            raise ArgumentError(f"{self._name}: blank={self.blank} for {X.global_shape[2]} classes")

    def expected(self, X: TensorSpace) -> str:
        return (
            f"input_lengths from 0 to {X.global_shape[0]}, target_lengths up to the number of "
            f"labels, and labels from 0 to {X.global_shape[2] - 1}"
        )

    def count(self, X: TensorSpace, *others: TensorSpace) -> int | None:
        return X.global_shape[1]

    def measure(self, X: TensorSpace, *others: TensorSpace) -> Measure:
        steps, _, classes = X.global_shape
        most = others[0].global_shape[1]

        def losses(
            x: Tensor, targets: Tensor, lengths: Tensor, labels: Tensor, wrong: Tensor
        ) -> list[Tensor]:
            if wrong or not x.shape[1]:
                return [x.sum((0, 2))]
            options = self.blank, "none", self.zero_infinity
            return [torch.nn.functional.ctc_loss(x, targets, lengths, labels, *options)]

        backward = by_autograd(losses)

        def terms(
            x: Tensor, targets: Tensor, lengths: Tensor, labels: Tensor
        ) -> tuple[Tensor, Any, Any]:
            used = torch.arange(most, device=x.device) < labels.unsqueeze(-1)
            wrong = (used & ((targets < 0) | (targets >= classes))).any()
            for given, last in ((lengths, steps), (labels, most)):
                wrong = wrong | ((given < 0) | (given > last)).any()
            arguments = x, targets, lengths, labels, wrong
            form, of_x = ((x.shape[1],), x.dtype), (tuple(x.shape), x.dtype)
            (each,) = really(self, losses, [form], *arguments, derivative=(backward, [of_x]))
            if self.reduction == "mean":
                each = each / labels.clamp_min(1)
            return (each if self.reduction == "none" else each.sum()), 0, wrong

        return terms
