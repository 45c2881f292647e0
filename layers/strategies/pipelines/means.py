"""Weights of micro-batches in a mean over the batch: shares of the rows, or of what counts, where a
loss is a mean over some of its elements, as with ignored targets or weights of classes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from linop.backends import Backend
from linop.backends.autograd.functions import add_dependency
from linop.errors import ArgumentError
from linop.layers.agreement.input_agreement import agreement_of
from linop.layers.layer import Layer
from linop.layers.losses.cross_entropy import NLLLoss
from linop.strategies.pipelines.forms import tensors_in
from linop.strategies.tensor.modules.cross_entropy import CrossEntropyLoss

Count = Callable[[Tensor], Any]
Loss = Callable[[Any, Tensor], Tensor]
_MODULES = (torch.nn.NLLLoss, torch.nn.CrossEntropyLoss, NLLLoss, CrossEntropyLoss)
_FUNCTIONS = (functional.cross_entropy, functional.nll_loss)
_REDUCING = {
    function: inspect.signature(function)
    for name in dir(functional)
    if not name.startswith("_") and inspect.isfunction(function := getattr(functional, name))
    if "reduction" in (known := inspect.signature(function).parameters)
    and "input_lengths" not in known  # divides by the length of each row
}
"""torch's losses that can be means."""


class Losses:
    """A pipeline's losses of micro-batches, which add up to those of its updates.

    Args:
        loss: of a result and a target: a scalar.
        reduction: "sum", or "mean": then each is multiplied by its share.
        count, groups, part: as in `Means`.
    """

    def __init__(
        self,
        loss: Loss,
        reduction: str,
        count: Count | None,
        groups: Sequence[Sequence[int]],
        part: Backend,
    ) -> None:
        self._loss = loss
        self._means = Means(loss, count, groups, part) if reduction == "mean" else None
        self._targets: Sequence[Tensor] = ()
        self._shares: dict[int, float] = {}

    def begin(self, sizes: Sequence[int], targets: Sequence[Tensor]) -> None:
        """Begin a step.

        Args:
            sizes, targets: of the micro-batches.
        """
        self._targets = targets
        self._shares = {} if self._means is None else self._means.begin(sizes, targets)

    def __call__(self, m: int, result: Any) -> Tensor:
        """The loss of a micro-batch.

        Raises:
            ArgumentError: it is no real number, or no mean over the rows.
        """
        if self._shares and not self._shares[m]:  # the mean of nothing is no number
            return add_dependency(torch.zeros(()), *tensors_in(result))
        if self._means is not None and self._means.watched:
            with self._means.watch(m):
                value = self._loss(result, self._targets[m])
        else:
            value = self._loss(result, self._targets[m])
        if not isinstance(value, torch.Tensor) or value.numel() != 1 or value.is_complex():
            raise ArgumentError(f"Pipeline: a real loss with one element expected, given {value!r}")
        return value * self._shares[m] if self._shares else value


