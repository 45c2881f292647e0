"""Pairs of a forward function and its adjoint over mpi4py, each right and, with ``CASE=wrong``,
with one fault, for tests of `check_mpi`. A pair is a class: ``pairs.py:Halo``."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from mpi4py import MPI

WRONG = os.environ.get("CASE", "right") == "wrong"
SUM = MPI.SUM


class Three:
    """Three numbers on each rank, on both sides."""

    def domain(self, rank: int, world: int) -> Any:
        return (3,)

    def codomain(self, rank: int, world: int) -> Any:
        return (3,)


class MissingSum(Three):
    """A sum to copies that are used apart; the adjoint sums nothing."""

    CODOMAIN = "copies"

    def forward(self, x: Any, comm: Any) -> Any:
        y = np.empty_like(x)
        comm.Allreduce(x, y, op=SUM)
        return y

    def adjoint(self, y: Any, comm: Any) -> Any:
        return y.copy() if WRONG else self.forward(y, comm)


class ReplicatedSum(MissingSum):
    """A sum to one vector that is replicated; the adjoint sums once more."""

    DOMAIN, CODOMAIN = "copies", "replicated"

    def adjoint(self, y: Any, comm: Any) -> Any:
        return self.forward(y, comm) if WRONG else y.copy()


class Broadcast(Three):
    """The adjoint of a broadcast is the identity."""

    def forward(self, x: Any, comm: Any) -> Any:
        y = x.copy()
        comm.Bcast([y, MPI.DOUBLE], root=0)
        return y

    def adjoint(self, y: Any, comm: Any) -> Any:
        if WRONG:
            return y.copy()
        x = np.zeros_like(y)
        comm.Reduce(y, x, op=SUM, root=0)
        return x


class Roots(Broadcast):
    """The sum is reduced to another root than the one that broadcasts."""

    def adjoint(self, y: Any, comm: Any) -> Any:
        x = np.zeros_like(y)
        comm.Reduce(y, x, op=SUM, root=1 if WRONG else 0)
        return x


class Overwrites(MissingSum):
    """A sum in place, of the argument itself."""

    def forward(self, x: Any, comm: Any) -> Any:
        y = x if WRONG else x.copy()
        comm.Allreduce(MPI.IN_PLACE, y, op=SUM)
        return y.copy()

    def adjoint(self, y: Any, comm: Any) -> Any:
        return self.forward(y, comm)


class Halo:
    """One row of each neighbour; the adjoint does not add them."""

    def domain(self, rank: int, world: int) -> Any:
        return (3 + rank, 2)

    def codomain(self, rank: int, world: int) -> Any:
        return (5 + rank, 2)

    def forward(self, x: Any, comm: Any) -> Any:
        y = np.zeros((len(x) + 2, 2))
        y[1:-1] = x
        row = comm.Create_cart([comm.size])
        left, right = row.Shift(0, 1)
        row.Sendrecv(x[-1:], right, 0, y[:1], left, 0)
        row.Sendrecv(x[:1], left, 1, y[-1:], right, 1)
        return y

    def adjoint(self, y: Any, comm: Any) -> Any:
        row = comm.Create_cart([comm.size])
        left, right = row.Shift(0, 1)
        x, edge = y[1:-1].copy(), np.zeros((1, 2))
        for sent, to, source, at in ((y[:1], left, right, -1), (y[-1:], right, left, 0)):
            row.Sendrecv(sent, to, 0, edge, source, 0)
            if source == MPI.PROC_NULL:
                continue
            if WRONG:
                x[at] = edge[0]
            else:
                x[at] += edge[0]
        return x


class Gathered:
    """Unequal parts are gathered for all ranks, which use them apart; the adjoint cuts its part out
    of its own copy."""

    CODOMAIN = "copies"

    def domain(self, rank: int, world: int) -> Any:
        return 2 + rank

    def codomain(self, rank: int, world: int) -> Any:
        return sum(2 + r for r in range(world)), "float64"

    def counts(self, comm: Any) -> list[int]:
        return [2 + r for r in range(comm.size)]

    def forward(self, x: Any, comm: Any) -> Any:
        y = np.empty(sum(self.counts(comm)))
        comm.Allgatherv(x, [y, self.counts(comm)])
        return y

    def adjoint(self, y: Any, comm: Any) -> Any:
        if WRONG:
            first = sum(self.counts(comm)[: comm.rank])
            return y[first : first + 2 + comm.rank].copy()
        x = np.empty(2 + comm.rank)
        comm.Reduce_scatter(y, x, recvcounts=self.counts(comm), op=SUM)
        return x


class GatheredAndSummed(Gathered):
    """The adjoint of a gather is summed once too often."""

    def adjoint(self, y: Any, comm: Any) -> Any:
        total = y.copy()
        if WRONG:
            comm.Allreduce(MPI.IN_PLACE, total, op=SUM)
        x = np.empty(2 + comm.rank)
        comm.Reduce_scatter(total, x, recvcounts=self.counts(comm), op=SUM)
        return x


COUNTS = ((1, 2, 0), (0, 1, 2), (2, 0, 1))
"""Numbers of elements from each rank to each."""


class Exchanged(Three):
    """An all-to-all with counts, for three ranks; the adjoint has those of the forward."""

    def exchange(self, x: Any, comm: Any, back: bool) -> Any:
        to = list(COUNTS[comm.rank])
        of = [row[comm.rank] for row in COUNTS]
        sent, got = (of, to) if back else (to, of)
        y = np.empty(3)
        comm.Alltoallv([x, sent], [y, got])
        return y

    def forward(self, x: Any, comm: Any) -> Any:
        return self.exchange(x, comm, False)

    def adjoint(self, y: Any, comm: Any) -> Any:
        return self.exchange(y, comm, not WRONG)


class Rows(Three):
    """Sums over the rows of a grid of 2 by 2 ranks; the adjoint has them over columns."""

    CODOMAIN = "copies"

    def summed(self, x: Any, comm: Any, rows: bool) -> Any:
        part = comm.Split(comm.rank // 2 if rows else comm.rank % 2, comm.rank)
        y = np.empty_like(x)
        part.Iallreduce(x, y, op=SUM).Wait()
        part.Free()
        return y

    def forward(self, x: Any, comm: Any) -> Any:
        return self.summed(x, comm, True)

    def adjoint(self, y: Any, comm: Any) -> Any:
        return self.summed(y, comm, not WRONG)


class Scattered:
    """Parts of a vector of rank 1; the adjoint gathers them in another order."""

    def domain(self, rank: int, world: int) -> Any:
        return (2 * world,) if rank == 1 else None

    def codomain(self, rank: int, world: int) -> Any:
        return np.zeros(2, np.complex128)

    def forward(self, x: Any, comm: Any) -> Any:
        y = np.empty(2)
        comm.Scatter(x, y, root=1)
        return y.astype(complex)

    def adjoint(self, y: Any, comm: Any) -> Any:
        x = np.empty(2 * comm.size) if comm.rank == 1 else None
        starts = [2 * r for r in range(comm.size)]
        places = (([2] * comm.size), starts[::-1] if WRONG else starts)
        comm.Gatherv(y.real.copy(), None if x is None else [x, places], root=1)
        return x


class Messages(Three):
    """A vector is sent to the next rank, and twice of it comes back."""

    def forward(self, x: Any, comm: Any) -> Any:
        y = np.empty(3)
        request = comm.Isend(x, (comm.rank + 1) % comm.size, tag=7)
        comm.Recv(y, source=MPI.ANY_SOURCE, tag=7)
        request.Wait()
        return y

    def adjoint(self, y: Any, comm: Any) -> Any:
        x = np.empty(3)
        request = comm.Irecv(x, (comm.rank + 1) % comm.size, tag=8)
        comm.Send(y * 2 if WRONG else y, (comm.rank - 1) % comm.size, tag=8)
        request.Wait()
        return x


class Columns:
    """A column of an array is sent, by a derived datatype; the adjoint takes another column."""

    def domain(self, rank: int, world: int) -> Any:
        return (3, 4)

    def codomain(self, rank: int, world: int) -> Any:
        return (3, 4)

    def moved(self, x: Any, comm: Any, sent: int, got: int, step: int) -> Any:
        y = x.copy()
        y[:, got] = 0
        kinds = [MPI.DOUBLE.Create_subarray([3, 4], [3, 1], [0, k]).Commit() for k in (sent, got)]
        to, source = (comm.rank + step) % comm.size, (comm.rank - step) % comm.size
        comm.Sendrecv([x, 1, kinds[0]], to, 0, [y, 1, kinds[1]], source, 0)
        return y

    def forward(self, x: Any, comm: Any) -> Any:
        y = self.moved(x, comm, 3, 0, 1)
        y[:, 3] = 0
        return y

    def adjoint(self, y: Any, comm: Any) -> Any:
        z = y.copy()
        z[:, 3] = 0
        x = self.moved(z, comm, 1 if WRONG else 0, 3, -1)
        x[:, 0] = 0
        return x


class Neighbours:
    """Both edges are exchanged by a collective of neighbours on a ring; the adjoint mixes up the
    directions."""

    def domain(self, rank: int, world: int) -> Any:
        return 4

    def codomain(self, rank: int, world: int) -> Any:
        return 6

    def exchanged(self, edges: Any, comm: Any) -> Any:
        got = np.empty(2)
        comm.Create_cart([comm.size], periods=[True]).Neighbor_alltoall(edges, got)
        return got

    def forward(self, x: Any, comm: Any) -> Any:
        left, right = self.exchanged(x[[0, -1]], comm)
        return np.concatenate([[left], x, [right]])

    def adjoint(self, y: Any, comm: Any) -> Any:
        x = y[1:-1].copy()
        got = self.exchanged(y[[0, -1]], comm)
        x[[0, -1]] += got[::-1] if WRONG else got
        return x


class Turned:
    """A sum of complex numbers, turned by 1j; the adjoint does not turn them back."""

    def domain(self, rank: int, world: int) -> Any:
        return (3,), np.complex128

    codomain = domain

    def forward(self, x: Any, comm: Any) -> Any:
        y = np.empty_like(x)
        comm.Allreduce(1j * x, y, op=SUM)
        return y

    def adjoint(self, y: Any, comm: Any) -> Any:
        return self.forward(y, comm) * (1 if WRONG else -1)


class Large(Broadcast):
    """A broadcast of more numbers than a matrix is made of."""

    def domain(self, rank: int, world: int) -> Any:
        return (3000,)

    codomain = domain


class LargeSums(Large):
    """Running sums of what is broadcast, which nobody follows."""

    def forward(self, x: Any, comm: Any) -> Any:
        return np.cumsum(super().forward(x, comm))

    def adjoint(self, y: Any, comm: Any) -> Any:
        return super().adjoint(np.cumsum(y[::-1])[::-1].copy(), comm)


class Waits(Three):
    """The second rank waits for a message that nobody sends."""

    def forward(self, x: Any, comm: Any) -> Any:
        if WRONG and comm.rank == 1:
            comm.Recv(x.copy(), source=0, tag=99)
        return x.copy()

    def adjoint(self, y: Any, comm: Any) -> Any:
        return y.copy()
