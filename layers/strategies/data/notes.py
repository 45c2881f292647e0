"""Digests of what workers have done that ride with the messages of data parallel training, so that
the next message tells when one of them has left something out.

A digest is `PLACES` numbers below 128, exact in every dtype that parameters have. Where messages
are gathered, each worker sees those of all; where they are summed, each sends a one for every bit,
and for the complement of every bit: of each pair one sum is zero if all digests are equal, however
the sums are rounded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from linop.backends import Backend
from linop.errors import ArgumentError, BackendError
from linop.layers.agreement.input_agreement import agreement_of
from linop.layers.parameters.marks import mark

PLACES = 4
"""Elements of a gathered digest."""
_BITS = 7
SUMMED = 2 * PLACES * _BITS
"""Elements of a summed digest."""
_PLAIN = int, float, str, tuple
"""Kinds of an optimizer's settings that are compared."""
Facts = dict[str, Any]
"""Compared facts, in words, with their values on this worker."""


class Steps:
    """Steps of optimizers that have some of these parameters, since they were told last.

    Args:
        early: reason why there is none inside of a backward; empty if there may be some.
        begins: called when a step begins.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        early: str = "",
        begins: Callable[[], object] = lambda: None,
    ) -> None:
        self._taken: list[str] = []
        self._early, self._begins = early, begins
        for p in parameters:
            mark(p, steps=self)
        _watch_optimizers()

    def add(self, settings: str) -> None:
        """Count a step that begins, of an optimizer of these settings.

        Raises:
            ArgumentError: it is inside of a backward, and not to be there.
        """
        if self._early and torch._C._current_graph_task_id() != -1:
            raise ArgumentError(self._early)
        self._begins()
        self._taken.append(settings)

    def told(self, since: str) -> Facts:
        """Their number, and the optimizers' settings, in words; counted anew from here on."""
        taken, self._taken = self._taken, []
        settings = [one for k, one in enumerate(taken) if not k or one != taken[k - 1]]
        return {f"optimizers' steps since {since}": len(taken), "their settings": settings}


@cache
def _watch_optimizers() -> None:
    """Count the steps of all optimizers of torch from now on."""
    register_optimizer_step_pre_hook(_stepped)


def _stepped(optimizer: Any, *arguments: Any) -> None:
    del arguments
    every = (p for group in optimizer.param_groups for p in group["params"])
    counted: set[Any] = {getattr(p, "_linop_steps", None) for p in every} - {None}
    if counted:
        settings = _settings(optimizer)
        for steps in counted:
            steps.add(settings)


def _settings(optimizer: Any) -> str:
    """The class of an optimizer, and the numbers and words in its groups."""
    groups = [
        ", ".join(f"{name}={value}" for name, value in group.items() if isinstance(value, _PLAIN))
        for group in optimizer.param_groups
    ]
    return f"{type(optimizer).__name__}({'; '.join(groups)})"


def gathered_digest(facts: Facts) -> tuple[int, ...]:
    """A digest of `PLACES` elements."""
    return _places(repr(facts))


def summed_digest(facts: Facts) -> list[float]:
    """A digest of `SUMMED` elements, to be added to those of other workers."""
    bits = [place >> k & 1 for place in _places(repr(facts)) for k in range(_BITS)]
    return [float(one) for bit in bits for one in (bit, 1 - bit)]


@lru_cache(64)
def _places(facts: str) -> tuple[int, ...]:
    number = int.from_bytes(hashlib.sha256(facts.encode()).digest()[:PLACES], "little")
    return tuple(number >> 8 * k & 127 for k in range(PLACES))


def are_equal(gathered: Tensor) -> bool:
    """True if all workers' digests, a row each, are equal."""
    first, *others = gathered.tolist()
    return all(one == first for one in others)


def add_up(summed: Sequence[float]) -> bool:
    """True if a sum is of equal digests."""
    return all(one == 0 or other == 0 for one, other in zip(summed[::2], summed[1::2], strict=True))


def different(name: str, facts: Facts, backend: Backend, cure: str) -> BackendError:
    """The error of workers whose digests differ, which says in what. Collective."""
    said = agreement_of(backend).gather_objects(facts, "say what this worker has done", name)
    return BackendError(f"{name}: {'; '.join(_differences(said))}. {cure}")


def _differences(said: Sequence[Facts]) -> list[str]:
    found = []
    for what in said[0]:
        workers: dict[str, list[int]] = {}
        for worker, facts in enumerate(said):
            workers.setdefault(repr(facts[what]), []).append(worker)
        if len(workers) > 1:
            each = (f"{value} on workers {those}" for value, those in workers.items())
            found.append(f"{what}: {', '.join(each)}")
    return found
