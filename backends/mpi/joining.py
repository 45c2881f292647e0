"""Joining and parting of ranks: collective waits that end even if a rank never arrives.

A rank announces its end (`linop.backends.together.ending`), and ranks that wait for it to join
check for that. A rank that has joined waits for the others at its end, and tells those that wait
for it in a plan that it has ended (`linop.backends.mpi.waits`). The numbers of calls that all have
made are compared then.
"""

from __future__ import annotations

import math
import sys
import time
import weakref
from collections.abc import Generator, Iterator, Sequence

import numpy as np
from mpi4py import MPI

from linop.backends.engine.roads.call_numbers import compare_calls
from linop.backends.mpi.transport import Ranks, keep
from linop.backends.together import builds
from linop.backends.together.ending import has_ended
from linop.backends.together.messages import decoded, encoded
from linop.backends.together.transport import Awaited, Counts
from linop.backends.together.watchdog import WATCHDOG
from linop.errors import BackendError, DeadlockError, communication

_NAP = 1e-3
"""Seconds between polls."""
_ASKED = 1.0
"""Seconds between checks for ranks that have ended."""
_MINUTE = 60.0
_HEAD = 8
"""Bytes that say how long a message is, which is padded to the length of the longest."""
_LIVE: weakref.WeakSet[Ranks] = weakref.WeakSet()
_EXIT = "exit", 0


def joined(comm: MPI.Comm, limit: float) -> Ranks:
    """The transport of this rank, over a private communicator; collective.

    Raises:
        BackendError: ranks have different sources of linop; on every rank. DeadlockError: a rank
            has ended, or the limit is reached.
    """
    private = MPI.Intracomm(duplicated(comm, limit))

    def gathered(mine: bytes) -> list[bytes]:
        said = np.empty((private.size, len(mine)), np.uint8)
        request = private.Iallgather(np.frombuffer(mine, np.uint8), said)
        _wait(request, comm, limit, said)
        return [one.tobytes() for one in said]

    try:
        builds.check(gathered)
    except DeadlockError:
        raise  # others may not have the result yet
    except BackendError:
        private.Free()
        raise
    ranks = Ranks(private, limit)
    _LIVE.add(ranks)
    if ranks.workers > 1 and limit < math.inf:
        WATCHDOG.watch(ranks)
    return ranks


def duplicated(comm: MPI.Comm, limit: float) -> MPI.Comm:
    """Duplicate of a communicator; collective, with a bounded wait.

    Raises:
        DeadlockError: a rank has ended, or the limit (in seconds) is reached.
    """
    twin, request = comm.Idup()
    _wait(request, comm, limit, twin)
    return twin


@communication()
def _wait(request: MPI.Request, comm: MPI.Comm, limit: float, kept: object) -> None:
    """Wait for a collective request of a communicator.

    Args:
        kept: kept alive if the request is abandoned.

    Raises:
        DeadlockError: a rank has ended, or the limit (in seconds) is reached.
    """
    begun, asking, words = time.monotonic(), _ASKED, _MINUTE
    polls = 0
    while not request.Test():
        polls += 1
        time.sleep(min(polls * 1e-5, _NAP))
        waited = time.monotonic() - begun
        left = []
        if waited > asking:
            asking, left = waited + _ASKED, _ended(comm)
        if left or waited > limit:
            _lost.append((kept, request))
            who = f"rank {left[0]} of COMM_WORLD, which has ended" if left else "all others"
            what = "to call linop.launch, or to get the backend of its communicator"
            how = "deadlock" if left else f"a wait took longer than {limit:g} s"
            raise DeadlockError(f"{how}: waiting for {who}, {what}")
        if waited > words:
            words += _MINUTE
            sys.stderr.write(f"linop: rank {comm.rank} waits for all others to start linop\n")


_lost: list[tuple[object, MPI.Request]] = []
"""Incomplete requests, and what they fill, kept alive: MPI may still write to them."""


def _ended(comm: MPI.Comm) -> list[int]:
    """Ranks of a communicator that have ended, as ranks of COMM_WORLD."""
    mine, everybody = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    ranks = mine.Translate_ranks([*range(mine.size)], everybody)
    mine.Free()
    everybody.Free()
    return [rank for rank in ranks if rank != MPI.UNDEFINED and has_ended(rank)]


def part() -> None:
    """Final action of a rank: `meet` the other ranks of each of its communicators."""
    meet([ranks for ranks in list(_LIVE) if ranks.usable])
    WATCHDOG.stop()


def meet(live: Sequence[Ranks]) -> None:
    """Wait for the other ranks of some communicators, which they leave too, and compare the numbers
    of calls.

    Raises:
        BackendError: numbers of calls differ; on all ranks of a communicator, unless told before.
    """
    partings = [_parting(ranks) for ranks in live]
    count = 0
    while partings:
        partings = [parting for parting in partings if next(parting, "over") is None]
        count += 1
        time.sleep(min(count * 1e-5, _NAP))


def _parting(ranks: Ranks) -> Iterator[None]:
    """Last meeting of one communicator, to be polled; abandoned at the wait limit. MPI carries the
    numbers of calls: errors that were caught may have left the control channel in other epochs."""
    data = encoded({} if ranks.out_of_step else ranks.plans.counts())
    mine = np.frombuffer(len(data).to_bytes(_HEAD, "little") + data, np.uint8)
    size = np.array([len(mine)])
    if (yield from _complete(ranks, ranks.comm.Iallreduce(MPI.IN_PLACE, size, MPI.MAX))):
        padded = np.resize(mine, size)
        said = np.empty((ranks.workers, len(padded)), np.uint8)
        if (yield from _complete(ranks, ranks.comm.Iallgather(padded, said))):
            compare_calls(ranks, [_counts(one.tobytes()) for one in said])


def _counts(padded: bytes) -> Counts:
    length = int.from_bytes(padded[:_HEAD], "little")
    counts: Counts = decoded(padded[_HEAD : _HEAD + length])
    return counts


def _complete(ranks: Ranks, request: MPI.Request) -> Generator[None, None, bool]:
    """Poll a request of the last meeting; returns False if the wait limit is reached before it is
    complete."""
    others = [peer for peer in range(ranks.workers) if peer != ranks.worker]
    ends = Awaited("all others to end", others, key=_EXIT, number=1, ended=True)
    over = ranks.leaving(request.Test, lambda: ends)
    while not over():
        yield
    complete: bool = request.Test()
    if not complete:
        keep(request)
    return complete
