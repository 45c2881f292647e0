"""Checks with faults in them, which `test_mpi_faults` wants to be found: each is wrong on two ranks
or more, from size 3 on. Jobs that such a fault ends start again often: nothing slow is imported."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import numpy as np

import linop
from linop import LinearOperator
from mpi_facts import total

if TYPE_CHECKING:
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


def prints_and_fails(comm: MPI.Comm) -> None:
    """What a rank prints is part of the report."""
    print(f"rank {comm.rank} was here", flush=True)
    raise AssertionError(f"planted on rank {comm.rank}")


def sleeps(comm: MPI.Comm, seconds: float) -> None:
    """Takes a while."""
    time.sleep(seconds)
