"""End of an MPI backend before its process ends: its communicator is freed, MPI is finalized, or
the process is a fork. Its plans then raise, without using MPI or shared memory."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from mpi4py import MPI

from linop.backends.engine.base import Backend
from linop.backends.engine.worker import Worker
from linop.backends.mpi.joining import meet
from linop.backends.mpi.transport import Ranks
from linop.backends.together import ending
from linop.errors import BackendError


class RankWorker(Worker):
    """A worker that is a rank of a communicator.

    Args:
        get: makes backends of its kind.
        options: its settings, arguments of that.
        own: transport and array module (NumPy by default).
    """

    transport: Ranks

    def __init__(self, get: Callable[..., Backend], options: dict[str, Any], *own: Any) -> None:
        super().__init__(options["backend"], own[0], options["debug"], *own[1:])
        self._get = get
        self._options = {name: value for name, value in options.items() if name != "backend"}
        self._comms: list[MPI.Comm] = []

    def _part(self, parts: Sequence[tuple[int, ...]], mine: tuple[int, ...]) -> Worker:
        # All ranks have arrived, so Split does not block.
        comm = self.transport.comm.Split(mine[0], self.worker)
        self._comms.append(comm)
        part = self._get(comm, **self._options)
        assert isinstance(part, Worker)
        return part

    def leave(self) -> None:
        """Free the communicators of this backend and of its parts; collective."""
        for comm in self._comms:
            comm.Free()
        self.transport.leave()


_LIVE: weakref.WeakSet[RankWorker] = weakref.WeakSet()


def kept(comm: MPI.Comm, key: int, make: Callable[[], RankWorker]) -> RankWorker:
    """The backend of a communicator, which is made at the first call: each communicator is
    duplicated once. It ends with the communicator, with MPI, and in forks.

    Args:
        key: as made by `new_key`.
    """
    known = comm.Get_attr(key)
    if isinstance(known, RankWorker):
        return known
    worker = make()
    comm.Set_attr(key, worker)
    _LIVE.add(worker)
    return worker


def new_key() -> int:
    """Key of a communicator's attribute; one for each kind of backend."""
    return MPI.Comm.Create_keyval(delete_fn=_freed)


def _freed(comm: MPI.Comm, keyval: int, worker: RankWorker) -> None:
    del comm, keyval
    why = "the communicator of its backend was freed; get a backend of another one"
    _end(worker, why, worker.leave)


def _end(worker: RankWorker, why: str, last: Callable[[], None] | None = None) -> None:
    """End a backend's plans, and then its transport; once.

    Args:
        why: text of the error that later calls raise.
        last: action between the two, run only if MPI can still be called; all ranks meet before. An
            error of the meeting aborts the job, since callbacks of MPI cannot raise.
    """
    if worker.ended:
        return
    worker.ended = True
    if last is not None and worker.transport.usable:
        with ending.aborting():
            meet([worker.transport])
    for plan in list(worker.bound.values()):
        plan.end(why)
    worker.started.clear()
    if last is not None and worker.transport.usable:
        last()
    worker.transport.end(BackendError(why))


def _finalized(comm: MPI.Comm, keyval: int, value: Any) -> None:
    """Callback before MPI is finalized, which deletes this attribute of COMM_SELF first."""
    del comm, keyval, value
    ending.end_well()
    for worker in list(_LIVE):
        _end(worker, "MPI is finalized: call plans before that")


def _forked() -> None:
    """Callback in a forked child: end the backends without use of the parent's memory, requests and
    communicators."""
    for worker in list(_LIVE):
        why = (
            f"this process {os.getpid()} is a fork of worker {worker.worker}, which alone may call "
            f"its plans; call them there, or start processes by multiprocessing's 'spawn'"
        )
        worker.transport.end(BackendError(why))
        _end(worker, why)


MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=_finalized), True)
os.register_at_fork(after_in_child=_forked)
