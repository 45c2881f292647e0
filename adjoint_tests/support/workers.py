"""The two ways to run a contract, an SPMD program ``contract(backend, *arguments)``: on threads,
and on the ranks of a job. This module does not import MPI: pytest's own process never starts it.

A program that wants a communicator, and no backend, is a check of `linop.testing.workers.jobs`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import linop
from linop.backends import use
from linop.backends.engine.base import Backend
from linop.testing.workers.jobs import job

WATCH = 75.0
"""Default timeout of a contract on ranks, in seconds: machines of CI stand still for 30 s at times.
Less than pytest's, which has no stacks of ranks."""
MACHINES = "machines"
"""As the option ``windows`` of `on_ranks`: even and odd ranks count as on two machines."""
ROADS: dict[str, dict[str, Any]] = {
    "windows": {},
    "messages": {"windows": False, "collectives": False},
    "collectives": {"windows": False, "collectives": True},
    "any order": {"windows": False, "collectives": True, "sums": "any"},
}
"""How ranks exchange messages."""
EVERY_ROAD: dict[str, dict[str, Any]] = {**ROADS, "machines": {"windows": MACHINES}}


def on_threads(workers: int, contract: Callable[..., None], *arguments: Any) -> None:
    """Run a contract on threads."""
    linop.launch(lambda backend: contract(backend, *arguments), workers, "threads")


def in_job(ranks: int, check: Callable[..., None], *arguments: Any, watch: float = WATCH) -> None:
    """Run ``check(comm, *arguments)`` on ranks.

    Args:
        watch: timeout in seconds.

    Raises:
        FailedExampleError: a rank failed, died, or did not return in time.
    """
    job(ranks).run(check, *arguments, watch=watch)


def on_ranks(
    ranks: int,
    contract: Callable[..., None],
    *arguments: Any,
    watch: float = WATCH,
    **options: Any,
) -> None:
    """Run a contract on ranks, which find it by its module and name.

    Args:
        watch: timeout in seconds.
        options: of the backend ``mpi``, which is the current one meanwhile.

    Raises:
        FailedExampleError: a rank failed, died, or did not return in time.
    """
    in_job(ranks, _on_rank, contract, arguments, options, watch=watch)


def _on_rank(
    comm: Any, contract: Callable[..., None], arguments: tuple[Any, ...], options: dict[str, Any]
) -> None:
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)  # ranks share the cores
    backend = on_mpi(comm, **options)
    with use(backend):
        contract(backend, *arguments)


def on_mpi(comm: Any, windows: bool | str | None = None, **options: Any) -> Backend:
    """The backend ``mpi`` of a rank; `windows` may be `MACHINES`."""
    if windows != MACHINES:
        return linop.backends.get("mpi", comm=comm, windows=windows, **options)
    from linop.backends.mpi import backend as mpi

    real = mpi.machine_of
    mpi.machine_of = lambda ranks: ranks.rank % 2
    try:
        return linop.backends.get("mpi", comm=comm, **options)
    finally:
        mpi.machine_of = real
