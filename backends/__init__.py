"""Registry of backends by name, `launch` of SPMD programs, and the current backend of a thread.

No framework is imported before one of its backends is asked for.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from linop.backends.engine import extensions
from linop.backends.engine.base import Backend, BoundPlan
from linop.backends.together import ancestry, ending
from linop.errors import ArgumentError, BackendError
from linop.spaces.region import integer

if TYPE_CHECKING:
    from linop.backends.engine.worker import Worker

BACKENDS = {
    "reference": "linop.backends.threads.reference",
    "threads": "linop.backends.threads.backend",
    "mpi": "linop.backends.mpi.backend",
    "cupy": "linop.backends.mpi.device.backend",
    "torch": "linop.backends.torchrun.backend",
}
"""linop's own: name to module. Each module has ``get(**options) -> Backend`` and ``launch(main,
workers, **options) -> list``. Those of other packages are entry points of the group
``linop.backends``, to such a module."""
RANKS = ("mpi", "cupy")
"""Backends whose workers are the ranks of a communicator."""
PROCESSES = (*RANKS, "torch")
"""Backends whose workers are processes that a launcher starts."""

__all__ = [
    "BACKENDS",
    "Backend",
    "BoundPlan",
    "Worker",
    "current",
    "get",
    "launch",
    "names",
    "use",
]


class _Here(threading.local):
    backend: Backend | None = None


_HERE = _Here()


def get(name: str, **options: Any) -> Backend:
    """The backend of a given name.

    Args:
        name: a key of `BACKENDS`, or one that another package has registered (docs/backends.md).
        options: ``workers`` for ``reference`` and ``threads``: number of workers, by default as
            many as an operator needs; ``arrays`` for ``threads``: "numpy", or "cupy" for workers
            that share a GPU, and ``wait_limit``: seconds that a wait may take; ``comm`` for ``mpi``
            and ``cupy``: the communicator, by default COMM_WORLD; ``group`` for ``torch``: the
            process group, by default all processes. The other options of these are those of
            ``linop.backends.mpi.backend.get``, ``linop.backends.mpi.device.backend.get`` and
            ``linop.backends.torchrun.backend.get``.

    Raises:
        ArgumentError: no such backend. MissingExtraError: it needs a package that is not installed.
            BackendError: it needs a GPU, and there is none.

    Example:
        >>> X = linop.TensorSpace((4,), linop.Partition((2,)))
        >>> for name in ("reference", "threads"):
        ...     plan = (3 * linop.identity(X)).compile(linop.backends.get(name))
        ...     print(plan.backend.name, X.gather(plan(X.scatter(np.ones(4)))).tolist())
        reference [3.0, 3.0, 3.0, 3.0]
        threads [3.0, 3.0, 3.0, 3.0]
    """
    backend: Backend = _module(name).get(**options)
    return backend


def names() -> list[str]:
    """Names of all backends: linop's own, then those of other packages.

    Example:
        >>> {"reference", "threads", "mpi", "cupy", "torch"} <= {*linop.backends.names()}
        True
    """
    return extensions.names(extensions.BACKENDS, BACKENDS)


def launch(
    main: Callable[[Worker], Any],
    workers: int | None = None,
    backend: str | None = None,
    **options: Any,
) -> list[Any]:
    """Run ``main(backend)`` on every worker: on the processes of ``mpiexec`` or ``torchrun``, else
    on threads.

    Args:
        main: the SPMD program.
        workers: number of workers; by default all processes, or 1 thread.
        backend: name of the backend; by default "mpi" under ``mpiexec``; "torch" under
            ``torchrun``, or if torch.distributed has a process group, of several processes; else
            "threads".
        options: options of that backend's `get`, without ``workers``.

    Returns:
        What `main` returned, by worker; None for workers that ran in other processes.

    Raises:
        ArgumentError: `workers` is below 1, or the name is unknown. BackendError: there are fewer
            processes than workers; the backend runs no programs; or a backend over MPI is asked for
            under ``torchrun``, or ``srun`` started several tasks without MPI, where each process
            would run the whole program: then one worker may be asked for, or
            ``backend="threads"``. Exceptions of `main` are passed on. Under ``mpiexec`` and
            ``torchrun`` an uncaught exception or a nonzero exit status ends the whole job.

    Example:
        The sum of the workers' arrays, on each. Under ``mpiexec -n 3`` the workers are ranks:

        >>> X = linop.TensorSpace((1,), linop.Partition((3,)), axes=[linop.COPIES])
        >>> def program(backend):
        ...     plan = linop.all_reduce(X).compile(backend)
        ...     return plan(np.full(1, 1.0 + backend.worker)).tolist()
        >>> linop.launch(program, workers=3)
        [[6.0], [6.0], [6.0]]
    """
    if workers is not None and (workers := integer(workers, "launch: workers")) < 1:
        raise ArgumentError(f"launch: workers is a whole number from 1; given {workers!r}")
    name = backend or _name()
    if name in RANKS:
        _check_launcher(name)
    if backend is None and workers != 1:
        _check_slurm(name, workers)
    module = _module(name)
    if not hasattr(module, "launch"):
        raise BackendError(
            f"launch: backend {name!r} runs no programs: {module.__name__} has no launch(main, "
            f"workers). Its plans are called here: op.compile(linop.backends.get({name!r}))"
        )

    def work(backend: Worker) -> Any:
        try:
            with use(backend):
                return main(backend)
        finally:
            # A thread's backend ends with its program; a rank's with its communicator.
            backend.ended = name not in PROCESSES

    results: list[Any] = module.launch(work, workers, **options)
    return results


def current() -> Backend:
    """The backend that this thread uses: inside `launch` the one passed to `main`; inside `use` its
    argument; otherwise that of all ranks under ``mpiexec`` or ``torchrun``, else ``threads`` with
    all workers in this process.

    Example:
        Functions of a program find its backend, without an argument:

        >>> def program(backend):
        ...     return linop.backends.current() is backend
        >>> linop.launch(program, workers=2)
        [True, True]
    """
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
    workers, such as the ranks of a communicator smaller than COMM_WORLD.

    Example:
        >>> with linop.backends.use(linop.backends.get("reference")):
        ...     print(linop.backends.current().name)
        reference
    """
    before = _HERE.backend
    _HERE.backend = backend
    try:
        yield
    finally:
        _HERE.backend = before


