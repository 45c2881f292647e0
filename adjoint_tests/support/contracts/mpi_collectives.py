"""Contracts of MPI's collectives, on every rank of an MPI job, without shared memory.

`test_patterns` runs these in a `PersistentJob`. This module must not import MPI: that of pytest's
own process is never started.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import linop
from linop.testing.describing import Description
from support.contracts.mpi_operators import applied, operator, same_bits

if TYPE_CHECKING:
    from mpi4py import MPI


def in_collectives(comm: MPI.Comm, name: str, description: Description, seed: int) -> None:
    """The same, where collectives of MPI do what they can."""
    linop.backends.get("mpi", comm=comm, windows=False, collectives=True)  # holds for the next get
    operator(comm, name, description, seed)


def every_kind(comm: MPI.Comm) -> None:
    """Over all ranks and over some, whose numbers are not their places; to and from the last; of
    counts that differ."""
    backend = linop.backends.get("mpi", comm=comm, windows=False, collectives=True)
    groups = [tuple(range(first, comm.size)) for first in (0, 1)]
    for workers in (group for group in groups if len(group) > 1):
        line = linop.Partition((len(workers),), workers)
        last = linop.Partition((1,), workers[-1:])
        Y = linop.TensorSpace((7,), line, np.int64, axes=[linop.COPIES])
        gather, scatter = linop.all_gather(Y.like(line, [0])), linop.reduce_scatter(Y)
        spread = linop.broadcast(linop.TensorSpace((7,), last, np.int64), line)
        for op in (spread, linop.sum_reduce(Y, last), linop.all_reduce(Y), gather, scatter):
            for plan in (op.compile(backend), op.H.compile(backend)):
                whole = plan.domain.integers(3)
                applied(plan, whole, plan.op(whole), 0.0)
                assert ("MPI_I" in plan.describe()) is (comm.rank in workers), plan.describe()


def plans_overlap(comm: MPI.Comm, rounds: int = 3) -> None:
    """Plans that are begun in one order, and finished in another on each rank, and plans that are
    released and made anew, do not meet in their collectives."""
    backend = linop.backends.get("mpi", comm=comm, windows=False, collectives=True)
    line = linop.Partition((comm.size,))
    Y = linop.TensorSpace((5,), line, np.int64, axes=[linop.COPIES])
    total, gathered = linop.all_reduce(Y), linop.all_gather(Y.like(line, [0]))
    scaled = linop.direct_sum(
        *(linop.local_operators.diagonal(np.full(5, 2), r) for r in Y.regions)
    )
    for turn in range(rounds):
        plans = [op.compile(backend) for op in (total @ scaled @ total, total, gathered, total)]
        given = np.arange(5) + 10 * comm.rank + turn
        pieces = [
            given if p is not plans[2] else given[: p.domain.on(comm.rank)[0].size] for p in plans
        ]
        first = [plan(x) for plan, x in zip(plans, pieces, strict=True)]
        assert "MPI_Iallreduce" in plans[0].describe() or comm.size == 1
        for plan, x in zip(plans, pieces, strict=True):
            plan.start(x)
        order = np.random.default_rng(comm.rank + turn).permutation(4)
        again = {int(k): plans[k].finish() for k in order}
        for k in range(4):
            same_bits(again[k], first[k])
        if turn % 2 == comm.rank % 2:
            for plan in plans:
                plan.release()


def any_order(comm: MPI.Comm, dtype: str, seed: int) -> None:
    """Sums of whole numbers are the same in any order; and where sums may not be in any order,
    those of more than two ranks are not left to MPI."""
    Y = linop.TensorSpace((7, 3), linop.Partition((comm.size,)), dtype, axes=[linop.COPIES])
    other = comm.Dup()
    for one, sums in ((comm, "any"), (other, "fixed")):
        options = {"windows": False, "collectives": True, "sums": sums}
        backend = linop.backends.get("mpi", comm=one, **options)
        for op in (linop.all_reduce(Y), linop.sum_reduce(Y, linop.Partition((1,)))):
            plan = op.compile(backend)
            whole = op.domain.integers(seed)
            applied(plan, whole, op(whole), 0.0)
            use = sums == "any" or comm.size == 2
            assert ("MPI_I" in plan.describe()) == (use and comm.size > 1), plan.describe()
            assert ("sums have a fixed order" in plan.describe()) == (not use and comm.size > 1)
    other.Free()


def groups_are_used_again(comm: MPI.Comm) -> None:
    """The communicators of plans that are gone are those of the next."""
    backend: Any = linop.backends.get("mpi", comm=comm, windows=False, collectives=True)
    Y = linop.TensorSpace((5,), linop.Partition((comm.size,)), np.int64, axes=[linop.COPIES])
    op = linop.all_reduce(Y)
    for _ in range(100):
        plan = op.compile(backend)
        assert plan(np.ones(5, np.int64)).tolist() == [comm.size] * 5
        plan.release()
    (comms,) = backend.groups._comms.values()
    assert len(comms) == 2


def too_many_plans(comm: MPI.Comm) -> None:
    """More plans of a group than it has communicators use messages."""
    backend = linop.backends.get("mpi", comm=comm, windows=False, collectives=True)
    Y = linop.TensorSpace((5,), linop.Partition((comm.size,)), np.int64, axes=[linop.COPIES])
    plans = [linop.all_reduce(Y).compile(backend) for _ in range(70)]
    for plan in plans:
        assert plan(np.ones(5, np.int64)).tolist() == [comm.size] * 5
    said = [plan.describe() for plan in plans]
    assert ["MPI_I" in text for text in said] == [True] * 63 + [False] * 7
    assert "too many plans of this group live" in said[-1]


def choices(comm: MPI.Comm) -> None:
    """A refused collective is not run; by default the cost model decides."""
    Y = linop.TensorSpace((5,), linop.Partition((comm.size,)), np.int64, axes=[linop.COPIES])
    refused = linop.backends.get("mpi", comm=comm, windows=False, collectives=False)
    plan = linop.all_reduce(Y).compile(refused)
    assert plan(np.ones(5, np.int64)).tolist() == [comm.size] * 5
    assert "by messages (switched off)" in plan.describe()
    other = comm.Dup()
    plan = linop.all_reduce(Y).compile(linop.backends.get("mpi", comm=other, windows=False))
    assert plan(np.ones(5, np.int64)).tolist() == [comm.size] * 5
    words = "MPI_Iallreduce (predicted " if comm.size >= 4 else "messages (fewer than 4 workers)"
    assert words in plan.describe(), plan.describe()
    other.Free()


def stuck_in_a_collective(comm: MPI.Comm) -> None:
    """A rank that fails before it comes to a collective takes the others out of it."""
    backend = linop.backends.get("mpi", comm=comm, windows=False, collectives=True)
    Y = linop.TensorSpace((5,), linop.Partition((comm.size,)), np.int64, axes=[linop.COPIES])
    calls = []

    def once(x: Any) -> Any:
        calls.append(x)
        if len(calls) > 1:
            raise ValueError("planted")
        return x

    last = Y.regions[-1]
    rest = linop.Space(Y.regions[:-1], Y.dtype)
    fails = linop.local(linop.Space(last, Y.dtype), linop.Space(last, Y.dtype), once, once)
    plan = (linop.all_reduce(Y) @ linop.direct_sum(linop.identity(rest), fails)).compile(backend)
    assert plan(np.ones(5, np.int64)).tolist() == [comm.size] * 5
    try:
        plan(np.ones(5, np.int64))
    except (linop.errors.LinopError, ValueError) as error:
        assert "planted" in str(error), error
    else:
        raise AssertionError("an error expected")
    comm.Barrier()
    again = linop.all_reduce(Y).compile(backend)
    assert again(np.ones(5, np.int64)).tolist() == [comm.size] * 5
