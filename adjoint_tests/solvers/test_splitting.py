"""ista, fista, primal_dual and admm in one process: iterates and solutions against NumPy and SciPy.

Tolerances: iterates of the same recursion differ by rounding, 1e-10; solutions are ended at 1e-9,
and condition numbers are below 100.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.optimize
from hypothesis import given
from hypothesis import strategies as st
from pylops import MatrixMult
from pylops.optimization.sparsity import fista as pylops_fista
from pylops.optimization.sparsity import ista as pylops_ista

import linop
from linop import LinearOperator, Partition, TensorSpace, Vector
from linop.errors import ArgumentError, DTypeError, LinopError, SpaceError
from linop.solvers import admm, fista, ista, primal_dual, prox

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
each_dtype = pytest.mark.parametrize("dtype", [float, complex])


def problem(
    rows: int, columns: int, seed: int, dtype: Any = float
) -> tuple[np.ndarray, np.ndarray]:
    """A matrix of norm about 1 and data of a sparse vector, with noise."""
    rng = np.random.default_rng(seed)
    A = rng.standard_normal((rows, columns)) / np.sqrt(rows + columns)
    x = rng.standard_normal(columns) * (rng.random(columns) < 0.3)
    if dtype is complex:
        A, x = A + 1j * rng.standard_normal(A.shape) / 9, x * np.exp(1j * np.arange(columns))
    return A, A @ x + 0.05 * rng.standard_normal(rows)


def soft(a: np.ndarray, least: float) -> np.ndarray:
    return a * np.maximum(1 - least / np.maximum(abs(a), 1e-300), 0)


def norm2(A: np.ndarray) -> float:
    return float(np.linalg.norm(A, 2))


# Proximal gradients


@each_dtype
@pytest.mark.parametrize("niter", [1, 2, 30])
def test_iterates_are_those_of_pylops(dtype: Any, niter: int) -> None:
    """PyLops thresholds with eps alpha / 2."""
    A, b = problem(20, 30, 1, dtype)
    tau, op = 0.9 / norm2(A) ** 2, linop.local_operators.matrix(A)
    for ours, theirs in ((fista, pylops_fista), (ista, pylops_ista)):
        x, count, cost = ours(op, b, prox.l1(), sigma=0.1, tau=tau, niter=niter, tol=0)
        given = {"niter": niter, "eps": 0.2, "alpha": tau, "tol": 0}
        wanted = theirs(MatrixMult(A, dtype=A.dtype), b.astype(A.dtype), **given)[0]
        np.testing.assert_allclose(np.asarray(x), wanted, **CLOSE)
        assert count == niter
        objective = np.linalg.norm(A @ wanted - b) ** 2 / 2 + 0.1 * abs(wanted).sum()
        np.testing.assert_allclose(cost[-1], objective, rtol=1e-9)


@given(
    st.integers(1, 12), st.integers(1, 12), st.integers(0, 999), st.sampled_from([float, complex])
)
def test_the_lasso_s_optimality(rows: int, columns: int, seed: int, dtype: Any) -> None:
    """Steps are estimated: A* (b - A x) is sigma x / |x|, and at most sigma where x is zero."""
    A, b = problem(rows, columns, seed, dtype)
    op, sigma = linop.local_operators.matrix(A), 0.1
    for solver in (fista, ista):
        found = solver(op, b, prox.l1(), sigma=sigma, niter=20000, tol=1e-10)
        assert found.success, found.message
        x = np.asarray(found.x)
        slope = A.conj().T @ (b - A @ x)
        assert (abs(slope) <= sigma * (1 + 1e-5)).all()
        on = x != 0
        np.testing.assert_allclose(slope[on], sigma * x[on] / abs(x[on]), atol=1e-5)


@given(st.integers(2, 10), st.integers(0, 999))
def test_bounds_against_scipy(size: int, seed: int) -> None:
    A, b = problem(size + 3, size, seed)
    A += np.eye(size + 3, size)
    op = linop.local_operators.matrix(A)
    found = fista(op, b, prox.box(0), niter=50000, tol=1e-12)
    np.testing.assert_allclose(np.asarray(found.x), scipy.optimize.nnls(A, b)[0], atol=1e-6)
    found = fista(op, b, prox.box(-0.1, 0.2), niter=50000, tol=1e-12)
    wanted = scipy.optimize.lsq_linear(A, b, (-0.1, 0.2), tol=1e-14, method="bvls").x
    np.testing.assert_allclose(np.asarray(found.x), wanted, atol=1e-6)


def test_without_a_map_it_is_least_squares() -> None:
    A, b = problem(20, 8, 2)
    A += np.eye(20, 8)
    found = fista(linop.local_operators.matrix(A), b, niter=5000, tol=1e-12)
    np.testing.assert_allclose(np.asarray(found.x), np.linalg.lstsq(A, b)[0], atol=1e-8)
    assert found.fun == pytest.approx(np.linalg.norm(A @ np.asarray(found.x) - b) ** 2 / 2)


def test_one_reduction_an_iteration() -> None:
    A, b = problem(20, 30, 1)
    op, given = linop.local_operators.matrix(A), {"niter": 25, "tol": 0}
    found = fista(op, b, prox.l1(0.1), tau=0.1, **given)
    assert (found.nit, found.reductions) == (25, 1 + 25)
    assert fista(op, b, prox.l2(0.1), tau=0.1, **given).reductions == 1 + 25
    estimated = fista(op, b, prox.l1(0.1), **given)
    assert 1 + 25 < estimated.reductions <= 1 + 20 + 25
    found = primal_dual(op, prox.l1(0.1), prox.l2(), np.ones(30), tau=0.1, mu=0.1, **given)
    assert (found.nit, found.reductions) == (25, 1 + 25)
    found = admm(prox.l1(0.1), prox.box(0.5), op.domain.random(0), **given)
    assert (found.nit, found.reductions) == (25, 1 + 25)


def test_a_step_that_is_too_long_is_shortened() -> None:
    """Power iterations from the first vector see the two last singular values alone."""
    A = np.diag([9.0, 1.0, 0.5])
    op = linop.local_operators.matrix(A)
    from linop.solvers.splitting import operator_norm

    def blind(Op: Any, like: Vector, seed: int) -> Vector:
        return Op.domain.vector(np.array([0.0, 1.0, 1.0]))

    real, operator_norm.random_vector = operator_norm.random_vector, blind
    try:
        found = fista(op, [9.0, 1.0, 1.0], prox.l1(0.1), niter=2000, tol=1e-10)
        both = primal_dual(op, prox.squared_l2(), prox.box(1), [2.0, 2.0, 2.0], tol=1e-10)
    finally:
        operator_norm.random_vector = real
    assert found.tau <= 1 / 81 * 1.01
    np.testing.assert_allclose(np.asarray(found.x), [1 - 0.1 / 81, 0.9, 1.6], atol=1e-7)
    assert both.tau * both.mu < 0.5  # 1 at first
    np.testing.assert_allclose(np.asarray(both.x), np.ones(3), atol=1e-7)


# Primal-dual


@each_dtype
def test_iterates_of_chambolle_and_pock(dtype: Any) -> None:
    """min 0.3 ‖K x‖₁ + ‖x - y‖² / 2, by the recursion of the paper."""
    K, _ = problem(25, 15, 3, dtype)
    y = problem(1, 15, 4, dtype)[0][0] * 5
    op, steps = linop.local_operators.matrix(K), {"tau": 0.7, "mu": 0.4}
    tau, mu = steps.values()
    x, dual = np.zeros(15, K.dtype), np.zeros(25, K.dtype)
    bar = x
    g = prox.squared_l2(1.0, op.domain.vector(y.astype(K.dtype)))
    for niter in range(1, 20):
        v = dual + mu * K @ bar
        dual = v / np.maximum(abs(v) / 0.3, 1)
        new = (x - tau * K.conj().T @ dual + tau * y) / (1 + tau)
        x, bar = new, new + 0.8 * (new - x)
        given = {"theta": 0.8, "niter": niter, "tol": 0, **steps}
        found = primal_dual(op, prox.l1(0.3), g, np.zeros(15, K.dtype), **given)
        np.testing.assert_allclose(np.asarray(found.x), x, **CLOSE)
        np.testing.assert_allclose(np.asarray(found.y), dual, **CLOSE)
        objective = 0.3 * abs(K @ x).sum() + np.linalg.norm(x - y) ** 2 / 2
        np.testing.assert_allclose(found.cost[-1], objective, rtol=1e-9)


@given(st.lists(st.integers(2, 5), min_size=1, max_size=2).map(tuple), st.integers(0, 99))
def test_denoising_is_the_proximal_map_of_total_variation(
    shape: tuple[int, ...], seed: int
) -> None:
    X = TensorSpace(shape, Partition((1,)))
    v = X.random(seed)
    wanted = prox.total_variation(X, 0.4, niter=500, rtol=1e-5).prox(v, 1.0)
    found = primal_dual(
        prox.gradient(X), prox.group(0, 0.4), prox.squared_l2(1.0, v), v, niter=1000, tol=1e-7
    )
    assert (found.x - wanted).norm() <= 1e-4 * (1 + v.norm())


def test_a_linear_program() -> None:
    """max c x with A x <= b and 0 <= x <= 1, whose objective is a user's map."""
    rng = np.random.default_rng(5)
    A, b, c = rng.random((4, 7)), np.ones(4), rng.random(7)
    op = linop.local_operators.matrix(A)
    f = prox.box(None, op.codomain.vector(b))
    g = prox.user(lambda a, t: np.clip(a + t * c, 0, 1), lambda a: -float(c @ a))
    found = primal_dual(op, f, g, np.zeros(7), niter=100000, tol=1e-9)
    wanted = scipy.optimize.linprog(-c, A, b, bounds=(0, 1))
    assert -c @ np.asarray(found.x) == pytest.approx(wanted.fun, abs=1e-5)


