"""Counters of plans: calls, messages, bytes and seconds, by operator.

Each plan counts for itself; a backend's ledger knows the counters of its plans, not the plans, and
keeps the sums of those that are gone.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, fields

from linop.operators.operator import LinearOperator
from linop.planning.plan import Plan
from linop.text import aligned

_SHOWN = 60
"""Characters of an operator in a printed table."""


class Counters:
    """The work of one plan so far: on this worker, or on all where this process holds all.

    Attributes:
        number: how many plans its backend had before it.
        calls: runs that were finished.
        seconds: inside them, from the first message to the result; for ``start`` and ``finish``,
            in both, and not in between.
        begun: when the last run began.
    """

    def __init__(self, op: LinearOperator, number: int) -> None:
        self.number = number
        self.calls = 0
        self.seconds = 0.0
        self.begun = 0.0
        self.messages_each = 0
        self.bytes_each = 0
        self._op: LinearOperator | str = op
        self._direction = "forward"

    @property
    def messages(self) -> int:
        """Messages sent to other workers."""
        return self.calls * self.messages_each

    @property
    def bytes(self) -> int:
        """Bytes sent to other workers."""
        return self.calls * self.bytes_each

    def sends(self, plans: Iterable[Plan]) -> None:
        """Say what one run sends: what these plans send together."""
        for plan in plans:
            self.messages_each += len(plan.sends)
            self.bytes_each += plan.bytes_sent

    def is_adjoint_of(self, op: LinearOperator) -> None:
        """Say that the plan is ``plan.H`` of the plan of an operator."""
        self._op, self._direction = op, "adjoint"

    def forget(self) -> None:
        """Keep the operator's text alone, for an operator that keeps its plan: else each would keep
        the other for as long as there is a backend."""
        self._op = str(self._op)

    @property
    def row(self) -> CounterRow:
        key = str(self._op), self._direction
        return CounterRow(*key, self.calls, self.messages, self.bytes, self.seconds)


@dataclass(frozen=True)
class CounterRow:
    """The sums over all plans of one operator, in one direction."""

    operator: str
    direction: str
    """``forward``, or ``adjoint`` for ``plan.H``."""
    calls: int
    messages: int
    bytes: int
    seconds: float

    def __add__(self, other: CounterRow) -> CounterRow:
        return CounterRow(
            self.operator,
            self.direction,
            self.calls + other.calls,
            self.messages + other.messages,
            self.bytes + other.bytes,
            self.seconds + other.seconds,
        )


class CounterTable(list[CounterRow]):
    """Rows by operator and direction, in the order of their compilation; prints as a table."""

    def __str__(self) -> str:
        head = tuple(field.name for field in fields(CounterRow))
        rows = []
        for row in self:
            numbers = map(str, (row.calls, row.messages, row.bytes))
            rows.append((_short(row.operator), row.direction, *numbers, f"{row.seconds:.6f}"))
        return "\n".join(aligned([head, *rows], left=2))


Sums = dict[tuple[str, str], tuple[int, CounterRow]]
"""Rows by operator and direction, each with the number of its first plan."""


class Ledger:
    """The counters of one backend's plans."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opened = 0
        self._plans: dict[int, Counters] = {}
        self._gone: deque[Counters] = deque()
        self._sums: Sums = {}

    def open(self, plan: object, op: LinearOperator) -> Counters:
        """The counters of a new plan; once it is gone, they are added up."""
        with self._lock:
            self._settle()
            counters = self._plans[self._opened] = Counters(op, self._opened)
            self._opened += 1
        # Garbage is collected anywhere, with the lock held too: so this does no more than append.
        weakref.finalize(plan, self._gone.append, counters).atexit = False
        return counters

    def table(self) -> CounterTable:
        """The counters now, by operator; operators that were never called are left out."""
        with self._lock:
            self._settle()
            sums = dict(self._sums)
            for counters in self._plans.values():
                _enter(sums, counters)
        # Plans are gone in any order; the rows come in that of the first plan of each.
        return CounterTable(row for _, row in sorted(sums.values(), key=lambda found: found[0]))

    def _settle(self) -> None:
        while self._gone:
            counters = self._gone.popleft()
            del self._plans[counters.number]
            _enter(self._sums, counters)


def _enter(sums: Sums, counters: Counters) -> None:
    if not counters.calls:
        return
    number, row = counters.number, counters.row
    key = row.operator, row.direction
    if key in sums:
        number, row = min(number, sums[key][0]), sums[key][1] + row
    sums[key] = number, row


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
