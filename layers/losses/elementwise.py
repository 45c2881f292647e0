"""Losses with a term for each element, which torch computes of a worker's blocks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import log, pi
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from linop.backends.autograd.real_calls import is_tracing
from linop.errors import ArgumentError, ShapeError
from linop.layers.losses.loss import Loss, Measure, whole_buffer, without_dimension
from linop.layers.reductions import spread_over
from linop.spaces.decomposition import REPLICATED, Axis
from linop.spaces.partition import Partition
from linop.spaces.tensor import TensorSpace


class Elementwise(Loss):
    def __init__(
        self,
        P_x: Partition,
        reduction: str,
        function: str,
        weights: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """A loss of torch with one term for each element.

        Args:
            function: its name in torch.nn.functional.
            weights: tensors of weights, by parameter name, which broadcast to the input; None for
                none.
            options: its other arguments.
        """
        super().__init__(P_x, reduction)
        apiece = "none" if reduction == "none" else "sum"
        self._torch_s = partial(getattr(functional, function), reduction=apiece, **options)
        self._weights = tuple(name for name, given in (weights or {}).items() if given is not None)
        for name, given in (weights or {}).items():
            whole_buffer(self, name, given)
        try:
            self._torch_s(*[torch.ones(1)] * len(self.names))
        except (RuntimeError, TypeError, ValueError) as error:
            raise ArgumentError(f"{self._name}: {str(error).splitlines()[0]}") from None

    def check(self, X: TensorSpace, *others: TensorSpace) -> None:
        super().check(X, *others)
        for name in self._weights:
            shape = self.spaces[name].global_shape
            pairs = zip(reversed(shape), reversed(X.global_shape), strict=False)
            if len(shape) > X.ndim or any(m not in (1, n) for m, n in pairs):
                raise ShapeError(
                    f"{self._name}: {name} of shape {shape} for an input of shape {X.global_shape}"
                )

    def output_axes(self, grid: Partition, ndim: int) -> Sequence[Axis]:
        return self.axes(0, ndim)

    def measure(self, X: TensorSpace, *others: TensorSpace) -> Measure:
        where = X.slices(self.worker) if self.worker in X.partition else ()

        def terms(x: Tensor, *others: Tensor) -> tuple[Tensor, int, int]:
            weights = {
                name: getattr(self, name).to(x.dtype).expand(X.global_shape)[where]
                for name in self._weights
            }
            return self._torch_s(x, *others, **weights), 0, 0

        return terms


class MSELoss(Elementwise):
    """Squared differences of input and target; see `Loss`.

    Args:
        P_x: the partition of input and target; grid axis k splits dimension k.
        reduction: "none", "mean" or "sum".

    Raises:
        ShapeError, DTypeError: from a call, the target does not fit the input; on every worker.

    Example:
        >>> P, x, t = linop.Partition((2,)), torch.arange(1.0, 5.0), torch.zeros(4)
        >>> blocks = list(zip(x.chunk(2), t.chunk(2)))
        >>> linop.launch(lambda b: layers.MSELoss(P)(*blocks[b.worker]).item(), workers=2)
        [7.5, 7.5]
        >>> torch.nn.MSELoss()(x, t).item()
        7.5
    """

    def __init__(self, P_x: Partition, *, reduction: str = "mean") -> None:
        super().__init__(P_x, reduction, "mse_loss")


class L1Loss(Elementwise):
    """Absolute differences of input and target; see `Loss`.

    Args:
        P_x: the partition of input and target; grid axis k splits dimension k.
        reduction: "none", "mean" or "sum".

    Raises:
        ShapeError, DTypeError: from a call, the target does not fit the input; on every worker.

    Example:
        >>> P, x, t = linop.Partition((2,)), torch.arange(1.0, 5.0), torch.zeros(4)
        >>> blocks = list(zip(x.chunk(2), t.chunk(2)))
        >>> linop.launch(lambda b: layers.L1Loss(P)(*blocks[b.worker]).item(), workers=2)
        [2.5, 2.5]
        >>> torch.nn.L1Loss()(x, t).item()
        2.5
    """

    def __init__(self, P_x: Partition, *, reduction: str = "mean") -> None:
        super().__init__(P_x, reduction, "l1_loss")


class SmoothL1Loss(Elementwise):
    """Of the absolute difference d of input and target, d²/(2 beta) where d is below `beta`, and
    d - beta/2 elsewhere; see `Loss`.

    Args:
        P_x: the partition of input and target; grid axis k splits dimension k.
        beta: as in torch.nn, not negative; of 0, the loss is `L1Loss`.
        reduction: "none", "mean" or "sum".

    Raises:
        ArgumentError: `beta` is negative. ShapeError, DTypeError: from a call, the target does not
            fit the input; on every worker.

    Example:
        >>> P, x, t = linop.Partition((2,)), torch.arange(1.0, 5.0), torch.zeros(4)
        >>> blocks = list(zip(x.chunk(2), t.chunk(2)))
        >>> linop.launch(lambda b: layers.SmoothL1Loss(P)(*blocks[b.worker]).item(), workers=2)
        [2.0, 2.0]
        >>> torch.nn.SmoothL1Loss()(x, t).item()
        2.0
    """

    def __init__(self, P_x: Partition, *, reduction: str = "mean", beta: float = 1.0) -> None:
        super().__init__(P_x, reduction, "smooth_l1_loss", beta=beta)


class HuberLoss(Elementwise):
    """Of the absolute difference d of input and target, d²/2 where d is at most `delta`, and
    delta (d - delta/2) elsewhere; see `Loss`.

    Args:
        P_x: the partition of input and target; grid axis k splits dimension k.
        delta: as in torch.nn, above 0.
        reduction: "none", "mean" or "sum".

    Raises:
        ArgumentError: `delta` is not above 0. ShapeError, DTypeError: from a call, the target does
            not fit the input; on every worker.

    Example:
        >>> P, x, t = linop.Partition((2,)), torch.arange(1.0, 5.0), torch.zeros(4)
        >>> blocks = list(zip(x.chunk(2), t.chunk(2)))
        >>> linop.launch(lambda b: layers.HuberLoss(P)(*blocks[b.worker]).item(), workers=2)
        [2.0, 2.0]
        >>> torch.nn.HuberLoss()(x, t).item()
        2.0
    """

    def __init__(self, P_x: Partition, *, reduction: str = "mean", delta: float = 1.0) -> None:
        super().__init__(P_x, reduction, "huber_loss", delta=delta)


class KLDivLoss(Elementwise):
    """The Kullback-Leibler divergence of a target from an input of logarithms, t (log t - x) of
    each element; see `Loss`.

    Args:
        P_x: the partition of input and target; grid axis k splits dimension k.
        log_target: True: the target has logarithms, too.
        reduction: "none", "mean", "batchmean" (the sum divided by the extent of dimension 0) or
            "sum".

    Raises:
        ShapeError, DTypeError: from a call, the target does not fit the input; on every worker.

    Example:
        >>> P, x, t = linop.Partition((2,)), -torch.arange(1.0, 5.0), torch.ones(4)
        >>> blocks = list(zip(x.chunk(2), t.chunk(2)))
        >>> linop.launch(
        ...     lambda b: layers.KLDivLoss(P, reduction="batchmean")(*blocks[b.worker]).item(),
        ...     workers=2,
        ... )
        [2.5, 2.5]
        >>> torch.nn.KLDivLoss(reduction="batchmean")(x, t).item()
        2.5
    """

    reductions = ("none", "mean", "sum", "batchmean")

    def __init__(
        self, P_x: Partition, *, reduction: str = "mean", log_target: bool = False
    ) -> None:
        super().__init__(P_x, reduction, "kl_div", log_target=log_target)

    def count(self, X: TensorSpace, *others: TensorSpace) -> int | None:
        return X.global_shape[0] if self.reduction == "batchmean" else super().count(X, *others)


class BCELoss(Elementwise):
    """Binary cross entropies of probabilities; see `Loss`.

    Args:
        P_x: the partition of input and target; grid axis k splits dimension k.
        weight: of the terms, which broadcasts to the input; the whole of it on every worker.
        reduction: "none", "mean" or "sum".

    Raises:
        ArgumentError: from a call, an element of input or target is not between 0 and 1.
            ShapeError, DTypeError: the target does not fit the input. All on every worker.

    Example:
        >>> P, x = linop.Partition((2,)), torch.tensor([1.0, 1.0, 0.0, 0.0])
        >>> t = torch.tensor([1.0, 1.0, 0.0, 1.0])  # of the last, log 0: -100, as torch has it
        >>> blocks = list(zip(x.chunk(2), t.chunk(2)))
        >>> linop.launch(lambda b: layers.BCELoss(P)(*blocks[b.worker]).item(), workers=2)
        [25.0, 25.0]
        >>> torch.nn.BCELoss()(x, t).item()
        25.0
    """

    def __init__(
        self, P_x: Partition, weight: Tensor | None = None, *, reduction: str = "mean"
    ) -> None:
        super().__init__(P_x, reduction, "binary_cross_entropy", {"weight": weight})

    def expected(self, X: TensorSpace) -> str:
        del X
        return "elements of input and target between 0 and 1"

    def measure(self, X: TensorSpace, *others: TensorSpace) -> Measure:
        inside = super().measure(X, *others)

        def terms(x: Tensor, t: Tensor) -> tuple[Tensor, Any, Any]:
            right = (x >= 0) & (x <= 1) & (t >= 0) & (t <= 1)
            loss, weight, _ = inside(torch.where(right, x, 0.5), torch.where(right, t, 0.5))
            return loss, weight, ~right.all()

        return terms


class BCEWithLogitsLoss(Elementwise):
    """Binary cross entropies of the sigmoids of an input, computed without overflow; see `Loss`.

    Args:
        P_x: the partition of input and target; grid axis k splits dimension k.
        weight: of the terms, which broadcasts to the input; the whole of it on every worker.
        pos_weight: of the terms of a target of 1, likewise.
        reduction: "none", "mean" or "sum".

    Raises:
        ShapeError, DTypeError: from a call, the target does not fit the input; on every worker.

    Example:
        >>> P, x = linop.Partition((2,)), torch.tensor([100.0, 200.0, -100.0, -200.0])
        >>> t = torch.tensor([0.0, 0.0, 1.0, 1.0])
        >>> blocks = list(zip(x.chunk(2), t.chunk(2)))
        >>> linop.launch(lambda b: layers.BCEWithLogitsLoss(P)(*blocks[b.worker]).item(), workers=2)
        [150.0, 150.0]
        >>> torch.nn.BCEWithLogitsLoss()(x, t).item()
        150.0
    """

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


class PoissonNLLLoss(Elementwise):
    """The negative log-likelihood of a target of counts, of a Poisson distribution with the input
    as its mean, exp(x) - t x; see `Loss`.

    Args:
        P_x: the partition of input and target; grid axis k splits dimension k.
        log_input, full, eps: as in torch.nn; log_input=False takes the mean itself, x - t log x.
        reduction: "none", "mean" or "sum".

    Raises:
        ShapeError, DTypeError: from a call, the target does not fit the input; on every worker.

    Example:
        >>> P, x, t = linop.Partition((2,)), torch.arange(1.0, 5.0), torch.zeros(4)
        >>> blocks = list(zip(x.chunk(2), t.chunk(2)))
        >>> linop.launch(
        ...     lambda b: layers.PoissonNLLLoss(P, log_input=False)(*blocks[b.worker]).item(),
        ...     workers=2,
        ... )
        [2.5, 2.5]
        >>> torch.nn.PoissonNLLLoss(log_input=False)(x, t).item()
        2.5
    """

    def __init__(
        self,
        P_x: Partition,
        log_input: bool = True,
        full: bool = False,
        *,
        eps: float = 1e-8,
        reduction: str = "mean",
    ) -> None:
        options: dict[str, Any] = {"log_input": log_input, "full": full, "eps": eps}
        super().__init__(P_x, reduction, "poisson_nll_loss", **options)


class SoftMarginLoss(Elementwise):
    """Logistic losses log(1 + exp(-t x)) of a target of 1 and -1, which may be of whole numbers;
    see `Loss`.

    Args:
        P_x: the partition of input and target; grid axis k splits dimension k.
        reduction: "none", "mean" or "sum".

    Raises:
        ShapeError, DTypeError: from a call, the target does not fit the input; on every worker.

    Example:
        >>> P, x, t = linop.Partition((2,)), torch.arange(4.0), torch.tensor([1.0, -1.0, 1.0, -1.0])
        >>> blocks = list(zip(x.chunk(2), t.chunk(2)))
        >>> losses = linop.launch(lambda b: layers.SoftMarginLoss(P)(*blocks[b.worker]), workers=2)
        >>> torch.allclose(torch.stack(losses), torch.nn.SoftMarginLoss()(x, t))
        True
    """

    def __init__(self, P_x: Partition, *, reduction: str = "mean") -> None:
        super().__init__(P_x, reduction, "soft_margin_loss")

    def check_dtype(self, X: TensorSpace, name: str, T: TensorSpace) -> None:
        """Whole numbers will do, as in torch."""
        if T.dtype.kind == "c":
            super().check_dtype(X, name, T)


class HingeEmbeddingLoss(SoftMarginLoss):
    """The input where the target is 1; what it lacks of a margin where the target is -1. The target
    may be of whole numbers; see `Loss`.

    Args:
        P_x: the partition of input and target; grid axis k splits dimension k.
        margin: as in torch.nn.
        reduction: "none", "mean" or "sum".

    Raises:
        ShapeError, DTypeError: from a call, the target does not fit the input; on every worker.

    Example:
        >>> P, x = linop.Partition((2,)), torch.tensor([1.0, 2.0, 3.0, 0.0])
        >>> t = torch.tensor([1, 1, 1, -1])
        >>> blocks = list(zip(x.chunk(2), t.chunk(2)))
        >>> linop.launch(
        ...     lambda b: layers.HingeEmbeddingLoss(P)(*blocks[b.worker]).item(), workers=2
        ... )
        [1.75, 1.75]
        >>> torch.nn.HingeEmbeddingLoss()(x, t).item()
        1.75
    """

    def __init__(self, P_x: Partition, margin: float = 1.0, *, reduction: str = "mean") -> None:
        Elementwise.__init__(self, P_x, reduction, "hinge_embedding_loss", margin=margin)


class MarginRankingLoss(Elementwise):
    """How far two inputs are from the order that the target says, by a margin; see `Loss`.

    Args:
        P_x: the partition of both inputs and the target; grid axis k splits dimension k.
        margin, reduction: as in torch.nn.

    Raises:
        ShapeError, DTypeError: from a call, the three do not fit each other; on every worker.

    Example:
        >>> P, t = linop.Partition((2,)), torch.tensor([1.0, 1.0, -1.0, -1.0])
        >>> x, y = torch.tensor([3.0, 1.0, 3.0, 1.0]), torch.full((4,), 2.0)
        >>> blocks = list(zip(x.chunk(2), y.chunk(2), t.chunk(2)))
        >>> linop.launch(lambda b: layers.MarginRankingLoss(P)(*blocks[b.worker]).item(), workers=2)
        [0.5, 0.5]
        >>> torch.nn.MarginRankingLoss()(x, y, t).item()
        0.5
    """

    names = ("input1", "input2", "target")

    def __init__(self, P_x: Partition, margin: float = 0.0, *, reduction: str = "mean") -> None:
        super().__init__(P_x, reduction, "margin_ranking_loss", margin=margin)

    def check_dtype(self, X: TensorSpace, name: str, T: TensorSpace) -> None:
        if name != "target":  # which may be of whole numbers, as in torch
            super().check_dtype(X, name, T)


class GaussianNLLLoss(Elementwise):
    """The negative log-likelihood of a target, of a mean and a variance for each element, or for
    each row of the last dimension; see `Loss`.

    Calls take (input, target, var). A var without the last dimension is one for each row; where
    that dimension is cut, all workers of a row pass it, and each gets its whole gradient.

    Args:
        P_x: the partition of input, target and var; grid axis k splits dimension k.
        full, eps, reduction: as in torch.nn.

    Raises:
        ArgumentError: from a call, a variance is negative. ShapeError, DTypeError: the three do not
            fit each other. All on every worker.

    Example:
        >>> P, x = linop.Partition((2,)), torch.arange(1.0, 5.0)
        >>> t, var = torch.zeros(4), torch.ones(4)
        >>> blocks = list(zip(x.chunk(2), t.chunk(2), var.chunk(2)))
        >>> linop.launch(lambda b: layers.GaussianNLLLoss(P)(*blocks[b.worker]).item(), workers=2)
        [3.75, 3.75]
        >>> torch.nn.GaussianNLLLoss()(x, t, var).item()
        3.75
    """

    names = ("input", "target", "var")

    def __init__(
        self, P_x: Partition, *, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
    ) -> None:
        super().__init__(P_x, reduction, "gaussian_nll_loss", full=full, eps=eps)
        self._full, self._eps = full, eps

    def axes(self, number: int, ndim: int) -> Sequence[Axis]:
        if number == 0:
            self._ndim = ndim  # called for the input before var
        if number == 2 and ndim == self._ndim - 1:
            return without_dimension(self.inputs[0], ndim, ndim, REPLICATED)
        return super().axes(number, ndim)

    def check_blocks(
        self, X: TensorSpace, name: str, T: TensorSpace, without: int | None = None
    ) -> None:
        if name == "var" and T.ndim == X.ndim - 1:
            without = X.ndim - 1
        super().check_blocks(X, name, T, without)

    def expected(self, X: TensorSpace) -> str:
        del X
        return "variances that are not negative"

    def measure(self, X: TensorSpace, *others: TensorSpace) -> Measure:
        rows = others[-1].ndim < X.ndim
        spread = spread_over(self, others[-1])

        def terms(x: Tensor, t: Tensor, var: Tensor) -> tuple[Tensor, Any, Any]:
            var = spread(var)
            var = var.unsqueeze(-1) if rows else var
            wrong = (var < 0).any()
            if not is_tracing():
                loss = self._torch_s(x, t, x.new_ones(()).expand_as(var) if wrong else var)
                return loss, 0, wrong
            # torch's function asks for values; this is what it computes then.
            small = self._eps - var.detach()
            var = var + torch.where(small > 0, small, 0)
            loss = 0.5 * (var.log() + (x - t) ** 2 / var)
            loss = loss + 0.5 * log(2 * pi) if self._full else loss
            return loss if self.reduction == "none" else loss.sum(), 0, wrong

        return terms