def test_an_infeasible_start_costs_infinity() -> None:
    op = linop.local_operators.matrix(np.eye(3) * 2)
    given = {"tau": 0.1, "mu": 0.1}
    found = primal_dual(op, prox.box(4), prox.squared_l2(), np.ones(3), niter=3000, **given)
    assert found.cost[0] == math.inf
    assert found.success
    np.testing.assert_allclose(np.asarray(found.x), 2 * np.ones(3), atol=1e-4)


# ADMM


@each_dtype
def test_admm_solves_the_lasso(dtype: Any) -> None:
    A, b = problem(20, 30, 1, dtype)
    op = linop.local_operators.matrix(A)
    wanted = fista(op, b, prox.l1(0.1), niter=20000, tol=1e-11)
    f = prox.squared_l2(1.0, op.codomain.vector(b.astype(A.dtype)), op, rtol=1e-12)
    found = admm(f, prox.l1(0.1), op.domain.zeros(), niter=20000, tol=1e-10)
    np.testing.assert_allclose(np.asarray(found.x), np.asarray(wanted.x), atol=1e-7)
    assert found.fun == pytest.approx(wanted.fun)
    assert found.reductions > 3 * found.nit  # those of conjugate gradients are counted


@each_dtype
def test_admm_iterates_with_an_operator(dtype: Any) -> None:
    """min ‖A x - b‖² / 2 + 0.1 ‖M x‖₁, whose linear equations NumPy solves."""
    A, b = problem(20, 12, 1, dtype)
    M, _ = problem(9, 12, 2, dtype)
    tau, x, z, u = 0.7, None, np.zeros(9, M.dtype), np.zeros(9, M.dtype)
    normal = A.conj().T @ A + M.conj().T @ M / tau
    for _ in range(12):
        x = np.linalg.solve(normal, A.conj().T @ b + M.conj().T @ (z - u) / tau)
        z = soft(M @ x + u, 0.1 * tau)
        u = u + M @ x - z
    op, m = linop.local_operators.matrix(A), linop.local_operators.matrix(M)
    m = linop.local_operators.matrix(M, op.domain, m.codomain)
    f = prox.squared_l2(1.0, op.codomain.vector(b.astype(A.dtype)), op, rtol=1e-14, niter=500)
    given = {"Op": m, "tau": tau, "niter": 12, "tol": 0}
    found = admm(f, prox.l1(0.1), np.zeros(12, A.dtype), **given)
    np.testing.assert_allclose(np.asarray(found.x), x, atol=1e-8)
    np.testing.assert_allclose(np.asarray(found.z), z, atol=1e-8)


