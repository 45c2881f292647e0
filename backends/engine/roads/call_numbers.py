"""Call numbers: each call of a group's plans has a number, sent to each peer with the first message
of the call.

The receiver compares it with its own, so that a message is never attributed to another call: if a
worker leaves out a call, or makes an additional one, the numbers of the next plan's calls differ.
In shared memory the number is in the word that signals a message
(`linop.backends.mpi.shared_memory.runs`). In other transports it is appended to a message packed in
host memory, at negligible cost, or is a message of its own, sent first. MPI collectives carry no
number. All numbers are compared when all workers compile, and at the end of a program.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from linop.backends.engine.execution.instructions import Call, If, Operation, Set
from linop.backends.engine.execution.numbers import (
    Condition,
    Field,
    Item,
    Joined,
    Returned,
    Variable,
)
from linop.backends.together.transport import Counts, Transport
from linop.errors import BackendError
from linop.planning.plan import GROUP, Receive, Send
from linop.spaces.scalars import Array

PACKED = 8 * 1024
"""Largest contiguous box, in bytes, that is packed nevertheless: a copy and a persistent request
cost less than a request for memory that differs from run to run. On a device they cost more."""
_NUMBER = np.dtype(np.int64)
_BYTES = _NUMBER.itemsize


TURNS = 16
"""Modulus of a run's number in the signal of a message in shared memory: more than twice the
largest number of buffers."""
CALL = Variable("c")
"""Number of the current call, times `TURNS`; 0 if it is not counted."""
_NOBODY = -1


class Calls:
    """Call counter of all plans of one group of workers, reset at each collective compile.

    Only calls by one thread that are not split by `start` are counted, since their order is the
    same on all workers. Counting stops when a call fails, as numbers may differ from then on, and
    at the first call or compile by another thread, which other workers may have made in this one.

    Attributes:
        number: number of calls, times `TURNS`.
        thread: identifier of the thread whose calls are counted.
    """

    __slots__ = ("_overlap", "_several", "_stopped", "_thread", "number", "thread")

    def __init__(self) -> None:
        self.number = 0
        self.thread = self._thread = threading.get_ident()
        self._stopped = self._overlap = self._several = False

    def stop(self) -> None:
        """Stop counting."""
        self.thread, self._stopped = _NOBODY, True

    def again(self) -> None:
        """Restart from 0, as all workers do when they compile."""
        self.uncounted()
        if not self._several:
            self.number, self.thread = 0, self._thread
            self._stopped = self._overlap = False

    def uncounted(self) -> None:
        """Record an uncounted call: if another thread makes it, counting stops."""
        if self._thread != threading.get_ident():
            self.stop()
            self._several = True

    def __enter__(self) -> None:
        """Context of a call without a number, which may overlap others in any order."""
        self.uncounted()
        if self.thread == threading.get_ident():
            self.number += TURNS
            self.thread, self._overlap = _NOBODY, True

    def __exit__(self, *error: object) -> None:
        if not self._stopped and self._thread == threading.get_ident():
            self.thread = self._thread

    def counting(self) -> list[Operation]:
        """Operations that count a call, and set `CALL` to its number times `TURNS`; 0 for an
        uncounted call."""
        number = Field(self, "number")
        return [
            If(
                Condition(Returned(threading.get_ident), "==", Field(self, "thread")),
                [Set([number, CALL], number + TURNS)],
                [Set([CALL], 0), Call(self.uncounted)],
            )
        ]

    @property
    def counted(self) -> int | None:
        """Number of calls since the last compile; None if workers may differ in it."""
        self.uncounted()
        return None if self._stopped or self._overlap else self.number // TURNS


class Unnumbered(Calls):
    """The calls of plans whose order is fixed otherwise, as by a schedule that all workers know:
    their messages have the number 0, and the calls of other plans are numbered without them."""

    __slots__ = ()

    def uncounted(self) -> None:
        """Any thread may make a call."""

    def __enter__(self) -> None:
        pass

    def counting(self) -> list[Operation]:
        return [Set([CALL], 0)]


def check_step(peer: int, theirs: int, mine: int, about: Callable[[], str]) -> None:
    """Check that a message belongs to the current call.

    Args:
        theirs: number of the sender's call, as in `Calls.number`; 0 if unknown.
        mine: number of this worker's call.

    Raises:
        BackendError: the numbers differ.
    """
    theirs, mine = theirs // TURNS, mine // TURNS
    if theirs != mine and theirs and mine:
        raise BackendError(
            f"workers are out of step: of the calls that the workers of {about()} have made "
            f"together since they last compiled, this one is number {mine} here, and number "
            f"{theirs} on worker {peer}; one of them left out a call, or made one more. Call the "
            f"same plans in the same order on every worker"
        )


def compare_calls(transport: Transport, said: Sequence[Counts]) -> None:
    """`check_calls` of the workers of a transport, which remembers that it raised."""
    try:
        check_calls(said)
    except BackendError:
        transport.out_of_step = True
        raise


def check_calls(said: Sequence[Counts]) -> None:
    """Check that all workers of each group made the same number of calls of its plans.

    Raises:
        BackendError: a worker left out a call, or made an additional one; on every worker.
    """
    for group in sorted({group for one in said for group in one}):
        made = [(w, many) for w in group if (many := said[w].get(group)) is not None]
        if len({many for _, many in made}) > 1:
            each = ", ".join(f"{many} on worker {w}" for w, many in made)
            raise BackendError(
                f"workers are out of step: of plans of workers {list(group)} they have made other "
                f"numbers of calls since they last compiled: {each}; one of them left out a call, "
                f"or made one more. Call the same plans in the same order on every worker"
            )


class Room(NamedTuple):
    """Buffer of a message with a call number at its end."""

    whole: Array
    """Message, padding and number, as bytes."""
    message: Array
    number: memoryview

    @staticmethod
    def of(size: int, dtype: np.dtype[Any]) -> Room:
        many = size * dtype.itemsize
        whole = np.zeros(-(-many // _BYTES) * _BYTES + _BYTES, np.uint8)
        return Room(whole, whole[:many].view(dtype), whole[-_BYTES:].view(_NUMBER).data)


def never(peer: int) -> int:
    """No message has the number appended."""
    del peer
    return -1


class Numbers:
    """Call numbers in some messages of one plan.

    Args:
        messages: its sends and receives, in order.
        calls: call counter of the plan's workers; None if there are no other workers, or calls are
            not compared.
        most: gives bytes of the longest message, to or from a peer, that has the number appended.
        about: gives the plan's name.
        counted: True if other instructions count the calls.

    Attributes:
        mine: buffer of the current call's number, for a message of its own.
    """

    def __init__(
        self,
        messages: Sequence[Send | Receive],
        dtype: np.dtype[Any],
        calls: Calls | None,
        most: Callable[[int], int],
        about: Callable[[], str],
        counted: bool = False,
    ) -> None:
        self._dtype = dtype
        self._counted = counted
        self._calls = calls
        self._most = most
        self._about = about
        self._first: dict[tuple[bool, int], Send | Receive] = {}
        for step in messages if calls is not None else ():
            if step.peer != GROUP:
                self._first.setdefault((isinstance(step, Send), step.peer), step)
        self.mine: Array = np.zeros(1, _NUMBER)
        self._theirs: dict[int, list[tuple[int, memoryview]]] = {}
        self._rooms: dict[tuple[bool, int], Room] = {}

    def counting(self) -> list[Operation]:
        """Operations that count a call at its start, and store its number."""
        if self._calls is None:
            return []
        alone = any(isinstance(step, Send) and self.before(step) for step in self._first.values())
        said: list[Operation] = [Set([Item(self.mine.data, 0)], CALL)] if alone else []
        return [*([] if self._counted else self._calls.counting()), *said]

    def inside(self, step: Send | Receive) -> bool:
        """True if the number is appended to this message."""
        return self._is_first(step) and step.size * self._dtype.itemsize <= self._most(step.peer)

    def before(self, step: Send | Receive) -> bool:
        """True if the number is a message of its own before this one."""
        return self._is_first(step) and not self.inside(step)

    def _is_first(self, step: Send | Receive) -> bool:
        return self._first.get((isinstance(step, Send), step.peer)) is step

    def room(self, step: Send | Receive) -> Room:
        """Buffer of a message that has the number appended."""
        key = isinstance(step, Send), step.peer
        if key not in self._rooms:
            room = self._rooms[key] = Room.of(step.size, self._dtype)
            if isinstance(step, Receive):
                self._theirs.setdefault(step.stage, []).append((step.peer, room.number))
        return self._rooms[key]

    def theirs(self, step: Receive) -> Array:
        """Buffer of a number that arrives before a message."""
        number = np.zeros(1, _NUMBER)
        self._theirs.setdefault(step.stage, []).append((step.peer, number.data))
        return number

    def checking(self, stage: int) -> list[Operation]:
        """Operations that compare the numbers received in a stage with the current call's."""
        theirs = self._theirs.get(stage, [])

        def check(mine: int) -> None:
            for peer, number in theirs:
                check_step(peer, number[0], mine, self._about)

        differ = [Condition(Item(number, 0), "!=", CALL) for _, number in theirs]
        return [If(Joined("or", differ), [Call(check, [CALL])])] if differ else []
