"""Checks with faults in them, which `test_mpi_faults` wants to be found: each is wrong on two ranks
or more, from size 3 on."""

from __future__ import annotations

import os
import time
from functools import partialmethod
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import numpy as np

import linop
from linop import LinearOperator
from mpi_facts import total

if TYPE_CHECKING:
    from describing import Description
    from mpi4py import MPI


def wrong_adjoint(comm: MPI.Comm, size: int) -> None:
    """An adjoint that forgets a worker, on all ranks."""
    op = total(comm.size, size)
    wrong: LinearOperator = op.H
    if comm.size >= 2 and size >= 3:
        last = op.domain.regions[-1]
        wrong = wrong @ linop.clear(op.codomain, op.codomain[last.name])
    linop.testing.assert_adjoint(op, linop.backends.get("mpi", comm=comm), adjoint=wrong)


def one_rank_asserts(comm: MPI.Comm, size: int) -> None:
    """One rank finds a fault, while the others are in a plan call and wait for it."""
    plan = total(comm.size, size).compile(linop.backends.get("mpi", comm=comm))
    plan(np.ones(size))
    assert not faulty(comm, size)
    plan(np.ones(size))


def one_rank_raises(comm: MPI.Comm, size: int) -> None:
    """One rank raises before the plan call that the others wait in."""
    plan = total(comm.size, size).compile(linop.backends.get("mpi", comm=comm))
    if faulty(comm, size):
        raise ValueError("planted")
    plan(np.ones(size))


def one_rank_skips(comm: MPI.Comm, size: int) -> None:
    """One rank leaves out a plan call, and passes."""
    plan = total(comm.size, size).compile(linop.backends.get("mpi", comm=comm))
    if not faulty(comm, size):
        plan(np.ones(size))


def one_rank_dies(comm: MPI.Comm, size: int) -> None:
    """One rank ends, without a word."""
    plan = total(comm.size, size).compile(linop.backends.get("mpi", comm=comm))
    if faulty(comm, size):
        os._exit(0)
    plan(np.ones(size))


def faulty(comm: MPI.Comm, size: int) -> bool:
    """Whether this rank is the faulty one."""
    return comm.size >= 2 and size >= 3 and comm.rank == comm.size - 1


def broken(comm: MPI.Comm, what: str, name: str, description: Description) -> None:
    """The check of operators, with a fault in the library; on every rank."""
    import mpi_checks  # and with it the catalogue and PyLops: the faults above start without them

    path, attribute, wrong = BREAKS[what]
    owner = resolve_name(path)
    right = getattr(owner, attribute)
    setattr(owner, attribute, partialmethod(wrong, right))
    try:
        mpi_checks.operator(comm, name, description, 0)
    finally:
        setattr(owner, attribute, right)


def _sends_zeros(self: Any, send: Any, peer: int, tag: int, buffer: Any) -> Any:
    return send(self, peer, tag, np.zeros_like(buffer))


def _changes_its_argument(self: Any, end: Any, running: Any) -> Any:
    results = end(self, running)
    for array in running.given.values():
        array += 1
    return results


def _returns_its_argument(self: Any, end: Any, running: Any) -> Any:
    given = {array.shape: array for array in running.given.values()}
    return {name: given.get(array.shape, array) for name, array in end(self, running).items()}


def _inner_products_of_its_own(self: Any, vector: Any, space: Any, arrays: Any) -> Any:
    local = vector(self, space, arrays)
    local._total = lambda partial: sum(partial.values())
    return local


BREAKS: dict[str, tuple[str, str, Any]] = {
    "sends zeros": ("linop.backends.mpi:Messages", "send", _sends_zeros),
    "changes its argument": ("linop.backends.base:WorkerPlan", "_end", _changes_its_argument),
    "returns its argument": ("linop.backends.base:WorkerPlan", "_end", _returns_its_argument),
    "inner products of its own": (
        "linop.backends.base:Worker",
        "vector",
        _inner_products_of_its_own,
    ),
}
"""A class of the library, a method of it, and what stands in for that: it is given the right one."""


def prints_and_fails(comm: MPI.Comm) -> None:
    """What a rank prints is part of the report."""
    print(f"rank {comm.rank} was here", flush=True)
    raise AssertionError(f"planted on rank {comm.rank}")


def sleeps(comm: MPI.Comm, seconds: float) -> None:
    """Takes a while."""
    time.sleep(seconds)
