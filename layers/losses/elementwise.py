"""Losses with a term for each element, which torch computes of a worker's blocks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

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
    def __init__(self, P_x: Partition, *, reduction: str = "mean") -> None:
        super().__init__(P_x, reduction, "mse_loss")


class L1Loss(Elementwise):
    def __init__(self, P_x: Partition, *, reduction: str = "mean") -> None:
        super().__init__(P_x, reduction, "l1_loss")


class SmoothL1Loss(Elementwise):
    def __init__(self, P_x: Partition, *, reduction: str = "mean", beta: float = 1.0) -> None:
        super().__init__(P_x, reduction, "smooth_l1_loss", beta=beta)


class HuberLoss(Elementwise):
    def __init__(self, P_x: Partition, *, reduction: str = "mean", delta: float = 1.0) -> None:
        super().__init__(P_x, reduction, "huber_loss", delta=delta)


class KLDivLoss(Elementwise):
    reductions = ("none", "mean", "sum", "batchmean")

    def __init__(
        self, P_x: Partition, *, reduction: str = "mean", log_target: bool = False
    ) -> None:
        super().__init__(P_x, reduction, "kl_div", log_target=log_target)

    def count(self, X: TensorSpace, *others: TensorSpace) -> int | None:
        return X.global_shape[0] if self.reduction == "batchmean" else super().count(X, *others)


class BCELoss(Elementwise):
    def __init__(
        self, P_x: Partition, weight: Tensor | None = None, *, reduction: str = "mean"
    ) -> None:
        super().__init__(P_x, reduction, "binary_cross_entropy", {"weight": weight})

    def expected(self, X: TensorSpace) -> str:
        del X
        return "elements of the input between 0 and 1"

    def measure(self, X: TensorSpace, *others: TensorSpace) -> Measure:
        inside = super().measure(X, *others)

        def terms(x: Tensor, t: Tensor) -> tuple[Tensor, Any, Any]:
            if ((x >= 0) & (x <= 1)).all():
                return inside(x, t)
            return x.new_zeros(()), 0, 1

        return terms


class BCEWithLogitsLoss(Elementwise):
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
    def __init__(self, P_x: Partition, *, reduction: str = "mean") -> None:
        super().__init__(P_x, reduction, "soft_margin_loss")

    def check_dtype(self, X: TensorSpace, name: str, T: TensorSpace) -> None:
        """Whole numbers will do, as in torch."""


class HingeEmbeddingLoss(SoftMarginLoss):
    def __init__(self, P_x: Partition, margin: float = 1.0, *, reduction: str = "mean") -> None:
        Elementwise.__init__(self, P_x, reduction, "hinge_embedding_loss", margin=margin)


class MarginRankingLoss(Elementwise):
    """How far two inputs are from the order that the target says, by a margin; see `Loss`.

    Args:
        P_x: the partition of both inputs and the target; grid axis k splits dimension k.
        margin, reduction: as in torch.nn.

    Raises:
        ShapeError, DTypeError: from a call, the three do not fit each other; on every worker.
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

    Args:
        P_x: the partition of input, target and var; grid axis k splits dimension k.
        full, eps, reduction: as in torch.nn. Calls take (input, target, var). A var without the
            last dimension is one for each row; where that dimension is cut, all workers of a row
            pass it, and each gets its whole gradient.

    Raises:
        ArgumentError: from a call, a variance is negative. ShapeError, DTypeError: the three do not
            fit each other. All on every worker.
    """

    names = ("input", "target", "var")

    def __init__(
        self, P_x: Partition, *, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
    ) -> None:
        super().__init__(P_x, reduction, "gaussian_nll_loss", full=full, eps=eps)

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
            loss = self._torch_s(x, t, x.new_ones(()).expand_as(var) if wrong else var)
            return loss, 0, wrong

        return terms
