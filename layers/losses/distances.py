"""Losses of distances between vectors, whose dimension may be split too: workers exchange a few
numbers for each vector, never the vectors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from linop.errors import ArgumentError, PartitionError, ShapeError
from linop.layers.losses.loss import Loss, Measure, without_dimension
from linop.layers.reductions import norms_over, summed_over
from linop.spaces.decomposition import COPIES, REPLICATED, Axis
from linop.spaces.partition import Partition
from linop.spaces.tensor import TensorSpace

_SMALL = 1e-12
"""The number that torch adds to squared lengths in a cosine."""


class CosineEmbeddingLoss(Loss):
    """How far the cosine of two vectors is from 1, or above a margin, as the target says, 1 or -1;
    see `Loss`.

    Args:
        P_x: the partition of both inputs: batch, features; or features alone. Every worker passes
            the block of the target, of shape (batch,), that belongs to its block of the input: the
            same one along the grid axis that splits the features. With reduction "none", the result
            is cut in the same way, and replicated along that axis.
        margin, reduction: as in torch.nn.

    Raises:
        ShapeError, DTypeError: from a call, the three do not fit each other; on every worker.

    Example:
        >>> P, t = linop.Partition((1, 2)), torch.tensor([1, 1])
        >>> x, y = torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> blocks = [(*halves, t) for halves in zip(x.chunk(2, dim=1), y.chunk(2, dim=1))]
        >>> linop.launch(
        ...     lambda b: layers.CosineEmbeddingLoss(P)(*blocks[b.worker]).item(), workers=2
        ... )
        [0.5, 0.5]
        >>> torch.nn.CosineEmbeddingLoss()(x, y, t).item()
        0.5
    """

    names = ("input1", "input2", "target")

    def __init__(self, P_x: Partition, margin: float = 0.0, *, reduction: str = "mean") -> None:
        super().__init__(P_x, reduction)
        self.margin = margin

    def axes(self, number: int, ndim: int) -> Sequence[Axis]:
        if number < 2:
            return super().axes(number, ndim)
        return without_dimension(self.inputs[0], ndim, ndim, COPIES)

    def check(self, X: TensorSpace, *others: TensorSpace) -> None:
        if X.ndim not in (1, 2):
            raise ShapeError(
                f"{self._name}: an input1 of shape {X.global_shape}; (batch, features) or "
                f"(features,) expected"
            )
        self.check_blocks(X, "input2", others[0])
        self.check_dtype(X, "input2", others[0])
        self.check_blocks(X, "target", others[1], without=X.ndim - 1)

    def count(self, X: TensorSpace, *others: TensorSpace) -> int | None:
        return prod(X.global_shape[:-1])

    def shared(self, X: TensorSpace) -> Collection[int]:
        return (X.ndim - 1,)

    def measure(self, X: TensorSpace, *others: TensorSpace) -> Measure:
        # The three sums of a pair of vectors travel together, in a first dimension.
        three = TensorSpace(
            (3, *X.global_shape),
            X.partition,
            X.dtype,
            [axis + 1 if isinstance(axis, int) else axis for axis in X.axes],
            bounds={d + 1: cuts for d, cuts in enumerate(X.bounds)},
        )
        total = summed_over(self, three, [X.ndim], REPLICATED)

        def terms(x: Tensor, y: Tensor, t: Tensor) -> tuple[Tensor, int, int]:
            parts = torch.stack([(a * b).sum(-1, True) for a, b in ((x, y), (x, x), (y, y))])
            product, one, other = total(parts).squeeze(-1)
            cosine = product / ((one + _SMALL) * (other + _SMALL)).sqrt()
            above = (cosine - self.margin).clamp_min(0)
            each = torch.where(t == 1, 1 - cosine, 0) + torch.where(t == -1, above, 0)
            return (each if self.reduction == "none" else each.sum()), 0, 0

        return terms


class TripletMarginLoss(Loss):
    """How much nearer an anchor is to a positive than to a negative, less than a margin; see
    `Loss`. Distances are along the last dimension, which may be split.

    Args:
        P_x: the partition of anchor, positive and negative; grid axis k splits dimension k. With
            reduction "none", the result is cut as these are, without the last dimension, and
            replicated along the grid axis that splits that.
        margin, p, eps, swap, reduction: as in torch.nn.

    Raises:
        ArgumentError: the margin is not above 0. ShapeError, DTypeError: from a call, the three do
            not fit each other; on every worker.

    Example:
        >>> P, x = linop.Partition((1, 2)), torch.tensor([[[0.0, 0.0]], [[3.0, 4.0]], [[0.0, 1.0]]])
        >>> blocks = x.chunk(2, dim=2)  # of anchor, positive and negative
        >>> linop.launch(
        ...     lambda b: layers.TripletMarginLoss(P, eps=0)(*blocks[b.worker]).item(), workers=2
        ... )
        [5.0, 5.0]
        >>> torch.nn.TripletMarginLoss(eps=0)(*x).item()
        5.0
    """

    names = ("anchor", "positive", "negative")

    def __init__(
        self,
        P_x: Partition,
        margin: float = 1.0,
        p: float = 2.0,
        eps: float = 1e-6,
        swap: bool = False,
        *,
        reduction: str = "mean",
    ) -> None:
        super().__init__(P_x, reduction)
        if not margin > 0:
            raise ArgumentError(f"{self._name}: margin={margin}; a number above 0 expected")
        self.margin, self.p, self.eps, self.swap = margin, float(p), eps, swap

    def check(self, X: TensorSpace, *others: TensorSpace) -> None:
        if not X.ndim:
            raise ShapeError(f"{self._name}: an anchor without dimensions; (…, features) expected")
        super().check(X, *others)

    def count(self, X: TensorSpace, *others: TensorSpace) -> int | None:
        return prod(X.global_shape[:-1])

    def shared(self, X: TensorSpace) -> Collection[int]:
        return (X.ndim - 1,)

    def distances(self, X: TensorSpace) -> Callable[..., Sequence[Tensor]]:
        """Function from pairs of blocks to their distances. Collective."""
        norms = norms_over(self, X, (X.ndim - 1,), self.p, 3 if self.swap else 2)

        def between(*pairs: tuple[Tensor, Tensor]) -> Sequence[Tensor]:
            return norms(*(x - y + self.eps for x, y in pairs)).squeeze(-2).unbind(-1)

        return between

    def measure(self, X: TensorSpace, *others: TensorSpace) -> Measure:
        distances = self.distances(X)

        def terms(anchor: Tensor, positive: Tensor, negative: Tensor) -> tuple[Tensor, int, int]:
            pairs = [(anchor, positive), (anchor, negative), (positive, negative)]
            near, far, *swapped = distances(*pairs[: 3 if self.swap else 2])
            if swapped:
                far = torch.minimum(far, swapped[0])
            each = (self.margin + near - far).clamp_min(0)
            return (each if self.reduction == "none" else each.sum()), each.numel(), 0

        return terms


class TripletMarginWithDistanceLoss(TripletMarginLoss):
    """`TripletMarginLoss` with a distance of your own; see `Loss`.

    Args:
        P_x: the partition of anchor, positive and negative. With a distance function, it splits
            the batch, dimension 0, alone: the function gets blocks.
        distance_function: from two blocks to their distances, the batch first, as in torch.nn; by
            default the Euclidean distance along the last dimension, which may be split.
        margin, swap, reduction: as in torch.nn.

    Raises:
        PartitionError: there is a distance function, and `P_x` splits more than the batch.
            ArgumentError: the margin is not above 0. ShapeError, DTypeError: from a call, the three
            do not fit each other; on every worker.

    Example:
        >>> P = linop.Partition((2,))
        >>> x = torch.tensor([[[0.0], [0.0]], [[2.0], [4.0]], [[1.0], [9.0]]])
        >>> far = lambda x, y: (x - y).abs().sum(-1)
        >>> def main(backend):
        ...     loss = layers.TripletMarginWithDistanceLoss(P, distance_function=far)
        ...     return loss(*x.chunk(2, dim=1)[backend.worker]).item()  # anchor, positive, negative
        >>> linop.launch(main, workers=2)
        [1.0, 1.0]
        >>> torch.nn.TripletMarginWithDistanceLoss(distance_function=far)(*x).item()
        1.0
    """

    def __init__(
        self,
        P_x: Partition,
        *,
        distance_function: Callable[[Tensor, Tensor], Tensor] | None = None,
        margin: float = 1.0,
        swap: bool = False,
        reduction: str = "mean",
    ) -> None:
        super().__init__(P_x, margin, swap=swap, reduction=reduction)
        self.distance_function = distance_function
        if distance_function is not None and any(n > 1 for n in P_x.shape[1:]):
            raise PartitionError(
                f"{self._name}: {P_x!r} with a distance function, which gets blocks; a grid that "
                f"splits dimension 0 alone expected, as Partition(({P_x.size},))"
            )

    def count(self, X: TensorSpace, *others: TensorSpace) -> int | None:
        return super().count(X, *others) if self.distance_function is None else None

    def shared(self, X: TensorSpace) -> Collection[int]:
        return super().shared(X) if self.distance_function is None else ()

    def distances(self, X: TensorSpace) -> Callable[..., Sequence[Tensor]]:
        given: Any = self.distance_function
        if given is None:
            return super().distances(X)
        return lambda *pairs: [given(x, y) for x, y in pairs]
