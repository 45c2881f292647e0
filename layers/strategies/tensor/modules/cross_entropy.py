"""Cross entropy of logits whose classes are split (vocabulary-parallel)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from numbers import Real

import numpy as np
import torch
from torch import Tensor

from linop.backends.autograd.dtypes import numpy_dtype, torch_dtype
from linop.backends.autograd.real_calls import really
from linop.errors import ArgumentError, DTypeError, ShapeError, expect
from linop.layers.agreement.arguments import Said, compare_arguments
from linop.layers.layer import Function
from linop.layers.moments import wide
from linop.spaces.decomposition import REPLICATED, Axis
from linop.spaces.region import integer
from linop.spaces.tensor import TensorSpace
from linop.strategies.mesh import Axis as MeshAxis
from linop.strategies.tensor.modules.layer import ParallelLayer
from linop.strategies.tensor.modules.pieces import check_even, cut, pieces_of

_REDUCTIONS = "mean", "sum", "none"


class CrossEntropyLoss(ParallelLayer):
    """`torch.nn.CrossEntropyLoss` of logits whose classes, dimension 1, are split over an axis, as
    a `ColwiseParallel` projection leaves them. Collective among the axis's workers.

    Workers exchange four numbers for each element of the batch: the largest logit of their block,
    the sum of the exponentials beside it, the logit of the target where it is theirs, and the sum
    of all beside the largest. What they gather is replicated: its adjoint is a slice, and backward
    sends nothing.

    Args:
        axis: ``mesh["tp"]``.
        ignore_index, reduction, label_smoothing: as in torch.
        shards: classes are taken in so many parts, on any number of workers, as of
            `parallelize_module`; None: each worker's as one.

    The target, int64, has the shape of the logits without dimension 1, and is the same on all
    workers. The loss is replicated: every worker has it, and calls ``loss.backward()``. Under
    autocast it is of float32, as torch's. Construction is collective too.

    Raises:
        ArgumentError: there is no such reduction, ignore_index is no whole number, or
            label_smoothing not from 0 to 1, on any worker; BackendError: they differ between
            workers; both on every worker. From a call, ArgumentError: a target is no class;
            ShapeError, DTypeError: target and logits do not fit.

    Example:
        Each worker has the logits of three classes of six:

        >>> logits, target = torch.randn(4, 6).double(), torch.tensor([0, 2, 4, 5])
        >>> wanted = torch.nn.functional.cross_entropy(logits, target)
        >>> def program(backend):
        ...     loss = strategies.CrossEntropyLoss(strategies.Mesh(tp=2)["tp"])
        ...     return torch.allclose(loss(logits.chunk(2, 1)[backend.worker], target), wanted)
        >>> linop.launch(program, workers=2)
        [True, True]
    """

    floating = False

    def __init__(
        self,
        axis: MeshAxis,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        shards: int | None = None,
    ) -> None:
        super().__init__(
            expect("CrossEntropyLoss: axis", axis, MeshAxis), [1, REPLICATED], REPLICATED
        )
        self.ignore_index, self.reduction = ignore_index, reduction
        self.label_smoothing = label_smoothing
        doing = f"construct {self._name}"
        _, said = self._agreement.together(lambda: (None, self._options(shards)), self._name, doing)
        compare_arguments(self._name, said)

    def _options(self, shards: int | None) -> Said:
        """The options, checked, as texts that workers compare."""
        self.pieces = pieces_of(shards, self.axis, self._name)
        integer(self.ignore_index, "ignore_index")
        if self.reduction not in _REDUCTIONS:
            raise ArgumentError(
                f"reduction={self.reduction!r}; one of {', '.join(_REDUCTIONS)} expected"
            )
        smoothing = self.label_smoothing
        if not isinstance(smoothing, Real) or not 0 <= smoothing <= 1:
            raise ArgumentError(f"label_smoothing={smoothing!r}; from 0 to 1 expected")
        names = "ignore_index", "reduction", "label_smoothing", "pieces"
        return {name: repr(getattr(self, name)) for name in names}

    def axes(self, number: int, ndim: int) -> list[Axis]:
        if number == 0 and ndim < 2:
            raise ShapeError(f"{self._name}: logits of {ndim} dimensions; (batch, classes, …)")
        return list(super().axes(number, ndim))

    def bind(self, *inputs: TensorSpace) -> Function:
        X, T = inputs
        shape = *X.global_shape[:1], *X.global_shape[2:]
        if T.global_shape != shape:
            raise ShapeError(
                f"{self._name}: logits of global shape {X.global_shape}, and a target of shape "
                f"{T.global_shape}; {shape} expected"
            )
        if T.dtype != np.int64:
            raise DTypeError(f"{self._name}: a target of {T.dtype}; int64 expected: use .long()")
        dtype, count, many = torch_dtype(wide(self, X)), 4, max(1, self.pieces)
        sizes = [b - a for a, b in X.bounds[1]]
        if self.pieces:
            check_even(self._name, "classes", sizes, many)
        blocks = many * len(X.regions)
        each = TensorSpace((blocks, count, *shape), X.partition, numpy_dtype(dtype), [0], "terms")
        _, gather = self.converted(each, REPLICATED)
        where, classes = X.slices(self.worker)[1], X.global_shape[1]
        judge = partial(self._judge, classes)
        widths = torch.tensor([size // many for size in sizes for _ in range(many)]).view(
            -1, *[1] * len(shape)
        )

        def own(x: Tensor, t: Tensor) -> Tensor:
            if not self.pieces:
                return _terms(x, t, where)[None]
            parts, width = cut(x, many, 1), x.shape[1] // many
            starts = range(where.start, where.stop, width)
            return torch.stack(
                [_terms(p, t, slice(k, k + width)) for p, k in zip(parts, starts, strict=True)]
            )

        def loss(x: Tensor, t: Tensor) -> Tensor:
            counts = t != self.ignore_index
            really(self, judge, (), (counts & ((t < 0) | (t >= classes))).any())
            top, sums, right, every = gather(own(x.to(dtype), t)).unbind(1)
            top = top.detach()
            # All beside the largest logit: logits that are far from 0 lose no digits.
            most = top.amax(0)
            logarithm = (sums * (top - most).exp()).sum(0).log()
            terms = logarithm - (right.sum(0) - most)
            if self.label_smoothing:
                here = widths.to(x.device)
                beside = torch.where(here > 0, every + here * (top - most), 0)
                rest = logarithm - beside.sum(0) / classes
                terms = (1 - self.label_smoothing) * terms + self.label_smoothing * rest
            terms = torch.where(counts, terms, 0)
            if self.reduction != "none":
                terms = terms.sum()
            given = dtype if torch.is_autocast_enabled(x.device.type) else x.dtype
            return (terms / counts.sum() if self.reduction == "mean" else terms).to(given)

        return loss

    def _judge(self, classes: int, wrong: Tensor) -> Sequence[Tensor]:
        """Nothing.

        Raises:
            ArgumentError: some target is no class.
        """
        if wrong:
            raise ArgumentError(
                f"{self._name}: targets from 0 to {classes - 1}, or ignore_index="
                f"{self.ignore_index}, expected"
            )
        return ()


def _terms(x: Tensor, t: Tensor, where: slice) -> Tensor:
    """Of each element of the batch: the largest logit of a block, the sum of the exponentials
    beside it, the target's logit or 0, and the sum of all logits beside the largest."""
    least = torch.finfo(x.dtype).min
    top = x.detach().amax(1) if x.shape[1] else x.new_full((len(x), *x.shape[2:]), least)
    top = top.clamp(min=least)  # finite, also of a block that is all -inf
    mine = (where.start <= t) & (t < where.stop)
    if x.shape[1]:
        at = (t - where.start).clamp(0, x.shape[1] - 1).unsqueeze(1)
        right = torch.where(mine, x.gather(1, at).squeeze(1), 0)
    else:
        right = x.sum(1)
    beside = x - top.unsqueeze(1)
    return torch.stack([top, beside.exp().sum(1), right, beside.sum(1)])
