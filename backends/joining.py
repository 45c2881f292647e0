"""How ranks come together, and how they part: waits that end where a rank never comes.

A rank that ends without having come says so to all others, on COMM_WORLD: that is where those who
wait for it look. It does so only if it has imported this: who uses linop without MPI, and MPI
without linop, must not find messages of ours there. One that has come waits at its end for the
others, and tells those that wait for it that it has ended (`linop.backends.waiting`).
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable

from mpi4py import MPI

from linop.backends.ranks import Ranks
from linop.backends.transport import Awaited
from linop.errors import DeadlockError

_FROM_THE_END = 7
"""The tag of a rank's last words on COMM_WORLD, which users hardly have, counted from the last."""
_NAP = 1e-3
"""Seconds between polls."""
_MINUTE = 60.0
_JOINED: list[int] = []
"""The sizes of communicators that were joined."""
_LIVE: weakref.WeakSet[Ranks] = weakref.WeakSet()
_EXIT = "exit", 0


def joined(comm: MPI.Comm, limit: float) -> Ranks:
    """The transport of this rank, over a communicator of its own; collective.

    Raises:
        DeadlockError: a rank has ended, or the limit is reached.
    """
    ranks = Ranks(MPI.Intracomm(duplicated(comm, limit)), limit)
    _LIVE.add(ranks)
    _JOINED.append(ranks.workers)
    return ranks


def duplicated(comm: MPI.Comm, limit: float) -> MPI.Comm:
    """A duplicate; collective, but a rank waits no longer than there is hope.

    Raises:
        DeadlockError: a rank has ended, or the limit is reached.
    """
    twin, request = comm.Idup()
    begun, words = time.monotonic(), _MINUTE
    polls = 0
    while not request.Test():
        polls += 1
        time.sleep(min(polls * 1e-5, _NAP))
        waited = time.monotonic() - begun
        left = _left(comm)
        if left or waited > limit:
            _lost.append((twin, request))
            who = f"rank {left[0]} of COMM_WORLD, which has ended" if left else "all others"
            what = "to call linop.launch, or to get the backend of its communicator"
            how = "deadlock" if left else f"a wait took longer than {limit:g} s"
            raise DeadlockError(f"{how}: waiting for {who}, {what}")
        if waited > words:
            words += _MINUTE
            sys.stderr.write(f"linop: rank {comm.rank} waits for all others to start linop\n")
    return twin


_lost: list[tuple[MPI.Comm, MPI.Request]] = []
"""Duplicates that will never be: MPI may still write to them."""


def _tag() -> int:
    return (MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767) - _FROM_THE_END


def _left(comm: MPI.Comm) -> list[int]:
    """The ranks of a communicator that have ended without having come, by COMM_WORLD's numbers."""
    world, status = MPI.COMM_WORLD, MPI.Status()
    if not world.Iprobe(MPI.ANY_SOURCE, _tag(), status):
        return []
    mine, everybody = comm.Get_group(), world.Get_group()
    members = everybody.Translate_ranks([status.Get_source()], mine)
    mine.Free()
    everybody.Free()
    return [status.Get_source()] if members[0] != MPI.UNDEFINED else []


def part() -> None:
    """The end of a rank: wait for the others of each of its communicators, or tell all that it was
    in none."""
    if not _JOINED:
        world = MPI.COMM_WORLD
        others = [rank for rank in range(world.size) if rank != world.rank]
        said = [world.Isend([b"", MPI.BYTE], rank, _tag()) for rank in others]
        MPI.Request.Testall(said)
        return
    live = [ranks for ranks in list(_LIVE) if ranks.usable]
    polls = [_parting(ranks) for ranks in live]
    count = 0
    while polls:
        polls = [poll for poll in polls if not poll()]
        count += 1
        time.sleep(min(count * 1e-5, _NAP))


def _parting(ranks: Ranks) -> Callable[[], bool]:
    request = ranks.comm.Ibarrier()
    others = [peer for peer in range(ranks.workers) if peer != ranks.worker]
    ends = Awaited("all others to end", others, key=_EXIT, number=1, ended=True)
    return ranks.leaving(request.Test, lambda: ends)