@given(st.integers(1, 8), st.integers(0, 99), st.sampled_from([0.1, 1.0, 5.0]))
def test_the_map_of_least_squares(size: int, seed: int, step: float) -> None:
    A, b = problem(size + 2, size, seed)
    op = linop.local_operators.matrix(A)
    v = op.domain.random(seed)
    f = prox.squared_l2(0.6, op.codomain.vector(b), op, rtol=1e-13)
    wanted = np.linalg.solve(
        np.eye(size) + 0.6 * step * A.T @ A, np.asarray(v) + 0.6 * step * A.T @ b
    )
    np.testing.assert_allclose(np.asarray(f.prox(v, step)), wanted, atol=1e-8)
    assert f(v) == pytest.approx(0.3 * np.linalg.norm(A @ np.asarray(v) - b) ** 2)


# Starts of maps that iterate


def _least_squares(seed: int = 3, **given: Any) -> tuple[LinearOperator, Any, list[str]]:
    """An operator, its `squared_l2`, and a list that gets an entry for each application."""
    A, b = problem(14, 9, seed)
    applied: list[str] = []

    def once(M: np.ndarray, x: np.ndarray) -> np.ndarray:
        applied.append("A")
        return M @ x

    X, Y = (linop.Space(linop.Region(name, n)) for name, n in (("x", 9), ("y", 14)))
    op = linop.local(X, Y, lambda x: once(A, x), lambda y: once(A.T, y))
    return op, prox.squared_l2(1.0, op.codomain.vector(b), op, **given), applied


