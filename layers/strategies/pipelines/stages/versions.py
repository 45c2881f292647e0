"""Versions of a stage's parameters, for schedules whose backwards read older ones than the newest.

A version is a dict of leaves that share memory with the parameters. An update of a stage whose
older versions are still needed moves the parameters to new memory first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from linop.schedules import Action, Kind
from linop.schedules.actions import COMPUTE
from linop.strategies.data.reducer import reducer_of

Version = Mapping[str, Tensor]


class Versions:
    """Versions of a module's parameters in a step.

    Args:
        row: actions of the stage.

    Attributes:
        any: False if all forwards and backwards read the newest one, which the module has.
    """

    def __init__(self, module: Any, row: Sequence[Action]) -> None:
        self._module = module
        self._plan = _updates(row)
        self.any = any(update.old for update in self._plan)
        self._kept: dict[int, Version] = {}
        self._updates = 0

    def begin(self) -> None:
        """Begin a step: versions count from 0."""
        self._updates = 0
        if self.any:
            self._kept = {0: self._leaves()}

    def _leaves(self) -> Version:
        return {
            name: p.data.requires_grad_(p.requires_grad)
            for name, p in self._module.named_parameters()
        }

    def of(self, version: int) -> Version | None:
        """A version by its number, the newest by -1; None: the module has it."""
        if not self.any:
            return None
        return self._kept[self._updates if version < 0 else version]

    def collect(self, weights: Version) -> None:
        """Move the gradients of a version to the parameters."""
        for name, p in self._module.named_parameters():
            grad, weights[name].grad = weights[name].grad, None
            if grad is not None and p.grad is not None:
                p.grad += grad
            elif grad is not None:
                p.grad = grad

    def renew(self) -> None:
        """Before an update: sum what hooks of `DataParallel` have not seen, gradients of versions;
        and move the parameters to new memory, if their old version is needed."""
        if not self.any:
            return
        parameters = list(self._module.parameters())
        for reducer in filter(None, dict.fromkeys(map(reducer_of, parameters))):
            if reducer.enabled:
                reducer.reduce()
        if self._plan[self._updates].old:
            for p in parameters:
                if p.requires_grad:
                    p.data = p.detach().clone()

    def renewed(self) -> None:
        """After an update: a new version, and the end of those that no forward reads any more."""
        if self.any:
            self._kept[self._updates + 1] = self._leaves()
            wanted = self._plan[self._updates].wanted
            self._kept = {v: w for v, w in self._kept.items() if v in wanted}
        self._updates += 1


class _Update(NamedTuple):
    """Versions that an update of a stage has to keep."""

    old: bool
    """True if the version before it is read later."""
    wanted: Collection[int]
    """Versions that later forwards read, and the new one."""


def _updates(row: Sequence[Action]) -> list[_Update]:
    """The updates of a stage, by its actions."""
    newest, read_by = 0, {}
    last: dict[int, int] = {}
    last_forward: dict[int, int] = {}
    for k, action in enumerate(row):
        if action.kind == Kind.UPDATE:
            newest += 1
        elif action.kind == Kind.FORWARD:
            version = newest if action.version is None else action.version
            read_by[action.micro_batch] = version
            last[version] = last_forward[version] = k
        elif action.kind in COMPUTE:
            last[read_by[action.micro_batch]] = k
    positions = [k for k, action in enumerate(row) if action.kind == Kind.UPDATE]
    return [
        _Update(last.get(v, -1) > k, {v + 1, *(w for w, at in last_forward.items() if at > k)})
        for v, k in enumerate(positions)
    ]
