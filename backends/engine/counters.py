"""Counters of plans: calls, messages, bytes and seconds, by operator.

Each plan has its own counters. A backend's ledger refers to the counters of its plans, not to the
plans, and adds up those of released plans.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, fields

from linop.operators.operator import LinearOperator
from linop.planning.plan import LoweredPlan
from linop.text import aligned

_SHOWN = 60
"""Longest text of an operator in a printed table, in characters."""


class Counters:
    """Counters of one plan: of this worker, or of all workers if this process holds them.

    Attributes:
        number: number of plans that its backend compiled before it.
        calls: finished runs.
        seconds: time inside runs, from the first message to the result; for ``start`` and
            ``finish``, time inside both, not between them.
        begun: start of the last run, by ``time.perf_counter``.
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

    def sends(self, plans: Iterable[LoweredPlan]) -> None:
        """Set messages and bytes per run to the sums over these plans."""
        for plan in plans:
            self.messages_each += len(plan.sends)
            self.bytes_each += plan.bytes_sent

    def is_adjoint_of(self, op: LinearOperator) -> None:
        """Label the plan as ``plan.H`` of an operator's plan."""
        self._op, self._direction = op, "adjoint"

    def forget(self) -> None:
        """Replace the operator by its text. For an operator that keeps its plan: otherwise each
        would keep the other alive as long as the backend."""
        self._op = str(self._op)

    @property
    def row(self) -> CounterRow:
        key = str(self._op), self._direction
        return CounterRow(*key, self.calls, self.messages, self.bytes, self.seconds)


@dataclass(frozen=True)
class CounterRow:
    """Sums over all plans of one operator, in one direction."""

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
    """Rows by operator and direction, in order of first compilation; prints as a table."""

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
    """Counters of one backend's plans."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opened = 0
        self._plans: dict[int, Counters] = {}
        self._gone: deque[Counters] = deque()
        self._sums: Sums = {}

    def open(self, plan: object, op: LinearOperator) -> Counters:
        """Counters of a new plan; they are added to the sums once the plan is garbage-collected."""
        with self._lock:
            self._settle()
            counters = self._plans[self._opened] = Counters(op, self._opened)
            self._opened += 1
        # Finalizers run anywhere, even while the lock is held: so this one only appends.
        weakref.finalize(plan, self._gone.append, counters).atexit = False
        return counters

    def table(self) -> CounterTable:
        """Current counters by operator, without operators that were never called."""
        with self._lock:
            self._settle()
            sums = dict(self._sums)
            for counters in self._plans.values():
                _enter(sums, counters)
        # Plans are released in any order; rows are sorted by the first plan of each operator.
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
