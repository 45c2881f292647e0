"""Properties with faults in them, which `test_spmd` and `support.spmd.fault_table` want to be
found: each is wrong on two workers or more, from size 3 on. Ranks that a fault has ended start
again often, and import this: nothing slow is imported. What needs Hypothesis or pytest is in
`support.spmd.rejections`."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import linop
from linop import LinearOperator, Space
from linop.backends import Backend
from support.contracts.plans import total

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(frozen=True)
class Fault:
    """A property with a fault, and what its report has to say."""

    test: Callable[..., None]
    says: tuple[str, ...]
    ends: bool = False
    """True for a fault that ends the job, so that every failing example starts another."""
    minimum: tuple[int, int] | None = (2, 3)
    """Workers and size of the smallest example; None where there is no example."""
    sizes: int = 5
    """The largest size to try."""
    travels: Callable[[int], Any] = int
    """Change of a size before it is sent to the workers."""

    @property
    def name(self) -> str:
        return self.test.__name__


FAULTS: dict[str, Fault] = {}
"""By name."""


def fault(*says: str, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a fault; its report has all of these words."""

    def register(test: Callable[..., None]) -> Callable[..., None]:
        decorated = linop.testing.spmd(workers=(1, 2, 3))(test)
        FAULTS[test.__name__] = Fault(decorated, says, **options)
        return decorated

    return register


def faulty(there: MPI.Comm | Backend, size: int) -> bool:
    """True on the faulty worker: the last, from two workers and size 3 on."""
    if isinstance(there, Backend):
        worker, workers = there.worker or 0, there.workers or 1
    else:
        worker, workers = there.rank, there.size
    return workers >= 2 and size >= 3 and worker == workers - 1


