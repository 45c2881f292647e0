"""Order of units in a model's forward, as the last one had it: which to gather ahead.

All workers call the same units in the same order, so that all gather the same ones ahead. A unit
that is not used then is finished and dropped when the next forward of the model begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakSet, ref

from linop.backends import Backend

if TYPE_CHECKING:
    from linop.strategies.data.sharded.calls import Call
    from linop.strategies.data.sharded.unit import Unit


class Passes:
    """Forwards of models over the workers of a backend: of their units with a `prefetch`."""

    def __init__(self) -> None:
        self._next: WeakKeyDictionary[Unit, ref[Unit]] = WeakKeyDictionary()
        self._entered: WeakSet[Unit] = WeakSet()
        """Units of this forward."""
        self._last: Callable[[], Unit | None] = _nothing
        self._call: Callable[[], Call | None] = _nothing
        """The unit that entered last, and its call."""
        self._ahead: list[Unit] = []
        self.in_backward = False

    def expect(self, units: Sequence[Unit]) -> None:
        """Let the first forward gather ahead, too: units in their order."""
        for one, after in pairwise(units):
            self._next[one] = ref(after)

    def enter(self, unit: Unit) -> None:
        """Before a unit is gathered: a forward begins if this one had it, or backward has run.
        Collective then."""
        if self.in_backward or unit in self._entered:
            last = self._last()
            if last is not None:
                self._next.pop(last, None)
            self._entered.clear()
            self._last = self._call = _nothing
            self.in_backward = False
            for other in self._ahead[:]:
                other.drop()

    def entered(self, unit: Unit, call: Call) -> None:
        """After it was gathered: start to gather those that follow."""
        last = self._last()
        if last is not None:
            self._next[last] = ref(unit)
            call.before = self._call
        self._entered.add(unit)
        self._last, self._call = ref(unit), ref(call)
        here = unit
        for _ in range(unit.prefetch):
            after = self._next.get(here, _nothing)()
            if after is None or after in self._entered:
                break
            self._start(after)
            here = after

    def gather_before(self, call: Call) -> None:
        """In backward, after the parameters of a call were gathered: start those of the calls
        before it that need theirs again."""
        before = call.before()
        for _ in range(call.unit.prefetch):
            if before is None:
                break
            if before.saved and before.whole is None:
                self._start(before.unit, again=True)
            before = before.before()

    def _start(self, unit: Unit, again: bool = False) -> None:
        if unit.start(again):
            self._ahead.append(unit)

    def taken(self, unit: Unit) -> None:
        """A unit that was gathered ahead is used, or dropped."""
        self._ahead.remove(unit)


def _nothing() -> None:
    return None


def passes_of(backend: Backend) -> Passes:
    """The `Passes` of a backend, made at first use."""
    known: Passes | None = backend.kept.get(Passes)
    return known or backend.kept.setdefault(Passes, Passes())
