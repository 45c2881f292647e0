"""Numbers of calls: which call of a group's plans this is, said with the first message to each
peer.

Who receives it compares it with its own, so that a message of another call is never taken for one
of this: where a worker leaves a call out, or makes one more, the numbers of the next plan's calls
differ. Over shared memory the number is in the word that says that a message is there
(`linop.backends.shared_memory.runs`). Else it is the end of a message that is packed in main
memory, which costs next to nothing, or a message of its own, sent first. MPI's collectives carry
none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from linop.backends.execution.emitter import Code
from linop.errors import BackendError
from linop.planning.plan import GROUP, Plan, Receive, Send
from linop.spaces.scalars import Array

PACKED = 8 * 1024
"""Bytes of a contiguous part up to which it is packed all the same: a copy and a persistent request
cost less than a request for memory that is new at every run. On a device they cost more."""
_NUMBER = np.dtype(np.int64)
_BYTES = _NUMBER.itemsize


TURNS = 16
"""A run's number in what is said of a message in shared memory is modulo this: more than twice the
most buffers."""
_NOBODY = -1


class Calls:
    """The plans' calls by one group of workers, since all workers compiled together last. Counted
    are plain calls by one thread, whose order is the same on all workers; where one failed, the
    workers need not agree any more on how many there were, and nothing is counted. Nor is it from
    the first call or compile by another thread on: another worker may have made that in this one.

    Attributes:
        number: of calls, times `TURNS`.
        thread: whose calls are counted.
    """

    __slots__ = ("_overlap", "_several", "_stopped", "_thread", "number", "thread")

    def __init__(self) -> None:
        self.number = 0
        self.thread = self._thread = threading.get_ident()
        self._stopped = self._overlap = self._several = False

    def stop(self) -> None:
        """Count no more."""
        self.thread, self._stopped = _NOBODY, True

    def again(self) -> None:
        """Count from the start; all workers do, when they compile."""
        self.uncounted()
        if not self._several:
            self.number, self.thread = 0, self._thread
            self._stopped = self._overlap = False

    def uncounted(self) -> None:
        """Take note of a call that is not counted."""
        if self._thread != threading.get_ident():
            self.stop()
            self._several = True

    def __enter__(self) -> None:
        """Inside, a call has no number: one that may overlap others, in any order."""
        self.uncounted()
        if self.thread == threading.get_ident():
            self.number += TURNS
            self.thread, self._overlap = _NOBODY, True

    def __exit__(self, *error: object) -> None:
        if not self._stopped and self._thread == threading.get_ident():
            self.thread = self._thread

    @property
    def counted(self) -> int | None:
        """How many there were; None where workers need not agree on that now."""
        self.uncounted()
        return None if self._stopped or self._overlap else self.number // TURNS


def counting(code: Code, calls: Calls | None) -> list[str]:
    """Lines that count a call, and say in `c` which one it is, times `TURNS`: 0 where it is not
    counted."""
    if calls is None:
        return ["c = 0"]
    name = code.name(calls)
    return [
        f"if {code.name(threading.get_ident)}() == {name}.thread:",
        f"    {name}.number = c = {name}.number + {TURNS}",
        "else:",
        "    c = 0",
        f"    {code.name(calls.uncounted)}()",
    ]


def check_step(peer: int, theirs: int, mine: int, about: Callable[[], str]) -> None:
    """Check that a message is of the call that it is taken for.

    Args:
        theirs: the number of the sender's call, as in `Calls.number`; 0 where it is not known.
        mine: that of the call here.

    Raises:
        BackendError: it is another one.
    """
    theirs, mine = theirs // TURNS, mine // TURNS
    if theirs != mine and theirs and mine:
        raise BackendError(
            f"workers are out of step: of the calls that the workers of {about()} have made "
            f"together since they last compiled, this one is number {mine} here, and number "
            f"{theirs} on worker {peer}; one of them left out a call, or made one more. Call the "
            f"same plans in the same order on every worker"
        )


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