def ring(comm: MPI.Comm) -> tuple[int, int]:
    """The ranks before and after this one."""
    return (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size


# What raises.


@fault("rank 1 failed", "assert not faulty", ends=True)
def asserts_on_one_rank(backend: Backend, size: int) -> None:
    """One rank finds a fault, while the others are in a plan call and wait for it."""
    plan = total(backend.workers or 1, size).compile(backend)
    plan(np.ones(size))
    assert not faulty(backend, size)
    plan(np.ones(size))


@fault("rank 0 was stuck", "rank 1 failed", "ValueError: planted", ends=True)
def raises_before_a_collective(comm: MPI.Comm, size: int) -> None:
    if faulty(comm, size):
        raise ValueError("planted")
    comm.Barrier()


@fault("rank 1 failed", "ZeroDivisionError", ends=True)
def raises_in_a_collective(backend: Backend, size: int) -> None:
    """A local operator between two movements raises."""

    def forward(x: Any) -> Any:
        if faulty(backend, size):
            raise ZeroDivisionError("planted")
        return x

    everywhere = total(backend.workers or 1, size)
    spaces = [Space(region) for region in everywhere.codomain.regions]
    local = linop.direct_sum(*(linop.local(s, s, forward, lambda y: y, name="A") for s in spaces))
    (everywhere @ local @ everywhere).compile(backend)(np.ones(size))


@fault("rank 1 failed", "OSError: [Errno 28]")
def writes_to_a_full_disk(comm: MPI.Comm, size: int) -> None:
    with open("/dev/full" if faulty(comm, size) else os.devnull, "w") as file:
        file.write("x" * 100_000)


@fault("rank 1 failed", "SystemExit: 3")
def exits(comm: MPI.Comm, size: int) -> None:
    if faulty(comm, size):
        sys.exit(3)


@fault("rank 1 failed", "MemoryError")
def wants_too_much_memory(comm: MPI.Comm, size: int) -> None:
    if faulty(comm, size):
        bytearray(1 << 62)


@fault("rank 1 failed", "RecursionError")
def recurses(comm: MPI.Comm, size: int) -> None:
    if faulty(comm, size):
        recurses.__wrapped__(comm, size)  # type: ignore[attr-defined]


class UnprintableError(Exception):
    """It can be neither printed nor pickled."""

    def __init__(self) -> None:
        super().__init__(lambda: None)

    def __str__(self) -> str:
        raise RuntimeError("no")


@fault("rank 1 failed", "UnprintableError")
def raises_the_unprintable(comm: MPI.Comm, size: int) -> None:
    if faulty(comm, size):
        raise UnprintableError


# What is wrong with messages.


@fault("rank 0 passed", "rank 1 was stuck", "in misses_a_send", ends=True)
def misses_a_send(comm: MPI.Comm, size: int) -> None:
    if faulty(comm, size):
        comm.Recv(np.zeros(size), 0)


@fault("ranks 0, 1 were stuck", "in sends_in_a_cycle", ends=True)
def sends_in_a_cycle(comm: MPI.Comm, size: int) -> None:
    if comm.size >= 2 and size >= 3:
        before, after = ring(comm)
        comm.Ssend(np.zeros(size), after)
        comm.Recv(np.zeros(size), before)


@fault("ranks 0, 1 were stuck", "in receives_in_a_cycle", ends=True)
def receives_in_a_cycle(comm: MPI.Comm, size: int) -> None:
    if comm.size >= 2 and size >= 3:
        before, after = ring(comm)
        comm.Recv(np.zeros(size), before)
        comm.Send(np.zeros(size), after)


@fault("rank 0 was stuck", "in skips_a_collective", "rank 1 passed", ends=True)
def skips_a_collective(comm: MPI.Comm, size: int) -> None:
    if not faulty(comm, size):
        comm.Barrier()


@fault("rank 0 was stuck", "in skips_a_plan", "rank 1 passed", ends=True)
def skips_a_plan(backend: Backend, size: int) -> None:
    plan = total(backend.workers or 1, size).compile(backend)
    if not faulty(backend, size):
        plan(np.ones(size))


@fault("ranks 0, 1 were stuck", "in has_two_roots", ends=True)
def has_two_roots(comm: MPI.Comm, size: int) -> None:
    """Each root waits for what the other rank sends to its own. (Two roots of a small broadcast may
    pass, with MPICH: ranks that share memory read what they should.)"""
    root = comm.rank if faulty(comm, size) else 0
    comm.Gather(np.zeros(size), np.zeros((comm.size, size)) if comm.rank == root else None, root)


@fault("rank 0 failed", "MPI_ERR_TRUNCATE|truncate")
def has_uneven_counts(comm: MPI.Comm, size: int) -> None:
    """The root of a broadcast sends more than others want."""
    comm.Bcast(np.zeros(size + faulty(comm, size)), root=comm.size - 1)


@fault("rank 0 failed", "MPI_ERR_TRUNCATE|truncate")
def sends_too_long_a_message(comm: MPI.Comm, size: int) -> None:
    before, after = ring(comm)
    send = comm.Isend(np.zeros(size + faulty(comm, size)), after)
    comm.Recv(np.zeros(size), before)
    send.Wait()


@fault("rank 0 failed", "a message was never received: 24 bytes from rank 1 with tag 5", ends=True)
def leaves_a_message(comm: MPI.Comm, size: int) -> None:
    if faulty(comm, size):
        comm.Send(np.zeros(size), 0, tag=5)


@fault("rank 1 failed", "MPI_ERR_RANK|rank")
def sends_to_nobody(comm: MPI.Comm, size: int) -> None:
    if faulty(comm, size):
        comm.Send(np.zeros(size), comm.size + 5)


# What is wrong with operators.


@fault("ranks 0, 1 failed", "dot-product test on mpi FAILED")
def has_a_wrong_adjoint(backend: Backend, size: int) -> None:
    """An adjoint that forgets a worker, on all ranks."""
    op = total(backend.workers or 1, size)
    wrong: LinearOperator = op.H
    if (backend.workers or 1) >= 2 and size >= 3:
        last = op.domain.regions[-1]
        wrong = wrong @ linop.clear(op.codomain, op.codomain[last.name])
    linop.testing.assert_adjoint(op, backend, adjoint=wrong)


@fault("ranks 0, 1 failed", "workers built different operators")
def builds_another_operator(backend: Backend, size: int) -> None:
    factor = 3 if faulty(backend, size) else 2
    (factor * total(backend.workers or 1, size)).compile(backend)


@fault("ranks 0, 1 failed", "assert np.isfinite")
def has_a_nan_on_one_rank(backend: Backend, size: int) -> None:
    plan = total(backend.workers or 1, size).compile(backend)
    given = np.ones(size)
    if faulty(backend, size):
        given[-1] = np.nan
    assert np.isfinite(plan(given)).all()


# What ends a process, or never ends.


@fault("rank 1 died", ends=True)
def is_killed(comm: MPI.Comm, size: int) -> None:
    if faulty(comm, size):
        os.kill(os.getpid(), signal.SIGKILL)
    comm.Barrier()


@fault("rank 1 died", ends=True)
def ends_without_a_word(comm: MPI.Comm, size: int) -> None:
    if faulty(comm, size):
        os._exit(0)
    comm.Barrier()


@fault("rank 1 died", "Fatal Python error: Segmentation fault", "in reads_nowhere", ends=True)
def reads_nowhere(comm: MPI.Comm, size: int) -> None:
    if faulty(comm, size):
        ctypes.string_at(0)
    comm.Barrier()


@fault("rank 1 died", ends=True)
def aborts(comm: MPI.Comm, size: int) -> None:
    if faulty(comm, size):
        comm.Abort(3)
    comm.Barrier()


@fault("rank 0 passed", "rank 1 was stuck", "in loops_in_c", ends=True)
def loops_in_c(comm: MPI.Comm, size: int) -> None:
    """Without giving the interpreter to any other thread."""
    if faulty(comm, size):
        re.match(r"(a+)+$", "a" * 64 + "b")


@fault("rank 0 passed", "rank 1 was stuck", "in loops_in_python", ends=True)
def loops_in_python(comm: MPI.Comm, size: int) -> None:
    while faulty(comm, size):
        pass


@fault("rank 0 passed", "rank 1 was stuck", "in waits_for_a_lock", ends=True)
def waits_for_a_lock(comm: MPI.Comm, size: int) -> None:
    if faulty(comm, size):
        threading.Event().wait()


@fault("rank 0 passed", "rank 1 was stuck", ends=True)
def is_stopped(comm: MPI.Comm, size: int) -> None:
    """The whole process sleeps until somebody continues it."""
    if faulty(comm, size):
        os.kill(os.getpid(), signal.SIGSTOP)


@fault("rank 0 passed", "rank 1 was stuck", "bytes ...]", "in prints_for_ever", ends=True)
def prints_for_ever(comm: MPI.Comm, size: int) -> None:
    while faulty(comm, size):
        print("again and again", "and again" * 100)


@fault("rank 1 failed", "a thread was left running", ends=True)
def leaves_a_thread(comm: MPI.Comm, size: int) -> None:
    if faulty(comm, size):
        threading.Thread(target=time.sleep, args=(1000,)).start()


# What is wrong with the test.


class Unpicklable:
    """It does not travel."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __reduce__(self) -> str | tuple[Any, ...]:
        if self.size >= 3:
            raise TypeError("planted")
        return Unpicklable, (self.size,)

    def __repr__(self) -> str:
        return repr(self.size)


@fault("the argument 'size' (TypeError: planted)", minimum=(1, 3), travels=Unpicklable)
def takes_what_does_not_travel(size: Any) -> None:
    del size
