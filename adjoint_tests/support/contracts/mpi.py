"""Guarantees to a program under MPI: a `PersistentJob` runs each as ``check(comm, *arguments)``.

Those of operators are in `support.contracts.mpi_operators`. This module must not import MPI when it
is imported: that of pytest's own process is never started.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

import linop
from linop import LinearOperator, Partition, Region, Space, TensorSpace
from linop.backends import Backend
from linop.errors import ArgumentError, BackendError
from support.contracts.plans import raised, total, works

if TYPE_CHECKING:
    from mpi4py import MPI


def missing_worker(comm: MPI.Comm) -> None:
    """An operator on more workers than there are is refused, and the backend lives on."""
    backend = linop.backends.get("mpi", comm=comm)
    n = comm.size
    words = rf"workers 0 to {n - 1}; .* needs \[{n}, {n + 1}\] too"
    text = raised(BackendError, lambda: total(n + 2).compile(backend))
    assert re.search(words, text), text
    works(total(comm.size).compile(backend))


def _other_symbol(workers: int, odd: bool) -> LinearOperator:
    space = Space([Region(f"x{w}", 2, w) for w in range(workers)])
    name = "A" if odd else "B"
    return linop.direct_sum(
        *(
            linop.local_operators.diagonal([1, 2], Space(region), name=name)
            for region in space.regions
        )
    )


UNLIKE: dict[str, Callable[[int, bool], LinearOperator]] = {
    "shape": lambda n, odd: total(n, size=6 if odd else 5),
    "dtype": lambda n, odd: total(n, dtype=np.float32 if odd else np.float64),
    "memory": lambda n, odd: linop.identity(
        TensorSpace((7,), Partition((n,)), memory="host" if odd else "device")
    ),
    "factor": lambda n, odd: (3 if odd else 2) * total(n),
    "target": lambda n, odd: linop.shift(TensorSpace((7,), Partition((n,))), 0 if odd else 1),
    "stages": lambda n, odd: _other_symbol(n, False) ** (2 if odd else 1),
    "local operator": _other_symbol,
    "workers": lambda n, odd: total(n - 1 if odd else n),
    # It misses a worker on one rank, and would run on the others.
    "too many workers": lambda n, odd: total(n + 1 if odd else n),
}
"""Operators that one rank builds otherwise than the others, by what differs."""


def different_operators(comm: MPI.Comm, what: str, odd: int) -> None:
    """Another operator on one rank is an error of all, and the backend lives on."""
    backend = linop.backends.get("mpi", comm=comm)
    op = UNLIKE[what](comm.size, comm.rank == odd)
    words = "" if what == "too many workers" else "workers built different operators"
    assert words in raised(BackendError, lambda: op.compile(backend))
    works(total(comm.size).compile(backend))


def duplicated_once(comm: MPI.Comm) -> None:
    """A communicator has one backend, whatever is compiled on it; and nothing is left of it when
    the communicator is freed. MPICH has 2048 communicators, and would run out of them."""
    backend: Any = linop.backends.get("mpi", comm=comm)
    handle = backend.transport.comm.handle
    op = total(comm.size)
    for _ in range(200):
        plan = op.compile(linop.backends.get("mpi", comm=comm))
        assert plan.backend is backend
    assert plan(np.ones(5)).tolist() == [comm.size] * 5
    assert backend.transport.comm.handle == handle != comm.handle
    for _ in range(2500):
        other = comm.Dup()
        assert linop.backends.get("mpi", comm=other) is not backend
        other.Free()
    works(total(comm.size).compile(backend))


def other_communicators(comm: MPI.Comm) -> None:
    """Workers are the ranks of the communicator that is given, whatever they are in others."""
    from mpi4py import MPI

    backwards = comm.Split(0, -comm.rank)
    halves = comm.Split(comm.rank % 2)
    for given in (backwards, halves, MPI.COMM_SELF):
        backend = linop.backends.get("mpi", comm=given)
        assert (backend.worker, backend.workers) == (given.rank, given.size)
        works(total(given.size).compile(backend))
    assert backwards.rank == comm.size - 1 - comm.rank
    backwards.Free()
    halves.Free()
    text = raised(BackendError, lambda: linop.backends.get("mpi", comm=MPI.COMM_NULL))
    assert "intracommunicator" in text, text
    text = raised(ArgumentError, lambda: linop.backends.get("mpi", comm=3))
    assert "mpi4py communicator" in text, text


def messages_apart(comm: MPI.Comm) -> None:
    """A program's own messages and collectives on the communicator do not meet those of plans, even
    where it receives from anybody."""
    from mpi4py import MPI

    backend = linop.backends.get("mpi", comm=comm)
    mine = np.zeros(5)
    pending = comm.Irecv(mine, MPI.ANY_SOURCE, MPI.ANY_TAG)
    plan = total(comm.size).compile(backend)
    plan.start(np.ones(5))
    comm.Barrier()
    assert plan.finish().tolist() == [comm.size] * 5
    comm.Send(np.full(5, 7.0 + comm.rank), (comm.rank + 1) % comm.size, 2)
    pending.Wait()
    assert (mine == 7 + (comm.rank - 1) % comm.size).all()


def solver(comm: MPI.Comm, shape: tuple[int, ...]) -> None:
    """Conjugate gradients on ranks are those on threads, to the bit: so are inner products."""
    X = TensorSpace(shape, Partition((comm.size,)))
    H = linop.halo_exchange(X, 3, padding=1)
    op = 3 * linop.identity(X) + H.H @ H
    y = op.codomain.random(1)

    def solve(backend: Backend) -> Any:
        plan = op.compile(backend)
        x, _, _, _, _, cost = linop.solvers.cgls(
            plan, backend.vector(op.codomain, y.arrays), niter=8
        )
        return {name: array.tobytes() for name, array in x.arrays.items()}, cost

    wanted = linop.launch(solve, workers=comm.size, backend="threads")
    assert solve(linop.backends.get("mpi", comm=comm)) == wanted[comm.rank]


def prints_and_fails(comm: MPI.Comm) -> None:
    """The report includes a rank's output."""
    print(f"rank {comm.rank} was here", flush=True)
    raise AssertionError(f"planted on rank {comm.rank}")


def dies_on_rank_1(comm: MPI.Comm) -> None:
    """Without a word."""
    if comm.rank == 1:
        os._exit(3)


def sleeps(comm: MPI.Comm, seconds: float) -> None:
    """Takes a while."""
    time.sleep(seconds)
