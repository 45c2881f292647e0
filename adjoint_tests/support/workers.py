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
from linop.testing.workers.jobs import job


def on_threads(workers: int, contract: Callable[..., None], *arguments: Any) -> None:
    """Run a contract on threads."""
    linop.launch(lambda backend: contract(backend, *arguments), workers, "threads")


def on_ranks(
    ranks: int,
    contract: Callable[..., None],
    *arguments: Any,
    watch: float | None = None,
    **options: Any,
) -> None:
    """Run a contract on ranks, which find it by its module and name.

    Args:
        watch: timeout in seconds; by default the job's.
        options: of the backend ``mpi``, which is the current one meanwhile.

    Raises:
        FailedExampleError: a rank failed, died, or did not return in time.
    """
    job(ranks).run(_on_rank, contract, arguments, options, watch=watch)


def _on_rank(
    comm: Any, contract: Callable[..., None], arguments: tuple[Any, ...], options: dict[str, Any]
) -> None:
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)  # ranks share the cores
    backend = linop.backends.get("mpi", comm=comm, **options)
    with use(backend):
        contract(backend, *arguments)
