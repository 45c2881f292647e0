"""Contracts of time loops, and two oracles: the recursion on dense matrices, in NumPy, and the
steps written out."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

import linop
from linop import LinearOperator, Partition, Space, TensorSpace, Vector
from linop.backends.engine.base import Backend
from linop.errors import BackendError, LinopError, ShapeError
from linop.loops import Checkpoints, Evolution, evolution
from linop.networks import Map, chain, multiply
from linop.operators.expressions import Identity, compose
from linop.testing.describing import Description, tensor_of
from linop.testing.factories import build
from linop.testing.factories.pipelines import scaled

Matrix = np.ndarray


def operands(described: Description) -> tuple[LinearOperator, ...]:
    """A, S, and R of a description of `time_loop`, of tensor spaces: flat vectors of states are in
    one order."""
    X, Y, Z = map(tensor_of, described["cuts"])
    P, seed = linop.repartition(X, Y), described["seed"]
    S = compose(Identity(X, X), scaled(X, seed + 1), P.H)
    return P.H @ scaled(Y, seed) @ P, S, linop.repartition(X, Z)


def recursion(described: Description) -> Matrix:
    """The matrix of a described loop, by the recursion of its steps on unit vectors."""
    A, S, R = (op.to_matrix().toarray() for op in operands(described))
    n, ends = described["n"], described["ends"]
    hears, speaks = ends in ("signals", "both", "all"), ends in ("records", "both", "all")
    starts, stops = not hears or ends == "all", not speaks or ends == "all"
    size = len(A) * starts + n * S.shape[1] * hears
    units = np.eye(size, dtype=A.dtype)
    x = units[: len(A)] if starts else np.zeros((len(A), size), A.dtype)
    signals = units[len(A) * starts :].reshape(n if hears else 0, S.shape[1], size)
    records = []
    for k in range(n):
        x = A @ x + (S @ signals[k] if hears else 0)
        records += [R @ x] if speaks else []
    found = np.concatenate([*([x] if stops else []), *records, np.zeros((0, size), A.dtype)])
    return found.conj().T if described["back"] else found


def whole(space: Space, backend: Backend, flat: np.ndarray) -> tuple[Vector, Vector]:
    """The vector of an array, and that of this backend."""
    vector = space.unflatten(flat.astype(space.dtype))
    return vector, backend.vector(space, {r.name: vector[r.name] for r in space})


def is_its_recursion(backend: Backend, described: Description, seed: int) -> None:
    """A plan of a loop, its adjoint's, and both in halves, are the recursion; call after call."""
    op, matrix = build("time_loop", described), recursion(described)
    plan = op.compile(backend)
    for there, wanted in ((plan, matrix), (plan.H, matrix.conj().T)):
        random = np.random.default_rng(seed)
        for way in (there, _in_halves(there), there):
            flat = random.integers(-2, 3, wanted.shape[1])
            _, x = whole(there.domain, backend, flat)
            given = x.copy()
            y = way(x)
            for name, array in x.arrays.items():  # a step may overwrite states, and not arguments
                np.testing.assert_array_equal(array, given[name])
            right = there.codomain.unflatten((wanted @ flat).astype(op.dtype))
            for name, array in y.arrays.items():
                np.testing.assert_array_equal(array, right[name])


def _in_halves(plan: Any) -> Any:
    def run(x: Any) -> Any:
        plan.start(x)
        return plan.finish()

    return run


def stands_anywhere(backend: Backend) -> None:
    """Loops in products, sums, multiples, stacks, direct sums, steps and loops."""
    workers = backend.workers or 3
    X, Y = (TensorSpace((7, 2), Partition((workers,)), np.int64, name=name) for name in "xy")
    A = linop.stencil(X, {(0, 0): 2, (1, 0): -1, (0, -1): 1}, "periodic")
    L, to = linop.repeat(A, 3), linop.repartition(X, Y)
    B = to @ A @ to.H
    swap = linop.vstack(linop.hstack(A, to.H), linop.hstack(to, B))
    for op in (
        to @ A @ L @ A @ L,
        2 * L + A - L @ L,
        linop.vstack(L, to @ A + B @ to @ L),
        linop.hstack(L, to.H),
        linop.direct_sum(L, B),
        linop.in_steps(A, L, A),
        linop.repeat(swap, 4),
        linop.repeat(L @ A, 2),
        linop.timeloop(L, 2, A, to @ L),
        L.conj().H,
    ):
        plan = op.compile(backend)
        for one, there in ((op, plan), (op.H, plan.H)):
            x, here = whole(one.domain, backend, np.arange(one.shape[1]) % 5 - 2)
            right = one(x)
            out = {r.name: np.empty(r.shape, int) for r in _held(one.codomain, backend)}
            for y in (there(here), there(here, out=out or None)):
                for name in y.arrays if isinstance(y, Vector) else y or ():
                    assert (y[name] == right[name]).all(), op


