"""Registry of backends by name, `launch` of SPMD programs, and the current backend of a thread.

No framework is imported before one of its backends is asked for.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

from linop.backends.base import Backend, BoundPlan
from linop.backends.jobs import ending
from linop.errors import ArgumentError, BackendError
from linop.spaces.region import integer

BACKENDS = {
    "reference": "linop.backends.reference",
    "threads": "linop.backends.threads",
    "mpi": "linop.backends.mpi",
    "cupy": "linop.backends.gpu",
}
"""Backend name to module. Each module has ``get(**options) -> Backend`` and ``launch(main, workers)
-> list``."""
RANKS = ("mpi", "cupy")
"""Backends whose workers are the ranks of a communicator."""

__all__ = ["BACKENDS", "Backend", "BoundPlan", "current", "get", "launch", "use"]


class _Here(threading.local):
    backend: Backend | None = None


_HERE = _Here()


def get(name: str, **options: Any) -> Backend:
    """The backend of a given name.

    Args:
        name: a key of `BACKENDS`.
        options: ``workers`` for ``reference`` and ``threads``: number of workers, by default as
            many as an operator needs; ``arrays`` for ``threads``: "numpy", or "cupy" for workers
            that share a GPU; ``comm`` for ``mpi`` and ``cupy``: the communicator, by default
            COMM_WORLD. The other options of these two are those of ``linop.backends.mpi.get`` and
            ``linop.backends.gpu.get``.

    Raises:
        ArgumentError: no such backend. MissingExtraError: it needs a package that is not installed.
            BackendError: it needs a GPU, and there is none.
    """
    backend: Backend = _module(name).get(**options)
    return backend


def launch(
    main: Callable[[Backend], Any],
    workers: int | None = None,
    backend: str | None = None,
    **options: Any,
) -> list[Any]:
    """Run ``main(backend)`` on every worker: on the ranks under ``mpiexec``, else on threads.

    Args:
        main: the SPMD program.
        workers: number of workers; by default all ranks, or 1 thread.
        backend: name of the backend; by default "mpi" under ``mpiexec``, else "threads".
        options: options of that backend's `get`, without ``workers``.

    Returns:
        What `main` returned, by worker; None for workers that ran in other processes.

    Raises:
        ArgumentError: `workers` is below 1, or the name is unknown. BackendError: there are fewer
            ranks than workers; or the process was started by ``torchrun`` (each process would run
            the whole program), unless ``backend="threads"`` asks for that. Exceptions of `main` are
            passed on. Under ``mpiexec`` an uncaught exception or a nonzero exit status ends the
            whole job.
    """
    if workers is not None and (workers := integer(workers, "launch: workers")) < 1:
        raise ArgumentError(f"launch: workers is a whole number from 1; given {workers!r}")
    if backend is None or backend in RANKS:
        _check_launcher()
    name = backend or ("mpi" if in_mpi_job() else "threads")

    def work(backend: Backend) -> Any:
        try:
            with use(backend):
                return main(backend)
        finally:
            # A thread's backend ends with its program; a rank's with its communicator.
            backend.ended = name not in RANKS

    results: list[Any] = _module(name).launch(work, workers, **options)
    return results


def current() -> Backend:
    """The backend that this thread uses: inside `launch` the one passed to `main`; inside `use` its
    argument; otherwise COMM_WORLD's under ``mpiexec``, else ``threads`` with all workers in this
    process."""
    return _HERE.backend or _default()


@cache
def alone() -> Backend:
    """A backend with this process as its only worker: default for layers outside of `launch` and
    ``mpiexec``."""
    backend: Backend = _module("threads").alone()
    return backend


@contextmanager
def use(backend: Backend) -> Iterator[None]:
    """Make a backend the `current` one inside ``with use(backend):``. Layers built there have its
    workers, such as the ranks of a communicator smaller than COMM_WORLD."""
    before = _HERE.backend
    _HERE.backend = backend
    try:
        yield
    finally:
        _HERE.backend = before


@cache
def _default() -> Backend:
    return get("mpi" if in_mpi_job() else "threads")


def in_mpi_job() -> bool:
    """True if this process was started by an ``mpiexec``, judged by its environment variables."""
    marks = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_RANK", "PMIX_RANK", "MPI_LOCALNRANKS")
    return any(mark in os.environ for mark in marks)


def _check_launcher() -> None:
    """Check that a job of several processes was started by ``mpiexec``.

    Raises:
        BackendError: ``torchrun``'s variables are set, with a world size above 1.
    """
    marks = [name for name in ("TORCHELASTIC_RUN_ID", "RANK") if name in os.environ]
    workers = os.environ.get("WORLD_SIZE", "")
    if marks and workers.isdecimal() and int(workers) > 1 and not in_mpi_job():
        found = ", ".join(f"{name}={os.environ[name]}" for name in (*marks, "WORLD_SIZE"))
        raise BackendError(
            f"launch: this is one of {workers} processes of torchrun ({found}), which linop cannot "
            f"connect: each would run the whole program. Start it with mpiexec -n {workers}; or "
            f"ask for threads in each process, by backend='threads'"
        )


def _module(name: str) -> Any:
    if not isinstance(name, str) or name not in BACKENDS:
        raise ArgumentError(f"unknown backend {name!r}; there are {', '.join(BACKENDS)}")
    return import_module(BACKENDS[name])


if in_mpi_job():
    ending.install()