@cache
def _default() -> Backend:
    return get(_name())


def _name() -> str:
    """Name of the backend of this process's launcher."""
    return "mpi" if in_mpi_job() else "torch" if in_torch_job() else "threads"


def in_mpi_job() -> bool:
    """True if this process was started by an ``mpiexec``, judged by its environment variables.
    Processes of a torchrun that ``srun --mpi=pmix`` or ``mpiexec`` started are no ranks, nor is a
    program that a rank has started."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return False
    marks = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_RANK", "PMIX_RANK", "MPI_LOCALNRANKS")
    return any(mark in os.environ for mark in marks) and ancestry.rank_above(ancestry.MPI) is None


def in_torch_job() -> bool:
    """True if this is one of several processes of torch.distributed: started by ``torchrun``,
    judged by its environment variables, or in a process group. An MPI job is none, nor is a
    program that a process of torchrun has started."""
    if in_mpi_job():
        return False
    workers = os.environ.get("WORLD_SIZE", "")
    if _marks() and workers.isdecimal() and int(workers) > 1:
        if ancestry.rank_above(ancestry.TORCH) is None:
            return True
    dist: Any = sys.modules.get("torch.distributed")
    known = dist is not None and dist.is_available() and dist.is_initialized()
    return known and dist.get_world_size() > 1


def _marks() -> list[str]:
    return [name for name in ("TORCHELASTIC_RUN_ID", "RANK") if name in os.environ]


def _check_launcher(name: str) -> None:
    """Check that a job of several processes was started by ``mpiexec``.

    Raises:
        BackendError: this is one of several processes of torch.distributed.
    """
    if in_torch_job():
        found = ", ".join(f"{one}={os.environ.get(one)}" for one in (*_marks(), "WORLD_SIZE"))
        raise BackendError(
            f"launch: this is one of several processes of torch.distributed ({found}), which "
            f"backend {name!r} cannot connect: each would run the whole program. Start it with "
            f"mpiexec; or ask for backend='torch', or for threads in each process"
        )


def _check_slurm(name: str, workers: int | None) -> None:
    """Check that Slurm's tasks are one job.

    Args:
        workers: how many are asked for, of all tasks together.

    Raises:
        BackendError: ``srun`` started this process as one of several, without the PMI that its MPI
            needs.
    """
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if name == "threads" and tasks != "1" and "SLURM_PROCID" in os.environ and not _marks():
        raise BackendError(
            f"launch: srun started {tasks} tasks without MPI: each would run the whole program"
            + ("" if workers is None else f", on {workers} threads")
            + ". Start it with srun --mpi=pmix (Open MPI), srun --mpi=pmi2 (MPICH), or mpiexec "
            "inside the allocation; or ask for workers=1 in each, or for threads in each: "
            f"backend='threads', workers={workers or 1}"
        )


def _module(name: str) -> Any:
    return extensions.found(extensions.BACKENDS, BACKENDS, name, "backend")


if in_mpi_job():
    ending.watch()


def __getattr__(name: str) -> Any:
    """`Worker`: the class of what `launch` passes to a program, loaded when it is asked for."""
    if name != "Worker":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from linop.backends.engine.worker import Worker

    return Worker