def _held(space: Space, backend: Backend) -> Any:
    return space.regions if backend.worker is None else space.on(backend.worker)


def is_compiled_once(backend: Backend) -> None:
    """A million steps are compiled, and nothing is written out; their number does not change the
    memory that a run takes."""
    X = TensorSpace((64, 512), Partition((backend.workers or 1,)))
    A = linop.stencil(X, {(0, 0): 0.5, (1, 0): 0.25, (-1, 0): 0.25})
    long = linop.timeloop(A, 10**6, A.H, linop.repartition(X, X))
    plan = long.compile(backend)
    assert len(plan.parts) == 1 and "stages" not in vars(long)
    assert plan.H.H is plan and plan.H.parts[0] is plan.parts[0].H
    if backend.workers == 1:
        peaks = []
        for n in (3, 60):
            few = linop.repeat(A, n).compile(backend)
            x = np.ones((64, 512))
            few(x)
            tracemalloc.start()
            few(x)
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        assert peaks[1] < peaks[0] + X.size  # an eighth of a state


def lengths_agree(backend: Backend) -> None:
    """Loops of different lengths are refused on all workers."""
    X = TensorSpace((4,), Partition((backend.workers,)))
    with pytest.raises(BackendError, match="built different time loops"):
        linop.repeat(linop.identity(X), 2 + (backend.worker == 1)).compile(backend)


def wrong_arguments_fail_everywhere(backend: Backend, later: bool) -> None:
    """One worker's array that does not fit is an error of all, before the first message."""
    X = TensorSpace((8,), Partition((backend.workers,)))
    A = linop.stencil(X, {1: 1.0, -1: 1.0})
    plan = linop.repeat(A, 4).compile(backend)
    own = X.local_shape(backend.worker or 0)
    if later:
        plan(np.ones(own))
    with pytest.raises(LinopError) as caught:
        plan(np.ones(own if backend.worker else (99,)))
    assert isinstance(caught.value, ShapeError), caught.value


# Nonlinear steps


def waves(workers: int, dtype: Any = np.int64) -> tuple[Map, LinearOperator, LinearOperator]:
    """u ← 2 u - b + m L u, b ← u, with m a parameter; sources and receivers."""
    shape, grid = (5, 3), Partition((workers, 1))
    U, B, M, W, V, P = (TensorSpace(shape, grid, dtype, name=name) for name in "ubmwvp")
    to = linop.repartition
    L = linop.stencil(U, {(0, 0): -4, (1, 0): 1, (-1, 0): 1, (0, 1): 1, (0, -1): 1})
    apart = linop.vstack(
        linop.hstack(to(U, W) @ L, linop.zero(B, W)),
        linop.hstack(2 * to(U, V), -to(B, V)),
        linop.hstack(to(U, B), linop.zero(B, B)),
    )
    step = chain(apart, multiply(W, M, "p"), linop.hstack(to(V, U), to(P, U)))
    above = linop.pad(U, [(-1, -3), (0, 0)])
    heard = linop.repartition(U, TensorSpace(shape, grid, dtype, name="r"))
    sources = linop.vstack(above.H, linop.zero(above.codomain, B))
    return step, sources, linop.hstack(heard, linop.zero(B, heard.codomain))


