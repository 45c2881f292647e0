"""End of an MPI backend before its process ends: its communicator is freed, MPI is finalized, or
the process is a fork. Its plans then raise, without using MPI or shared memory."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from linop.backends.jobs import ending
from linop.backends.jobs.joining import meet
from linop.backends.transports.mpi_transport import Ranks
from linop.backends.worker import Worker
from linop.errors import BackendError

FREED = "the communicator of its backend was freed; get a backend of another one"
_LIVE: weakref.WeakSet[Worker] = weakref.WeakSet()


def watch(worker: Worker) -> None:
    """Register a backend to be ended with MPI, and in forks."""
    _LIVE.add(worker)


def end(worker: Worker, why: str, last: Callable[[], None] | None = None) -> None:
    """End a backend's plans, and then its transport; once.

    Args:
        why: text of the error that later calls raise.
        last: action between the two, run only if MPI can still be called; all ranks meet before. An
            error of the meeting aborts the job, since callbacks of MPI cannot raise.
    """
    assert isinstance(worker.transport, Ranks)
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
        end(worker, "MPI is finalized: call plans before that")


def _forked() -> None:
    """Callback in a forked child: end the backends without use of the parent's memory, requests and
    communicators."""
    for worker in list(_LIVE):
        why = (
            f"this process {os.getpid()} is a fork of worker {worker.worker}, which alone may call "
            f"its plans; call them there, or start processes by multiprocessing's 'spawn'"
        )
        assert isinstance(worker.transport, Ranks)
        worker.transport.end(BackendError(why))
        end(worker, why)


MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=_finalized), True)
os.register_at_fork(after_in_child=_forked)
