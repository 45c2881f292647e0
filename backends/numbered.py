"""The number of a call, which travels with the first message to each worker in it.

Who receives it compares it with its own: a message of another call is never taken for one of this
(`linop.backends.runs`). It is the end of a message that is packed in main memory, which costs next
to nothing; else it is a message of its own, sent first. MPI's collectives carry none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from linop.backends.code import Code
from linop.backends.runs import Calls, check_step, counting
from linop.plan import GROUP, Plan, Receive, Send
from linop.scalars import Array

PACKED = 8 * 1024
"""Bytes of a contiguous part up to which it is packed all the same: a copy and a persistent request
cost less than a request for memory that is new at every run. On a device they cost more."""
_NUMBER = np.dtype(np.int64)
_BYTES = _NUMBER.itemsize


class Room(NamedTuple):
    """Memory of a message, and of the number that is its end."""

    whole: Array
    """Bytes of both."""
    message: Array
    number: memoryview

    @staticmethod
    def of(size: int, dtype: np.dtype[Any]) -> Room:
        many = size * dtype.itemsize
        whole = np.zeros(-(-many // _BYTES) * _BYTES + _BYTES, np.uint8)
        return Room(whole, whole[:many].view(dtype), whole[-_BYTES:].view(_NUMBER).data)


class Numbers:
    """Numbers that come and go with a plan's messages.

    Args:
        calls: of the plan's workers; None where there is nobody else, or nothing to compare.
        inside: True if messages up to `PACKED` bytes have the number at their end.
        about: says whose plan this is.

    Attributes:
        mine: the number of this call, as a message of its own.
    """

    def __init__(
        self, plan: Plan, calls: Calls | None, inside: bool, about: Callable[[], str]
    ) -> None:
        self._dtype = plan.dtype
        self._calls = calls
        self._most = PACKED if inside else -1
        self._about = about
        self._first: dict[tuple[bool, int], Send | Receive] = {}
        for step in plan.steps if calls is not None else ():
            if isinstance(step, Send | Receive) and step.peer != GROUP:
                self._first.setdefault((isinstance(step, Send), step.peer), step)
        self.mine: Array = np.zeros(1, _NUMBER)
        self._theirs: dict[int, list[tuple[int, memoryview]]] = {}
        self._rooms: dict[tuple[bool, int], Room] = {}

    def counting(self, code: Code) -> list[str]:
        """Lines that count a call when it begins."""
        if self._calls is None:
            return []
        alone = any(isinstance(step, Send) and self.before(step) for step in self._first.values())
        said = [f"{code.name(self.mine.data)}[0] = c"] if alone else []
        return [*counting(code, self._calls), *said]

    def inside(self, step: Send | Receive) -> bool:
        """True if the number is the end of this message."""
        return self._is_first(step) and step.size * self._dtype.itemsize <= self._most

    def before(self, step: Send | Receive) -> bool:
        """True if the number is a message before this one."""
        return self._is_first(step) and not self.inside(step)

    def _is_first(self, step: Send | Receive) -> bool:
        return self._first.get((isinstance(step, Send), step.peer)) == step

    def room(self, step: Send | Receive) -> Room:
        """Memory for a message that a number is the end of."""
        key = isinstance(step, Send), step.peer
        if key not in self._rooms:
            room = self._rooms[key] = Room.of(step.size, self._dtype)
            if isinstance(step, Receive):
                self._theirs.setdefault(step.stage, []).append((step.peer, room.number))
        return self._rooms[key]

    def theirs(self, step: Receive) -> Array:
        """Memory for a number that comes before a message."""
        number = np.zeros(1, _NUMBER)
        self._theirs.setdefault(step.stage, []).append((step.peer, number.data))
        return number

    def checking(self, code: Code, stage: int) -> list[str]:
        """Lines that compare what came with the messages of a stage."""
        theirs = self._theirs.get(stage, [])

        def check(mine: int) -> None:
            for peer, number in theirs:
                check_step(peer, number[0], mine, self._about)

        differ = " or ".join(f"{code.name(number)}[0] != c" for _, number in theirs)
        return [f"if {differ}: {code.name(check)}(c)"] if differ else []
