"""lbfgs and gauss_newton in one process, against SciPy on its own problems."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.optimize
from hypothesis import given
from hypothesis import strategies as st

import linop
from linop import Region, Space, Vector
from linop.errors import ArgumentError, DTypeError, LinopError, SpaceError
from linop.solvers import gauss_newton, lbfgs
from linop.solvers.nonlinear.wolfe import CURVATURE, DECREASE, Point, search


def function(X: Space, value: Callable[..., Any], gradient: Callable[..., Any]) -> Any:
    return lambda v: (value(np.asarray(v)), X.vector(gradient(np.asarray(v))))


def line(size: int, dtype: Any = float) -> Space:
    return Space(Region("x", size), dtype)


# L-BFGS


@pytest.mark.parametrize("size", [2, 10, 50])
def test_rosenbrock_s_function(size: int) -> None:
    """SciPy's own problem: the minimum, in about as many iterations as L-BFGS-B takes."""
    X, x0 = line(size), np.full(size, -1.2)
    rosen = scipy.optimize.rosen, scipy.optimize.rosen_der
    found = lbfgs(function(X, *rosen), X.vector(x0), rtol=1e-11)
    given = {"jac": rosen[1], "method": "L-BFGS-B", "options": {"ftol": 0, "gtol": 1e-8}}
    theirs = scipy.optimize.minimize(rosen[0], x0, **given)
    assert found.success and theirs.fun < 1e-12
    np.testing.assert_allclose(np.asarray(found.x), np.ones(size), atol=1e-6)
    assert found.nit <= 1.5 * theirs.nit
    assert found.nfev <= 1.5 * theirs.nfev
    assert found.reductions == found.nfev + found.nit
    _, value, said = found
    assert (value, said["nit"], said["funcalls"]) == (found.fun, found.nit, found.nfev)
    assert found.cost == sorted(found.cost, reverse=True)


def recursion(s: list[np.ndarray], y: list[np.ndarray], g: np.ndarray) -> np.ndarray:
    """The two loops on vectors (Nocedal & Wright, algorithm 7.4)."""
    q, alphas = g.copy(), []
    for a, b in zip(reversed(s), reversed(y), strict=True):
        alphas.append((a @ q) / (a @ b))
        q = q - alphas[-1] * b
    r = q * (s[-1] @ y[-1]) / (y[-1] @ y[-1])
    for a, b, alpha in zip(s, y, reversed(alphas), strict=True):
        r = r + a * (alpha - (b @ r) / (a @ b))
    return r


@given(st.integers(2, 6), st.integers(1, 4), st.integers(0, 999))
def test_directions_are_those_of_the_two_loops(size: int, maxcor: int, seed: int) -> None:
    """On a quadratic function, whose exact steps are not taken: each step is along - H g."""
    rng = np.random.default_rng(seed)
    B = rng.standard_normal((size, size))
    A, X = B @ B.T + np.eye(size), line(size)
    points = [rng.standard_normal(size)]
    fun = function(X, lambda x: x @ A @ x / 2, lambda x: A @ x)
    lbfgs(
        fun,
        X.vector(points[0].copy()),
        maxcor=maxcor,
        maxiter=8,
        rtol=1e-4,
        callback=lambda x: points.append(np.asarray(x).copy()),
    )
    for k in range(2, len(points)):
        first = max(0, k - 1 - maxcor)
        steps = [b - a for a, b in zip(points[first : k - 1], points[first + 1 : k], strict=True)]
        p = -recursion(steps, [A @ s for s in steps], A @ points[k - 1])
        taken = points[k] - points[k - 1]
        cosine = p @ taken / np.linalg.norm(p) / np.linalg.norm(taken)
        assert cosine == pytest.approx(1, abs=1e-6)


@given(st.integers(1, 6), st.integers(0, 999), st.sampled_from([float, complex]))
def test_least_squares(size: int, seed: int, dtype: Any) -> None:
    """A complex vector's gradient is that of Re <v, w>."""
    rng = np.random.default_rng(seed)
    A = rng.standard_normal((size + 2, size)) + np.eye(size + 2, size)
    A = A + 1j * rng.standard_normal(A.shape) if dtype is complex else A
    b, X = rng.standard_normal(size + 2), line(size, dtype)
    fun = function(
        X,
        lambda x: np.linalg.norm(A @ x - b) ** 2 / 2,
        lambda x: (A.conj().T @ (A @ x - b)).astype(dtype),
    )
    found = lbfgs(fun, X.zeros(), rtol=1e-9)
    assert found.status in (0, 3)  # 3: at rounding errors
    wanted = np.linalg.lstsq(A, b.astype(dtype))[0]
    np.testing.assert_allclose(np.asarray(found.x), wanted, atol=1e-4 * np.linalg.cond(A))


