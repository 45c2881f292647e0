"""Success is compared with the residual of x: guesses that are far off, systems that rounding does
not let be solved, operators that are not Hermitian, checkpoints before the comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import linop
from linop import LinearOperator, Region, Space
from linop.errors import ArgumentError
from linop.solvers import prox
from linop.solvers.result import ACCURACY
from support.contracts.plans import raised

solvers = linop.solvers
SIZE = 24
FEW = settings(max_examples=25)
SQUARE = ("cg", "minres", "gmres", "bicgstab")
EVERY = (*SQUARE, "cgls", "lsqr", "lsmr")
LIMITS = {"cgls": {"tol": 1e-10, "niter": 500}, "lsqr": {"iter_lim": 500}, "lsmr": {"maxiter": 500}}
each_method = pytest.mark.parametrize("name", EVERY)


def definite(rng: np.random.Generator, condition: float) -> np.ndarray:
    """A symmetric matrix with eigenvalues from 1/condition to 1."""
    q = np.linalg.qr(rng.normal(size=(SIZE, SIZE)))[0]
    return (q * np.geomspace(1 / condition, 1, SIZE)) @ q.T


def solved(name: str, array: np.ndarray, b: np.ndarray, **given: Any) -> tuple[Any, np.ndarray]:
    """The result of a method, and its x as an array."""
    op = linop.local_operators.matrix(array)
    found = getattr(solvers, name)(op, b, **{**LIMITS.get(name, {}), **given})
    return found, op.domain.flatten(found.x)


def assert_true(name: str, found: Any, array: np.ndarray, x: np.ndarray, b: np.ndarray) -> None:
    """A success is one, by the methods' default tolerances; and the last residual is that of x."""
    r = b - array @ x
    norm, size = np.linalg.norm(r), np.linalg.norm(array) * np.linalg.norm(x)
    gradient, rhs = np.linalg.norm(array.T @ r), np.linalg.norm(b)
    loosest = norm <= 2e-5 * (rhs + size) or gradient <= 2e-5 * np.linalg.norm(array) * norm
    loosest |= name == "cgls" and gradient <= 2e-5 * np.linalg.norm(array.T @ b)
    if name in ("cg", "gmres", "bicgstab"):
        loosest = norm <= 1.01e-5 * rhs
    assert loosest or not found.success
    if found.success:
        assert found.residuals[-1] == pytest.approx(norm, rel=1e-3, abs=1e-12 * (rhs + size))


@each_method
@FEW
@given(st.integers(0, 999), st.integers(0, 20))
def test_guesses_that_are_far_off(name: str, seed: int, power: int) -> None:
    """The recurrence loses what is left of 10^20 to rounding, and begins again."""
    rng = np.random.default_rng(seed)
    array, b, x0 = definite(rng, 10.0), rng.normal(size=SIZE), rng.normal(size=SIZE)
    found, x = solved(name, array, b, x0=10.0**power * x0)
    assert_true(name, found, array, x, b)
    assert found.success


@each_method
@FEW
@given(st.integers(0, 999), st.sampled_from([1e3, 1e8, 1e13]), st.booleans())
def test_success_is_true(name: str, seed: int, condition: float, symmetric: bool) -> None:
    """Of ill-conditioned systems, and of matrices that are not symmetric."""
    rng = np.random.default_rng(seed)
    array, b = definite(rng, condition), rng.normal(size=SIZE)
    if not symmetric:
        array = array @ np.linalg.qr(rng.normal(size=(SIZE, SIZE)))[0]
    found, x = solved(name, array, b, **({"maxiter": 5} if name == "gmres" else {}))
    assert_true(name, found, array, x, b)


@FEW
@given(st.integers(0, 999))
def test_attainable_accuracy_has_a_status(seed: int) -> None:
    rng = np.random.default_rng(seed)
    array, b = definite(rng, 100.0), rng.normal(size=SIZE)
    found, x = solved("cg", array, b, rtol=1e-17)
    assert (found.success, found.status, found[1]) == (False, ACCURACY, -1)
    assert "cg: attainable accuracy reached" in found.message
    assert np.linalg.norm(b - array @ x) <= 1e-12 * np.linalg.norm(b)


@pytest.mark.parametrize("name", ["lsqr", "lsmr"])
def test_damped_problems_are_those_around_the_guess(name: str) -> None:
    """They cannot begin again from another x, and are compared as they are."""
    rng = np.random.default_rng(1)
    array, b, x0 = definite(rng, 10.0), rng.normal(size=SIZE), 1e6 * rng.normal(size=SIZE)
    found, x = solved(name, array, b, x0=x0, damp=0.5)
    wanted = np.linalg.solve(array.T @ array + 0.25 * np.eye(SIZE), array.T @ b + 0.25 * x0)
    assert found.success
    np.testing.assert_allclose(x, wanted, rtol=0, atol=1e-4 * np.linalg.norm(x0))


