"""The ``mpi`` backend: one rank a worker, buffers of bytes through mpi4py.

An exception, or an exit status, that leaves a process ends the whole job: the other ranks would
wait for it for ever.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NoReturn

import numpy as np

from linop.backends.base import Backend, Worker
from linop.errors import ArgumentError, BackendError, MissingExtraError
from linop.scalars import Array

try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:
    raise MissingExtraError(
        f"backend 'mpi' needs mpi4py and an MPI library: pip install 'linop-algebra[mpi]' ({error})"
    ) from None

_SPIN = 1000
"""Polls (about 1 µs each) before a waiting rank begins to sleep between them."""
_NAP = 50e-6
"""Seconds of such a sleep."""
_PASSING_ON = 0.5
"""Seconds that mpiexec has to pass on the last words of a rank: MPICH's may lose, once a rank
aborts, what it has not read by then."""


def get(comm: MPI.Comm | None = None) -> Backend:
    """The backend of this rank.

    Args:
        comm: an intracommunicator, COMM_WORLD by default; worker w is its rank w. The first call
            for a communicator is collective, for it is duplicated to keep messages apart.
    """
    comm = MPI.COMM_WORLD if comm is None else comm
    if not isinstance(comm, MPI.Comm):
        raise ArgumentError(f"comm: expected an mpi4py communicator, given {comm!r}")
    if comm == MPI.COMM_NULL or comm.Is_inter():
        raise BackendError("comm: expected an intracommunicator that this rank belongs to")
    known = comm.Get_attr(_CACHED)
    if isinstance(known, Backend):
        return known
    worker = Worker("mpi", Messages(comm.Dup()))
    comm.Set_attr(_CACHED, worker)
    return worker


def launch(main: Callable[[Backend], Any], workers: int | None = None) -> list[Any]:
    """Run ``main(backend)`` on the first `workers` ranks (by default all); the others return at
    once.

    Returns:
        What `main` returned on this rank, in its place; None elsewhere.

    Raises:
        BackendError: there are fewer ranks than workers; on every rank.
    """
    world: MPI.Comm = MPI.COMM_WORLD
    size: int = world.size if workers is None else workers
    if size > world.size:
        raise BackendError(
            f"launch: {size} workers wanted, and the job has {world.size} ranks; start it with "
            f"mpiexec -n {size}"
        )
    results: list[Any] = [None] * size
    if size < world.size:
        world = world.Split(0 if world.rank < size else MPI.UNDEFINED, world.rank)
    if world != MPI.COMM_NULL:
        results[world.rank] = main(get(world))
        if size < MPI.COMM_WORLD.size:
            world.Free()
    return results


class Messages:
    """One rank's transport (`linop.backends.base.Transport`) over a communicator of our own."""

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm = comm
        self.worker: int = comm.rank
        self.workers: int = comm.size
        self._tags: int = comm.Get_attr(MPI.TAG_UB) or 32767

    def receive(self, peer: int, tag: int, buffer: Array) -> Any:
        return self._comm.Irecv([_bytes(buffer), MPI.BYTE], peer, tag % self._tags)

    def send(self, peer: int, tag: int, buffer: Array) -> Any:
        return self._comm.Isend([_bytes(buffer), MPI.BYTE], peer, tag % self._tags)

    def wait(self, pending: Sequence[Any]) -> None:
        requests = list(pending)
        polls = 0
        while not MPI.Request.Testall(requests):
            # MPI's own wait may spin. Ranks that share a core, or wait long, must let others run.
            os.sched_yield() if polls < _SPIN else time.sleep(_NAP)
            polls += 1

    def gather_all(self, data: bytes) -> list[bytes]:
        gathered = bytearray(len(data) * self.workers)
        self.wait([self._comm.Iallgather([data, MPI.BYTE], [gathered, MPI.BYTE])])
        pieces = range(0, len(gathered), len(data)) if data else []
        return [bytes(gathered[k : k + len(data)]) for k in pieces]


def _bytes(buffer: Array) -> Array:
    """A contiguous array's memory, whatever its dtype: a movement does not look at values."""
    return buffer.view(np.uint8)


def _free(comm: MPI.Comm, keyval: int, worker: Worker) -> None:
    del comm, keyval
    if not MPI.Is_finalized():
        worker.transport._comm.Free()  # type: ignore[attr-defined]


_CACHED = MPI.Comm.Create_keyval(delete_fn=_free)
"""Attribute under which a communicator keeps its backend, so that it is duplicated once."""


def _abort(error: BaseException, trace: TracebackType | None) -> None:
    sys.stdout.flush()
    lines = traceback.format_exception(type(error), error, trace)
    # One write, which the lines of other ranks cannot interrupt.
    sys.stderr.write(f"linop: worker {MPI.COMM_WORLD.rank} ends the job:\n{''.join(lines)}")
    sys.stderr.flush()
    time.sleep(_PASSING_ON)
    code = error.code if isinstance(error, SystemExit) else 1
    MPI.COMM_WORLD.Abort(code if isinstance(code, int) else 1)


class _EndsJob:
    """Makes a rank that ends with an exception or a status take the whole job with it: the others
    would wait for it for ever."""

    def __init__(self) -> None:
        self.status: object = None
        sys.excepthook = self.hook
        # No hook runs for a SystemExit, so the status is kept until MPI is about to be finalized.
        sys.exit = self.exit
        atexit.register(self.at_exit)

    def hook(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        del kind
        _abort(error, trace)

    def exit(self, status: Any = None, /) -> NoReturn:
        self.status = status
        raise SystemExit(status)

    def at_exit(self) -> None:
        if self.status not in (None, 0) and not MPI.Is_finalized():
            _abort(SystemExit(self.status), None)


if MPI.COMM_WORLD.size > 1:
    _EndsJob()