def test_a_start_is_near_the_same_minimizer() -> None:
    """At the result: it ends at once. Of the conjugate: by Moreau's identity, the same."""
    op, f, applied = _least_squares(rtol=1e-10)
    v = op.domain.random(1)
    for g in (f, f.conjugate()):
        applied.clear()
        wanted = g.prox(v, 0.7)
        cold = len(applied)
        applied.clear()
        found = g.prox(v, 0.7, wanted)
        assert len(applied) <= 4 < cold  # once to see it, once more to begin in vain
        np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), atol=1e-9)
        far = g.prox(v, 0.7, 100 * op.domain.random(2))
        np.testing.assert_allclose(np.asarray(far), np.asarray(wanted), atol=1e-9)


@pytest.mark.parametrize("rtol", [1e-2, 1e-4, 1e-6])
def test_the_tolerance_bounds_the_distance(rtol: float) -> None:
    op, f, _ = _least_squares(rtol=rtol)
    _, exact, _ = _least_squares(rtol=1e-13)
    v, right = op.domain.random(1), f._image()
    for step in (0.3, 3.0):
        off = f.prox(v, step) - exact.prox(v, step)
        assert off.norm() <= 1.001 * rtol * (v + step * right).norm()


def test_maps_keep_nothing_between_calls() -> None:
    """Two solvers that share a map, one inside of the other's callback, find what they find alone;
    and the map gives the same bits before and after."""
    op, f, _ = _least_squares(niter=2, rtol=0)
    v, K = op.domain.random(1), linop.identity(op.domain)

    def solved(x0: Vector, callback: Any = None) -> Vector:
        given = {"tau": 0.5, "mu": 0.5, "niter": 5, "tol": 0, "callback": callback}
        return primal_dual(K, prox.l1(0.1), f, x0, **given).x

    alone, other, before = solved(v), solved(3 * v), f.prox(v, 0.5)
    inside: list[Vector] = []
    shared = solved(v, lambda x: inside.append(solved(3 * v)))
    for found, wanted in [(shared, alone), *((one, other) for one in inside)]:
        assert np.asarray(found).tobytes() == np.asarray(wanted).tobytes()
    assert np.asarray(f.prox(v, 0.5)).tobytes() == np.asarray(before).tobytes()