@pytest.mark.parametrize("name", ["cg", "minres"])
def test_one_reduction_more_at_the_end(name: str) -> None:
    rng = np.random.default_rng(3)
    array, b = definite(rng, 10.0), rng.normal(size=SIZE)
    found, _ = solved(name, array, b)
    assert found.success and found.reductions == 1 + 1 + 2 * found.nit + 1


def test_several_right_hand_sides_begin_again_by_themselves() -> None:
    rng = np.random.default_rng(5)
    op = linop.local_operators.matrix(definite(rng, 10.0))
    sides = [op.codomain.random(k) for k in range(3)]
    far = [0 * sides[0], 1e18 * sides[1], sides[2]]
    together = solvers.cg(op, sides, x0=far)
    for b, x0, one in zip(sides, far, together, strict=True):
        alone = solvers.cg(op, b, x0=x0)
        assert one.success and one.x.equals(alone.x) and one.residuals == alone.residuals


@pytest.mark.parametrize("at", range(1, 60, 7))
def test_a_checkpoint_of_what_begins_again(at: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    op = linop.local_operators.matrix(definite(rng, 10.0))
    given: Any = {"b": op.codomain.random(1), "x0": 1e16 * op.domain.random(2)}
    whole = solvers.cg(op, **given)
    file = tmp_path / "state"
    solvers.cg(op, **given, maxiter=at, checkpoint=file, every=1)
    again = solvers.cg(op, **given, resume=file)
    assert again.success and again.x.equals(whole.x) and again.residuals == whole.residuals


def test_a_callback_sees_each_iteration_once() -> None:
    rng = np.random.default_rng(7)
    op = linop.local_operators.matrix(definite(rng, 10.0))
    for solve in (solvers.cg, solvers.lsqr):
        seen: list[Any] = []
        b, x0 = op.codomain.random(1), 1e16 * op.domain.random(2)
        found = solve(op, b, x0=x0, callback=seen.append, maxiter=500)
        assert found.success and len(seen) <= found.nit


# Operators that are not what a method assumes


def operator(array: Any) -> LinearOperator:
    return linop.local_operators.matrix(np.asarray(array))


@given(st.integers(2, 12), st.integers(0, 999), st.booleans())
def test_lanczos_takes_hermitian_operators(size: int, seed: int, is_complex: bool) -> None:
    rng = np.random.default_rng(seed)
    array = rng.normal(size=(size, size)) + (1j * rng.normal(size=(size, size)) * is_complex)
    array = array if is_complex else array.real
    words = raised(ArgumentError, lambda: solvers.lanczos(operator(array), 1))
    assert "lanczos: A is not Hermitian" in words and "<A x, y> = " in words
    assert solvers.lanczos(operator(array + array.conj().T), 1).success
    assert solvers.lanczos(operator(array), 1, singular=True).success


def test_lanczos_wants_the_adjoint_for_singular_values() -> None:
    X = Space(Region("x", 4))
    wrong = linop.local(X, X, lambda x: 2 * x, lambda y: 3 * y)
    words = raised(ArgumentError, lambda: solvers.lanczos(wrong, 1, singular=True))
    assert "A.H is not the adjoint of A" in words


@pytest.mark.parametrize("seed", range(5))
def test_minres_says_that_an_operator_is_not_hermitian(seed: int) -> None:
    """The place where it would have claimed success."""
    rng = np.random.default_rng(seed)
    found, _ = solved(
        "minres", np.eye(SIZE) + 0.1 * rng.normal(size=(SIZE, SIZE)), rng.normal(size=SIZE)
    )
    assert not found.success
    assert found.status != 3 or "A is not Hermitian" in found.message


# Numbers that are not finite


def broken(v: Any, step: float) -> Any:
    del step
    return v * np.nan


def test_a_proximal_map_that_is_not_finite_is_named() -> None:
    op = operator(np.eye(3) / 2)
    b = op.codomain.random(1)
    bad = prox.user(broken)
    for call, words in (
        (lambda: solvers.fista(op, b, bad), f"fista, iteration 1: the result of {bad}.prox is not"),
        (lambda: solvers.ista(op, b, bad), f"ista, iteration 1: the result of {bad}.prox is not"),
        (lambda: solvers.primal_dual(op, prox.l1(), bad, b), f"1: the result of {bad}.prox is not"),
        (lambda: solvers.primal_dual(op, bad, None, b), f"1: the result of {bad}*.prox is not"),
        (lambda: solvers.admm(prox.l1(), bad, b), f"1: the result of {bad}.prox is not"),
        (lambda: solvers.admm(bad, prox.l1(), b), f"1: the minimizer x, of {bad}, is not"),
    ):
        assert words in raised(ArgumentError, call)