def test_a_wall_is_not_crossed() -> None:
    """x - log x, infinite beyond zero, from a point whose first steps lead there."""
    X = line(2)

    def value(x: np.ndarray) -> float:
        return float((x - np.log(x)).sum()) if (x > 0).all() else math.inf

    def gradient(x: np.ndarray) -> np.ndarray:
        return 1 - 1 / x if (x > 0).all() else np.full(2, np.nan)

    found = lbfgs(function(X, value, gradient), X.vector(np.array([9.0, 0.01])), rtol=1e-9)
    np.testing.assert_allclose(np.asarray(found.x), np.ones(2), atol=1e-6)


def test_a_wrong_gradient_is_a_breakdown() -> None:
    X = line(3)
    found = lbfgs(lambda x: (x.norm() ** 2 / 2, -1 * x), X.random(0), maxls=7)
    assert (found.status, found.success, found.nit, found.nfev) == (3, False, 0, 8)
    assert "no lower value in 7 evaluations" in found.message


@given(st.floats(-3, 3), st.floats(0.01, 100), st.integers(0, 99))
def test_line_searches(shift: float, t: float, seed: int) -> None:
    """Both conditions hold at the result, for functions with several minima."""
    rng = np.random.default_rng(seed)
    a, w = rng.random(3), 1 + 3 * rng.random(3)

    def point(s: float) -> Point:
        x = s - shift
        value = x * x / 2 + float(a @ np.cos(w * x))
        return Point(s, value, x - float((a * w) @ np.sin(w * x)))

    start = point(0.0)
    if abs(start.slope) < 1e-6:
        return
    sign = -math.copysign(1, start.slope)

    def along(s: float) -> Any:
        at = point(sign * s)
        return Point(s, at.value, sign * at.slope)
        yield  # a generator that asks for nothing

    search_ = search(along, Point(0, start.value, sign * start.slope), t, 60)
    with pytest.raises(StopIteration) as end:
        next(search_)
    found, slope = end.value.value, sign * start.slope
    assert found.value <= start.value + DECREASE * found.t * slope + 1e-12
    assert abs(found.slope) <= CURVATURE * abs(slope)


# Gauss-Newton