@pytest.mark.parametrize("side", ["f", "g"])
def test_solvers_begin_maps_at_their_last_variables(side: str) -> None:
    """Near the solution each call of the map takes fewer applications than from v."""
    op, f, applied = _least_squares(rtol=1e-6)
    K, x0 = linop.identity(op.domain), op.domain.random(1)
    maps = (f, prox.l1(0.1)) if side == "f" else (prox.l1(0.1), f)
    count: list[int] = []
    given = {"tau": 0.9, "mu": 0.9, "niter": 40, "tol": 0}
    primal_dual(K, *maps, x0, callback=lambda x: count.append(len(applied)), **given)
    each = np.diff(count)
    applied.clear()
    f.prox(op.domain.random(1), 0.9)
    assert each[-5:].max() < min(len(applied), each[0])


def test_other_limits_of_a_map_are_another_problem(tmp_path: Path) -> None:
    """A checkpoint of a run whose map has other ones is refused."""
    op, f, _ = _least_squares(niter=3, rtol=1e-3)
    _, other, _ = _least_squares(niter=3, rtol=1e-4)
    path, x0, one = tmp_path / "run", op.domain.random(1), linop.identity(op.domain)
    given = {"tau": 0.5, "mu": 0.5, "tol": 0}
    primal_dual(one, prox.l1(0.1), f, x0, niter=4, checkpoint=path, every=2, **given)
    whole = primal_dual(one, prox.l1(0.1), f, x0, niter=8, **given)
    found = primal_dual(one, prox.l1(0.1), f, x0, niter=8, resume=path, **given)
    assert np.asarray(found.x).tobytes() == np.asarray(whole.x).tobytes()
    with pytest.raises(ArgumentError, match="no checkpoint of this problem"):
        primal_dual(one, prox.l1(0.1), other, x0, niter=8, resume=path, **given)


def test_wrong_starts_are_named() -> None:
    op, f, _ = _least_squares()
    v = op.domain.random(1)
    with pytest.raises(SpaceError, match=r"squared_l2\(1\), start"):
        f.prox(v, 1.0, op.codomain.random(1))
    with pytest.raises(ArgumentError, match=r"squared_l2\(1\), start: expected a Vector"):
        f.prox(v, 1.0, np.zeros(9))  # type: ignore[arg-type]
    np.testing.assert_array_equal(
        np.asarray(prox.l1().prox(v, 1.0, v)), np.asarray(prox.l1().prox(v, 1.0))
    )


# Borders


def test_zero_data() -> None:
    op = linop.local_operators.matrix(np.eye(3))
    found = fista(op, np.zeros(3), prox.l1())
    assert (found.nit, found.success, found.fun) == (1, True, 0)
    none = linop.local_operators.matrix(np.zeros((3, 3)))
    assert not np.asarray(fista(none, np.ones(3), prox.l1()).x).any()
    assert fista(op, np.ones(3), prox.l1(), niter=0).nit == 0


def test_a_map_without_a_value_has_no_cost() -> None:
    op = linop.local_operators.matrix(np.eye(3))
    found = fista(op, np.ones(3), prox.user(lambda a, step: a / (1 + step)))
    assert (found.cost, found.fun) == ([], None)
    np.testing.assert_allclose(np.asarray(found.x), np.ones(3) / 2, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "float32", "longdouble", "complex64", "clongdouble"])
