"""Cases of PyLops-MPI's examples, in linop and raw mpi4py: a first derivative, and CGLS on it."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI

import linop
from benchmarks.harness.sides import Rival
from benchmarks.harness.task import KIB, MIB, RAW
from benchmarks.movement.cases import Case, case, held
from benchmarks.movement.halos import RawHalo
from linop import LinearOperator, Partition, TensorSpace
from linop.spaces.scalars import Array

ITERATIONS = 10


def derivative(n: int, workers: int) -> LinearOperator:
    """(u[i+1] - u[i-1]) / 2, zero at both ends: a halo exchange, then a stencil on each worker."""
    U, V = (TensorSpace(n, Partition((workers,)), name=name) for name in "uv")
    H = linop.halo_exchange(U, 3, padding=1)
    stencils = [
        linop.local(H.codomain.region(w), V.region(w), *stencil(w, workers), name="D")  # type: ignore[attr-defined]
        for w in range(workers)
    ]
    D: LinearOperator = linop.direct_sum(*stencils) @ H
    return D


def stencil(worker: int, workers: int) -> tuple[Any, Any]:
    """The derivative of an extended block, and its adjoint, on one worker."""
    left, right = int(worker == 0), int(worker == workers - 1)  # no halo at the ends

    def forward(u: Array) -> Array:
        v = np.zeros(u.size - 2 + left + right)
        inside = v[left : v.size - right]
        np.subtract(u[2:], u[:-2], out=inside)
        inside *= 0.5
        return v

    def adjoint(v: Array) -> Array:
        u = np.zeros(v.size + 2 - left - right)
        inside = 0.5 * v[left : v.size - right]
        u[2:] += inside
        u[:-2] -= inside
        return u

    return forward, adjoint


class RawDerivative:
    """First derivative in raw mpi4py, out of place; buffers are allocated once.

    Args:
        block: number of float64 elements of each rank.
    """

    def __init__(self, comm: MPI.Intracomm, block: int) -> None:
        self.halo = RawHalo(comm, (comm.size,), (block,), (1,), np.dtype(np.float64))
        self.out = np.zeros(block)
        left, right = int(comm.rank == 0), int(comm.rank == comm.size - 1)
        self.inside = slice(left, block - right)

    def forward(self, u: Array) -> Array:
        extended, inside = self.halo.forward(u), self.out[self.inside]
        np.subtract(extended[2:], extended[:-2], out=inside)
        np.multiply(inside, 0.5, out=inside)
        return self.out

    def adjoint(self, v: Array) -> Array:
        halo = self.halo
        inside = 0.5 * v[self.inside]
        halo.ext[:2] = 0
        halo.ext[2:] = inside
        halo.ext[:-2] -= inside
        halo.fold()
        np.copyto(halo.out, halo.bulk)
        return halo.out


@case("first derivative", peers_only=True)
def first_derivative(comm: MPI.Intracomm, size: int) -> Case:
    block = size // 8
    op = derivative(block * comm.size, comm.size)
    x, y = held(op, comm.rank)
    raw = RawDerivative(comm, block)
    return Case(
        op,
        x,
        y,
        {RAW: Rival(partial(raw.forward, x))},
        {RAW: Rival(partial(raw.adjoint, y))},
    )


@case(f"CGLS, {ITERATIONS} iterations", (KIB, 64 * KIB, MIB), peers_only=True)
def cgls(comm: MPI.Intracomm, size: int) -> Case:
    """Least squares with the first derivative, from zero."""
    block = size // 8
    op = derivative(block * comm.size, comm.size)
    x, y = held(op, comm.rank)

    def ours(plan: Any, iterations: int) -> Rival:
        data = plan.backend.vector(op.codomain, y)
        run = partial(linop.solvers.cgls, plan, data, niter=iterations, tol=0)
        return Rival(run, value=lambda result: result[0].arrays)

    def by_hand(iterations: int) -> Rival:
        raw = RawDerivative(comm, block)
        return Rival(partial(_cgls, comm, raw, y, iterations), tolerance=1e-9)

    return Case(op, x, y, solver=ours, solvers={RAW: by_hand})


def _cgls(comm: MPI.Intracomm, A: RawDerivative, y: Array, iterations: int) -> Array:
    """Conjugate gradients for min ‖y - A x‖: two one-number all-reduces an iteration, and one for
    the residual norm that linop's and PyLops-MPI's record."""
    total = np.empty(1)

    def inner(a: Array) -> float:
        comm.Allreduce(np.array([a @ a]), total)
        return float(total[0])

    r = y.copy()
    s = A.adjoint(r)
    x, c = np.zeros_like(s), s.copy()
    gamma = inner(s)
    cost = [inner(r) ** 0.5]
    for _ in range(iterations):
        q = A.forward(c)
        step = gamma / inner(q)
        x += step * c
        r -= step * q
        s = A.adjoint(r)
        gamma, last = inner(s), gamma
        c *= gamma / last
        c += s
        cost.append(inner(r) ** 0.5)
    return x