def decay(seed: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Residual and Jacobian of a decaying exponential with noise."""
    rng = np.random.default_rng(seed)
    t = np.linspace(0, 3, 30)
    data = 2.5 * np.exp(-1.3 * t) + 0.5 + 0.05 * rng.standard_normal(30)

    def residual(a: np.ndarray) -> np.ndarray:
        return a[0] * np.exp(-a[1] * t) + a[2] - data

    def jacobian(a: np.ndarray) -> np.ndarray:
        e = np.exp(-a[1] * t)
        return np.stack([e, -a[0] * t * e, np.ones(30)], 1)

    return residual, jacobian


def operators(residual: Any, jacobian: Any, columns: int, rows: int) -> tuple[Any, Any, Space]:
    U, R = Space(Region("u", columns)), Space(Region("r", rows))

    def jac(v: Vector) -> Any:
        return linop.local_operators.matrix(jacobian(np.asarray(v)), U, R)

    return lambda v: R.vector(residual(np.asarray(v))), jac, U


@given(st.integers(0, 99), st.sampled_from([0.0, 1e-3, 1.0]))
def test_a_fit_is_scipy_s(seed: int, damp: float) -> None:
    both = decay(seed)
    fun, jac, U = operators(*both, 3, 30)
    found = gauss_newton(fun, jac, U.vector(np.array([1.0, 1.0, 0.0])), damp=damp)
    given = {"method": "lm", "xtol": 1e-14, "ftol": 1e-14, "gtol": 1e-14}
    theirs = scipy.optimize.least_squares(both[0], [1.0, 1.0, 0.0], both[1], **given)
    np.testing.assert_allclose(np.asarray(found.x), theirs.x, rtol=1e-5)
    assert found.cost == pytest.approx(theirs.cost, rel=1e-9)
    assert found.success
    assert found.nfev <= theirs.nfev + 12
    _, cost, count = found
    assert (cost, count) == (found.cost, found.nit)
    assert found.residuals == sorted(found.residuals, reverse=True)


@pytest.mark.parametrize("damp", [0.0, 1.0])
def test_rosenbrock_s_residuals(damp: float) -> None:
    fun, jac, U = operators(
        lambda a: np.array([10 * (a[1] - a[0] ** 2), 1 - a[0]]),
        lambda a: np.array([[-20 * a[0], 10.0], [-1.0, 0.0]]),
        2,
        2,
    )
    found = gauss_newton(fun, jac, U.vector(np.array([-1.2, 1.0])), damp=damp, rtol=1e-12)
    np.testing.assert_allclose(np.asarray(found.x), np.ones(2), atol=1e-7)


def test_a_linear_problem_takes_one_step() -> None:
    A = np.random.default_rng(3).standard_normal((7, 3)) + np.eye(7, 3)
    op = linop.local_operators.matrix(A)
    b = op.codomain.random(1)
    found = gauss_newton(lambda x: op(x) - b, op, op.domain.zeros())
    assert found.success and found.nit <= 2
    np.testing.assert_allclose(np.asarray(found.x), np.linalg.lstsq(A, np.asarray(b))[0], atol=1e-9)


def test_a_step_that_overflows_is_halved() -> None:
    """log x, from a point whose Gauss-Newton step is below zero."""
    with np.errstate(all="ignore"):
        fun, jac, U = operators(np.log, lambda a: np.diag(1 / a), 1, 1)
        for damp in (0.0, 0.1):
            found = gauss_newton(fun, jac, U.vector(np.array([5.0])), damp=damp)
            np.testing.assert_allclose(np.asarray(found.x), [1.0], atol=1e-6)
            assert found.nfev > found.nit + 1


def test_a_wrong_jacobian_is_a_breakdown() -> None:
    op = linop.local_operators.matrix(np.eye(3))
    found = gauss_newton(lambda x: x, -1 * op, op.domain.random(0))
    assert (found.status, found.nit) == (3, 0)
    assert "is not lower after any of 20 steps" in found.message


# Arguments

X3, X4 = line(3), line(4)


@pytest.mark.parametrize(
    ("kind", "words", "call"),
    [
        (ArgumentError, "fun is a function", lambda: lbfgs(3, X3.zeros())),  # type: ignore
        (ArgumentError, "x0 is a Vector, given list", lambda: lbfgs(lambda x: (0, x), [1.0])),
        (DTypeError, "floating dtype", lambda: lbfgs(lambda x: (0, x), line(3, int).zeros())),
        (
            ArgumentError,
            "maxcor is a whole number",
            lambda: lbfgs(lambda x: (0, x), X3.zeros(), maxcor=0),
        ),
        (
            ArgumentError,
            r"returns a real value and a gradient",
            lambda: lbfgs(lambda x: x, X3.zeros()),
        ),  # type: ignore
        (ArgumentError, "returns a real value", lambda: lbfgs(lambda x: (1j, x), X3.zeros())),  # type: ignore
        (
            ArgumentError,
            "is a Vector; given ndarray",
            lambda: lbfgs(lambda x: (1, np.ones(3)), X3.zeros()),
        ),  # type: ignore
        (
            SpaceError,
            "gradient: the spaces differ",
            lambda: lbfgs(lambda x: (1, X4.zeros()), X3.zeros()),
        ),
        (ArgumentError, r"fun\(x0\) is nan", lambda: lbfgs(lambda x: (math.nan, x), X3.zeros())),
        (
            ArgumentError,
            r"the gradient is not finite: nan at \[0\] of region 'x'",
            lambda: lbfgs(lambda x: (1.0, X3.vector(np.full(3, np.nan))), X3.zeros()),
        ),
        (ArgumentError, "fun and jac are functions", lambda: gauss_newton(3, 4, X3.zeros())),  # type: ignore
        (ArgumentError, "damp is a finite", lambda: gauss_newton(abs, abs, X3.zeros(), damp=-1)),
        (
            ArgumentError,
            "fun returns a Vector; given int",
            lambda: gauss_newton(lambda x: 3, abs, X3.zeros()),  # type: ignore
        ),
        (
            ArgumentError,
            r"jac\(x\) is an operator",
            lambda: gauss_newton(lambda x: x, lambda x: 3, X3.zeros()),
        ),
    ],
)
def test_refused(kind: type[LinopError], words: str, call: Callable[[], object]) -> None:
    with pytest.raises(kind, match=words):
        call()