def test_other_dtypes_are_kept(dtype: str) -> None:
    X = TensorSpace((8,), Partition((2,)), dtype)
    D = prox.gradient(X)
    op, y, g = linop.identity(X) + D.H @ D / 4, X.random(0), prox.l1(0.1)
    one = prox.squared_l2(1.0, y)
    results = [
        fista(op, y, g, niter=30),
        primal_dual(D, prox.group(0, 0.1), one, y, niter=30),
        admm(prox.squared_l2(1.0, y, op, rtol=1e-3), g, y, niter=30),
        linop.solvers.lbfgs(lambda x: ((x - y).norm() ** 2 / 2, x - y), 0 * y, maxiter=9),
        linop.solvers.gauss_newton(lambda x: op(x) - y, op, 0 * y, rtol=1e-2),
    ]
    for found in results:
        assert {a.dtype.name for a in found.x.arrays.values()} == {X.dtype.name}
        assert found.residuals[-1] < 0.7


def test_lines_and_messages(capsys: pytest.CaptureFixture[str]) -> None:
    op = linop.local_operators.matrix(np.diag([1.0, 0.5]))
    found = fista(op, np.ones(2), prox.l1(0.1), niter=3, tol=0, show=True)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines] == [["fista", str(k), "change"] for k in (1, 2, 3)]
    assert found.message.startswith("fista: 3 iterations done, the most allowed; change ")
    assert fista(op, np.ones(2)).message.startswith("fista: converged: the length of a step")


def test_operators_that_are_not_finite() -> None:
    S = linop.Space(linop.Region("x", 3))
    calls: list[int] = []

    def late(x: np.ndarray) -> np.ndarray:
        calls.append(1)
        return x / 3 if len(calls) < 3 else np.array([1, np.nan, 1])

    op = linop.local(S, S, late, lambda y: y / 3)
    with pytest.raises(ArgumentError, match="fista, iteration 3: the product Op x is not finit"):
        fista(op, np.ones(3), tau=1.0, tol=0)


EYE = linop.local_operators.matrix(np.eye(3))
OTHER: LinearOperator = linop.local_operators.matrix(np.eye(4))


@pytest.mark.parametrize(
    ("kind", "words", "call"),
    [
        (ArgumentError, "fista: Op is an operator", lambda: fista(np.eye(3), np.ones(3))),
        (ArgumentError, "g is a map of linop.solvers.prox", lambda: fista(EYE, np.ones(3), abs)),  # type: ignore
        (ArgumentError, "ista: sigma: a positive", lambda: ista(EYE, np.ones(3), sigma=-1)),
        (ArgumentError, "tau: a positive", lambda: fista(EYE, np.ones(3), tau=0)),
        (ArgumentError, "niter is a whole number", lambda: fista(EYE, np.ones(3), niter=-1)),
        (ArgumentError, "tol is a finite real", lambda: fista(EYE, np.ones(3), tol=-1)),
        (ArgumentError, "callback is a function", lambda: fista(EYE, np.ones(3), callback=3)),  # type: ignore
        (SpaceError, "the spaces differ", lambda: fista(EYE, OTHER.domain.zeros())),
        (ArgumentError, "f is a map", lambda: primal_dual(EYE, None, None, np.ones(3))),  # type: ignore
        (
            ArgumentError,
            "theta is a number from 0 to 1; given 2",
            lambda: primal_dual(EYE, prox.l1(), None, np.ones(3), theta=2),
        ),
        (
            ArgumentError,
            "x0 is a Vector, given ndarray",
            lambda: admm(prox.l1(), prox.l1(), np.ones(3)),
        ),
        (
            ArgumentError,
            "with Op, f is prox.squared_l2",
            lambda: admm(prox.l1(), prox.l1(), np.ones(3), Op=EYE),
        ),
        (
            DTypeError,
            "a floating dtype is expected",
            lambda: admm(prox.l1(), prox.l1(), linop.Space(linop.Region("x", 3), int).zeros()),
        ),
    ],
)
def test_refused(kind: type[LinopError], words: str, call: Callable[[], object]) -> None:
    with pytest.raises(kind, match=words):
        call()