def is_the_chain_of_its_steps(
    backend: Backend, n: int, ends: str, checkpoints: Checkpoints, seed: int
) -> None:
    """Value and products with the Jacobian are those of the steps written out; their cost is the
    predicted one."""
    F, S, R = waves(backend.workers or 2)
    sources, receivers = S if "s" in ends else None, R if "r" in ends else None
    final = True if "f" in ends else None
    T = evolution(F, n, sources, receivers, final=final, checkpoints=checkpoints)
    random = np.random.default_rng(seed)
    spaces = T.domain, T.codomain, T.domain
    given = [whole(s, backend, random.integers(-2, 3, s.size)) for s in spaces]
    (x, hx), (g, hg), (v, hv) = given
    run = T.compile(backend)
    _same(run(hx), T(x))
    J = T.jacobian(x)
    _same(run.vjp(hg), J.H(g))
    assert run.counted == run.predicted, checkpoints
    assert run.counted.steps == n + run.counted.recomputed
    assert run.predicted_bytes == run.counted.states * sum(
        8 * r.size for r in _held(T.state, backend)
    )
    _same(run.jvp(hv), J(v))
    _same(run.jacobian.H(hg), J.H(g))
    some = [r.name for r in T.domain if r.name.startswith("m")]
    part = T.compile(backend, wrt=some)
    part(hx)
    found = part.vjp(hg)
    assert {name.partition("@")[0] for name in found.arrays} <= {"m"}
    _same(found, J.H(g))


def _same(found: Vector, right: Vector) -> None:
    for name, array in found.arrays.items():
        np.testing.assert_array_equal(array, right[name])


def logistic(workers: int, n: int, **options: Any) -> tuple[TensorSpace, Evolution]:
    """x ← x (r x): a nonlinear step with a parameter r."""
    X, C, R, Z = (TensorSpace((6,), Partition((workers,)), name=name) for name in "xcrz")
    copied = linop.vstack(linop.identity(X), linop.repartition(X, C))
    scale = multiply(C, R, "z")
    product = multiply(X, Z, "y")
    back = linop.repartition(product.codomain, X)
    return R, evolution(chain(copied, scale, product, back), n, **options)


def taylors_rest_is_of_second_order(backend: Backend, checkpoints: Checkpoints) -> None:
    """Of a loop whose state is squared in each step."""
    _, T = logistic(backend.workers or 1, 4, checkpoints=checkpoints)
    run = T.compile(backend)
    random = np.random.default_rng(1)
    _, x = whole(T.domain, backend, 1.0 + np.arange(T.domain.size) / 10)
    _, x = whole(T.domain, backend, random.uniform(0.8, 1.1, T.domain.size)) if x else x
    _, d = whole(T.domain, backend, random.uniform(-1, 1, T.domain.size))
    _, w = whole(T.codomain, backend, random.uniform(-1, 1, T.codomain.size))
    value, slope = run(x).inner(w), run.vjp(w).inner(d)
    assert np.isclose(slope, run.jvp(d).inner(w), rtol=1e-12)
    rests = [abs(run(x + h * d).inner(w) - value - h * slope) for h in (1e-2, 5e-3, 2.5e-3)]
    assert 3.5 < rests[0] / rests[1] < 4.5 and 3.5 < rests[1] / rests[2] < 4.5, rests


def is_fitted(backend: Backend) -> None:
    """Gauss-Newton and L-BFGS find the parameter that made the records."""
    R, T = logistic(backend.workers or 1, 3)
    X = T.state
    run = T.compile(backend, wrt=R)
    x = backend.vector(X, {r.name: np.full(r.shape, 0.9) for r in _held(X, backend)})
    right, guess = (
        backend.vector(R, {r.name: np.full(r.shape, value) for r in _held(R, backend)})
        for value in (1.05, 0.95)
    )

    def at(r: Vector) -> Any:
        return run(backend.vector(T.domain, {**x.arrays, **r.arrays}))

    wanted = at(right)

    def jacobian(r: Vector) -> Any:
        at(r)
        return run.jacobian

    def misfit(r: Vector) -> tuple[float, Vector]:
        rest = at(r) - wanted
        return rest.inner(rest) / 2, run.vjp(rest)

    found = linop.solvers.gauss_newton(lambda r: at(r) - wanted, jacobian, guess)
    assert (found.x - right).norm() < 1e-6
    assert (linop.solvers.lbfgs(misfit, guess).x - right).norm() < 1e-5
