"""Sums of two numbers over all ranks of one machine, which each writes where all read them.

A rank writes its numbers into a line of its own, and then the number of the exchange; it reads a
line once that number is there. Lines are used in turn, for odd and for even exchanges: a rank
writes the next but one only after all have begun the next, so after all have read this one.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from linop.backends.mpi.shared_memory.pool import ALIGNED, NoWindowError, Segment
from linop.backends.mpi.shared_memory.signals import ORDERED
from linop.backends.together.deadlock import Key
from linop.backends.together.transport import ANY, Awaited
from linop.errors import BackendError, restated

if TYPE_CHECKING:  # it makes boards
    from linop.backends.mpi.lifetime import RankWorker

_KEY: Key = "board", 0
"""Key of these exchanges, for deadlock detection."""
_BITS = 40
_NUMBER, _CODE, _TURN = range(3)
"""Indices in a line, of 64-bit integers."""
_EVEN = 4
"""Index of the line for even exchanges; that for odd ones is at 0."""
_MOST = 2**63


class Board:
    """Lines of all ranks of a backend, in shared memory. Use `board_of`.

    Args:
        lines: memory of each rank, by rank.
    """

    def __init__(self, worker: RankWorker, lines: Sequence[memoryview]) -> None:
        self._worker = worker
        self._transport = worker.transport
        self._channel, self._points = worker.transport.channel, worker.transport.points
        self._mine = lines[worker.worker]
        self._others = [(w, line) for w, line in enumerate(lines) if w != worker.worker]
        self._turn = 0
        self._lock = threading.Lock()

    def sum(self, number: int, code: int, doing: str) -> tuple[int, int]:
        """Sums of two int64 over all ranks, of which the first overflows as those of NumPy do.
        Collective.

        Args:
            doing: the activity, for reports of waits.

        Raises:
            BackendError: the backend has ended, or another thread is here. LinopError: it failed.
                DeadlockError: a rank does not come.
        """
        if not self._lock.acquire(False):
            raise BackendError(
                f"threads {doing} at once; layers are called by one thread of each worker"
            )
        try:
            turn = self._next()
            k = _EVEN if turn % 2 == 0 else 0
            mine = self._mine
            mine[k], mine[k + _CODE] = number, code
            mine[k + _TURN] = turn  # the last, as others look at it
            self._turn = turn
            for worker, theirs in self._others:
                if theirs[k + _TURN] != turn:
                    self._wait(worker, partial(theirs.__getitem__, k + _TURN), doing)
                number += theirs[k]
                code += theirs[k + _CODE]
            self._points[_KEY] = turn, math.inf
        finally:
            self._lock.release()
        if not -_MOST <= number < _MOST:
            number = (number + _MOST) % (2 * _MOST) - _MOST
        return number, code

    def _next(self) -> int:
        """Number of the next exchange. An error that ended the waits of all may have interrupted
        another one on each, so that the numbers begin anew with it."""
        if self._worker.failure is not None:
            raise restated(self._worker.failure, str(self._worker.failure))
        if self._worker.ended:
            self._transport.comm.Get_rank()  # raises the reason
        return max(self._turn, self._channel.epoch << _BITS) + 1

    def _wait(self, worker: int, theirs: Callable[[], int], doing: str) -> None:
        turn = self._turn
        for _ in range(self._transport.spins):
            if theirs() == turn:
                return
        self._transport.busy = ANY
        words = f"worker {worker} to {doing}"
        who = partial(Awaited, words, (worker,), key=_KEY, number=turn)
        self._transport.until(lambda: theirs() == turn, who)


def board_of(worker: RankWorker, doing: str) -> Board | None:
    """A board of all ranks of a backend, which are on one machine; collective. None where shared
    memory is short, or stores of one core are not seen in order by others.

    Args:
        doing: what the ranks need it for.
    """
    transport = worker.transport
    if not all(transport.gather_all(ORDERED, doing)):
        return None
    try:
        here = range(transport.workers)
        segment = Segment(transport.gather_all, worker.worker, here, ALIGNED)
    except NoWindowError:
        return None
    return Board(worker, [segment.memory[w].data.cast("q") for w in here])
