"""Contracts of solvers, as SPMD programs: results have the bits of the reference process, whatever
carries the messages. Each is ``contract(backend, *arguments)``."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

import linop
from linop import LinearOperator, Partition, Region, Space, TensorSpace, Vector
from linop.backends import Backend
from linop.errors import LinopError

solvers = linop.solvers


def hermitian(size: int, workers: int, dtype: str, shift: float) -> LinearOperator:
    """A stencil over all workers and a diagonal: positive definite for `shift` 1, indefinite for
    -2."""
    X = TensorSpace((size,), Partition((workers,)), dtype)
    H = linop.halo_exchange(X, 3, padding=1)
    rng = np.random.default_rng(size)
    parts = [
        linop.local_operators.diagonal((4 * rng.random(r.shape) + shift).astype(dtype), r)
        for r in X.regions
    ]
    return H.H @ H + linop.direct_sum(*parts)


def tall(size: int, workers: int, dtype: str) -> LinearOperator:
    """Local matrices after a halo exchange: two more equations a worker than unknowns."""
    X = TensorSpace((size,), Partition((workers,)), dtype)
    H = linop.halo_exchange(X, 3, padding=1)
    rng = np.random.default_rng(size)
    blocks = []
    for region in H.codomain:
        shape = (region.size + 2, region.size)
        values = rng.standard_normal(shape) + 1j * rng.standard_normal(shape)
        values = values if np.dtype(dtype).kind == "c" else values.real
        values = values + 3 * np.eye(*shape)
        target = Space(Region(f"y{region.workers[0]}", shape[0], region.workers), dtype)
        source = Space(region, dtype)
        blocks.append(linop.local_operators.matrix(values.astype(dtype), source, target))
    return linop.direct_sum(*blocks) @ H


def general(size: int, workers: int, dtype: str) -> LinearOperator:
    """An operator that is not Hermitian: upper triangles on the workers, after a stencil."""
    op = hermitian(size, workers, dtype, 2.0)
    triangles = [
        linop.local_operators.matrix(
            (np.eye(r.size) + np.triu(np.ones(2 * r.shape)) / 8).astype(dtype),
            Space(r, dtype),
            Space(r, dtype),
        )
        for r in op.domain.regions
    ]
    return linop.direct_sum(*triangles) @ op


Solve = Callable[..., Any]
METHODS: dict[str, tuple[Callable[[int, int, str], LinearOperator], Solve, int]] = {
    "cg": (lambda *a: hermitian(*a, 1.0), solvers.cg, 2),
    "cg with M": (
        lambda *a: hermitian(*a, 1.0),
        lambda A, b, **k: solvers.cg(A, b, M=lambda v: 0.5 * v, **k),
        2,
    ),
    "pipelined cg": (
        lambda *a: hermitian(*a, 1.0),
        lambda A, b, **k: solvers.cg(A, b, pipelined=True, **k),
        1,
    ),
    "minres": (lambda *a: hermitian(*a, -2.0), solvers.minres, 2),
    "gmres": (general, lambda A, b, **k: solvers.gmres(A, b, restart=4, **k), 3),
    "bicgstab": (general, solvers.bicgstab, 3),
    "cgls": (tall, solvers.cgls, 2),
    "lsqr": (tall, lambda A, b, **k: solvers.lsqr(A, b, damp=0.1, **k), 2),
    "lsmr": (tall, lambda A, b, **k: solvers.lsmr(A, b, damp=0.1, **k), 2),
    "lanczos": (
        lambda *a: hermitian(*a, -2.0),
        lambda A, b, **k: solvers.lanczos(A, 2, v0=b, ncv=4, maxiter=12, **k),
        2,
    ),
    "singular values": (
        lambda *a: tall(*a).H,  # tall's codomain, where b is, is the domain then
        lambda A, b, **k: solvers.lanczos(A.H, 2, singular=True, ncv=4, maxiter=12, **k),
        4,
    ),
    "power": (
        lambda *a: hermitian(*a, 1.0),
        lambda A, b, **k: solvers.power(A, b, maxiter=12, **k),
        1,
    ),
}
"""An operator, a solver, and the most reductions of an iteration, by name."""


def parts_of(x: Any) -> list[Vector]:
    return x if isinstance(x, list) else [x]


def has_the_bits_of_the_reference(backend: Backend, name: str, more: int, dtype: str) -> None:
    """The result on each worker is its part of that of one process, to the last bit, after the same
    numbers and as many reductions. Blocks are of three elements at least: in smaller ones halos
    overlap, and the reference adds them in another order."""
    workers = backend.workers or 1
    make, solve, _ = METHODS[name]
    op = make(3 * workers + more, workers, dtype)
    b = op.codomain.random(3)
    wanted = solve(op.compile(linop.backends.get("reference")), b)
    found = solve(op.compile(backend), backend.vector(op.codomain, b))
    assert found.residuals == wanted.residuals
    assert (found.nit, found.status, found.reductions) == (
        wanted.nit,
        wanted.status,
        wanted.reductions,
    )
    assert found.message == wanted.message
    for one, other in zip(parts_of(found.x), parts_of(wanted.x), strict=True):
        for region, array in one.arrays.items():
            assert array.tobytes() == other[region].tobytes()


def resumes(backend: Backend, name: str, size: int, stop: int, path: str) -> None:
    """A run that is stopped by a worker, and resumed from its file, is the run that was not."""
    make, solve, _ = METHODS[name]
    op = make(size, backend.workers or 1, "float64")
    plan, b = op.compile(backend), backend.vector(op.codomain, op.codomain.random(3))
    whole = solve(plan, b)
    calls = []

    def ask(x: Vector) -> bool:
        calls.append(x)
        return len(calls) == stop

    asks = ask if backend.worker == 0 else None
    solve(plan, b, callback=asks, checkpoint=path, every=1)
    found = solve(plan, b, resume=path)
    assert (found.nit, found.residuals, found.message) == (
        whole.nit,
        whole.residuals,
        whole.message,
    )
    for one, other in zip(parts_of(found.x), parts_of(whole.x), strict=True):
        for region, array in one.arrays.items():
            assert array.tobytes() == other[region].tobytes()


def resumes_together(backend: Backend, size: int, behind: int, path: str) -> None:
    """If a worker has the checkpoint before the last only, all go on from there; if it has none,
    all raise the same."""
    op = hermitian(size, backend.workers or 1, "float64", 1.0)
    plan, b = op.compile(backend), backend.vector(op.codomain, op.codomain.random(3))
    whole = solvers.cg(plan, b, maxiter=6)
    solvers.cg(plan, b, maxiter=4, checkpoint=path, every=2)
    mine = f"{path}.{backend.worker}-of-{backend.workers}"
    if backend.worker == behind:
        os.replace(mine + ".previous", mine)
    found = solvers.cg(plan, b, maxiter=6, resume=path)
    assert (found.nit, found.residuals) == (whole.nit, whole.residuals)
    assert found.reductions == 1 + 2 * (found.nit - 2)
    if backend.worker == behind:
        with open(mine, "r+b") as file:
            file.truncate(100)
    said = refused(lambda: solvers.cg(plan, b, resume=path))
    assert f"1 of {backend.workers} workers have no checkpoint of this problem there" in said


def refused(call: Callable[[], object]) -> str:
    """The text of linop's error that a call raises."""
    try:
        call()
    except LinopError as error:
        return str(error)
    raise AssertionError("nothing was refused")


def fails_together(backend: Backend, size: int, path: str) -> None:
    """A file that one worker cannot write is an error of all."""
    op = hermitian(size, backend.workers or 1, "float64", 1.0)
    plan, b = op.compile(backend), backend.vector(op.codomain, op.codomain.random(3))
    file = path if backend.worker == 0 else os.path.join(path, "none", "there")
    try:
        solvers.cg(plan, b, checkpoint=file, every=1)
    except OSError:
        return
    raise AssertionError("the failure was lost")
