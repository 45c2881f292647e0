"""Checks of `test_rank_reuse`, on ranks: ways to fail, in the middle of communication and
outside."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

import linop
from linop import Space
from linop.backends import Backend
from support.contracts.plans import total

if TYPE_CHECKING:
    from mpi4py import MPI

SIZE = 3


def on_backend(comm: MPI.Comm, contract: Callable[..., None], *arguments: Any) -> None:
    contract(linop.backends.get("mpi", comm=comm), *arguments)


def planted(backend: Backend, call: int, group: int | None = None) -> Callable[[], Any]:
    """Calls of a plan between the first `group` workers, by default all, whose local function
    raises on the last one, in this call."""
    workers = group or backend.workers or 1
    calls = []

    def forward(x: Any) -> Any:
        calls.append(x)
        if backend.worker == workers - 1 and len(calls) == call:
            raise ZeroDivisionError("planted")
        return x

    everywhere = total(workers, SIZE)
    spaces = [Space(region) for region in everywhere.codomain.regions]
    local = linop.direct_sum(*(linop.local(s, s, forward, lambda y: y, name="A") for s in spaces))
    plan = (everywhere @ local @ everywhere).compile(backend)
    x = np.ones(SIZE) if (backend.worker or 0) < workers else None
    return lambda: plan(x)


def local_function(backend: Backend, call: int) -> None:
    """Between two stages; from the third call on a run is one generated function."""
    again = planted(backend, call)
    for _ in range(call):
        again()


def local_function_after_start(backend: Backend) -> None:
    workers = backend.workers or 1
    regions = total(workers, SIZE).codomain.regions

    def forward(x: Any) -> Any:
        raise ZeroDivisionError("planted")

    spaces = [Space(region) for region in regions]
    local = linop.direct_sum(*(linop.local(s, s, forward, lambda y: y, name="A") for s in spaces))
    plan = (local @ total(workers, SIZE)).compile(backend)
    plan.start(np.ones(SIZE))
    plan.finish()


def another_error_instead(backend: Backend) -> None:
    """An error that is raised while one of a run is handled."""
    try:
        local_function(backend, 3)
    except linop.errors.BackendError:
        raise AssertionError("on the other ranks") from None
    except ZeroDivisionError as error:
        raise AssertionError("on the last rank") from error


def interrupted_soon() -> None:
    """Raise KeyboardInterrupt in this thread."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)


def interrupt_in_a_call(backend: Backend, quick: bool) -> None:
    """Rank 0 is interrupted in a wait for the others, which do not communicate then."""
    plan = total(backend.workers or 1, SIZE).compile(backend)
    for _ in range(3 if quick else 0):
        plan(np.ones(SIZE))
    if backend.worker:
        time.sleep(0.5)
        raise AssertionError("planted")
    interrupted_soon()
    plan(np.ones(SIZE))


def interrupt_in_a_meeting(backend: Backend) -> None:
    if backend.worker == 0:
        space = total(backend.workers or 1, SIZE).codomain
        v = backend.vector(space, np.ones(SIZE))
        interrupted_soon()
        v.norm()


def interrupt_before_all_have_come(comm: MPI.Comm) -> None:
    if comm.rank == 0:
        interrupted_soon()
        linop.backends.get("mpi", comm=comm)


def limit_in_a_call(comm: MPI.Comm, windows: bool) -> None:
    # Longer than ranks take to meet on a busy machine.
    backend = linop.backends.get("mpi", comm=comm, windows=windows, wait_limit=2.0)
    plan = total(comm.size, SIZE).compile(backend)
    for _ in range(3):
        plan(np.ones(SIZE))
    if comm.rank:
        time.sleep(4.0)
    else:
        plan(np.ones(SIZE))


def limit_in_a_meeting(comm: MPI.Comm) -> None:
    backend = linop.backends.get("mpi", comm=comm, wait_limit=0.3)
    if comm.rank == 0:
        total(comm.size, SIZE).compile(backend)


def limit_before_all_have_come(comm: MPI.Comm) -> None:
    if comm.rank == 0:
        linop.backends.get("mpi", comm=comm, wait_limit=0.3)


# Outside of communication


def plain(backend: Backend) -> None:
    """After calls that were completed."""
    plan = total(backend.workers or 1, SIZE).compile(backend)
    for _ in range(3):
        plan(np.ones(SIZE))
    backend.vector(plan.codomain, np.ones(SIZE)).norm()
    raise AssertionError("planted")


def plan_of_one_worker(backend: Backend, call: int) -> None:
    """Nobody waits for it, and it for nobody."""
    again = planted(backend, call, group=1)
    for _ in range(call):
        again()


def agreed_upon(backend: Backend) -> None:
    """An argument that does not fit, which all hear of before the first message leaves."""
    size = SIZE + (backend.worker == 0)
    total(backend.workers or 1, SIZE).compile(backend)(np.ones(size))


def different_operators(backend: Backend) -> None:
    ((2 + (backend.worker == 0)) * total(backend.workers or 1, SIZE)).compile(backend)


def different_settings(comm: MPI.Comm) -> None:
    linop.backends.get("mpi", comm=comm, debug=comm.rank == 0)