class Means:
    """Shares of micro-batches in the means of their updates.

    Args:
        loss: a mean over what counts in a micro-batch.
        count: of a micro-batch's target, the number that its mean was divided by; None: found for
            torch's losses over classes, and the number of rows for others.
        groups: micro-batches of each update.
        part: backend of the last stage's workers, which have blocks of targets.
    """

    def __init__(
        self, loss: Loss, count: Count | None, groups: Sequence[Sequence[int]], part: Backend
    ) -> None:
        self._count = count or count_of(loss)
        self._groups, self._part = groups, part
        self._is_layer = isinstance(loss, Layer)
        self.watched = self._count is None
        self._ratios: dict[tuple[int, int], float] = {}
        self._sizes: Sequence[int] = ()

    def begin(self, sizes: Sequence[int], targets: Sequence[Tensor]) -> dict[int, float]:
        """Begin a step: the share of each micro-batch, 0 for one of which nothing counts.
        Collective over the last stage's workers.

        Raises:
            ArgumentError: a count is no number from 0.
        """
        self._ratios, self._sizes = {}, sizes
        mine = totals = [float(n) for n in sizes]
        if self._count is not None and targets[0] is not None:
            mine = totals = [_number(self._count(target)) for target in targets]
            if (self._part.workers or 1) > 1:
                every = agreement_of(self._part).gather_objects(mine, "count targets")
                totals = [sum(each) for each in zip(*every, strict=True)]
                mine = totals if self._is_layer else mine
        shares: dict[int, float] = {}
        for group in self._groups:
            total = sum(totals[m] for m in group)
            given: Sequence[float] = mine
            if not total:  # the mean is that of nothing, as torch's
                given, total = sizes, sum(sizes[m] for m in group)
            shares |= {m: given[m] / total for m in group}
        return shares

    def watch(self, m: int) -> _Watch:
        """Context of a loss of unknown count, which torch's own losses in it may tell.

        Raises:
            ArgumentError: they count another part of the rows than in a micro-batch before.
        """
        return _Watch(partial(self._compare, m))

    def _compare(self, m: int, call: int, count: float) -> None:
        (group,) = (k for k, group in enumerate(self._groups) if m in group)
        ratio = count / self._sizes[m]
        first = self._ratios.setdefault((group, call), ratio)
        if not math.isclose(first, ratio, rel_tol=1e-9):
            raise ArgumentError(
                f"Pipeline: reduction='mean', and the loss is a mean over {count:g} for the "
                f"{self._sizes[m]} rows of micro-batch {m}, not {first:g} a row as before: some "
                f"are left out, or have weights, and shares of the rows do not give the "
                f"mean over the batch; give count=, a function of a micro-batch's target, such as "
                f"lambda target: (target != -100).sum(), or a sum over what counts, with "
                f"reduction='sum'"
            )


def count_of(loss: Loss) -> Count | None:
    """The divisor of a loss over classes in its mean, as a function of the target; None for other
    losses."""
    options: Mapping[str, Any] = {}
    if isinstance(loss, partial) and loss.func in _FUNCTIONS and not loss.args:
        options = loss.keywords
    elif isinstance(loss, _MODULES) and type(loss).__module__.startswith(("torch.nn", "linop.")):
        options = {key: getattr(loss, key, None) for key in ("weight", "ignore_index", "reduction")}
    elif loss not in _FUNCTIONS:
        return None
    if options.get("reduction", "mean") != "mean":
        return None
    return partial(counted, options.get("weight"), options.get("ignore_index", -100))


def counted(weight: Tensor | None, ignored: int, target: Tensor) -> float:
    """Sum of the weights of a target's classes, without those that are ignored; of probabilities
    the number of elements of the batch."""
    if target.is_floating_point():
        return float(target.numel() / (target.shape[1] if target.ndim > 1 else target.shape[0]))
    counts = target[target != ignored]
    return float(counts.numel() if weight is None else weight.detach().double()[counts].sum())


def _number(given: Any) -> float:
    try:
        number = float(given)
    except Exception:  # of whatever the user's function gives
        number = math.nan
    if not 0 <= number < math.inf:
        raise ArgumentError(f"Pipeline: count: it gives {given!r}; a number from 0 expected")
    return number


class _Watch(TorchFunctionMode):
    """Context that tells what torch's losses divide by.

    Args:
        tell: is called with the number of a call in it, and that number, or one that it is a fixed
            part of.
    """

    def __init__(self, tell: Callable[[int, float], None]) -> None:
        super().__init__()
        self._tell, self._calls = tell, 0

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        """See torch's "Extending torch"."""
        given = options or {}
        if function in _REDUCING:
            bound = _REDUCING[function].bind(*arguments, **given)
            bound.apply_defaults()
            named = bound.arguments
            averages = False not in (named.get("size_average"), named.get("reduce"))
            means = named["reduction"] in ("mean", "batchmean") and averages
            if means and not _is_of_parameters(named):
                self._tell(self._calls, _divisor(named))
                self._calls += 1
        return function(*arguments, **given)


def _is_of_parameters(named: Mapping[str, Any]) -> bool:
    """True of a loss that regularises, which no rows are in."""
    trained = [x for x in named.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    return bool(trained) and all(isinstance(x, torch.nn.Parameter) for x in trained)


def _divisor(named: Mapping[str, Any]) -> float:
    """The number that a loss of torch divides by, or one that it is a fixed part of.

    Args:
        named: its arguments.
    """
    if "ignore_index" in named:
        return counted(named["weight"], named["ignore_index"], named["target"])
    return float(max(x.numel() for x in named.values() if isinstance(x, torch.Tensor)))
