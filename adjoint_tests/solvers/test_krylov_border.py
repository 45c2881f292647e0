"""Krylov methods at the border: breakdowns, arguments that are none, numbers that are not finite,
callbacks, progress, results."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import linop
from linop import LinearOperator, Partition, Region, Space, TensorSpace
from linop.backends import Backend
from linop.errors import (
    ArgumentError,
    DTypeError,
    MissingExtraError,
    RegionError,
    ShapeError,
    SpaceError,
)
from support.contracts.plans import raised
from support.contracts.solvers import hermitian

solvers = linop.solvers
SYSTEMS = ("cg", "minres", "gmres", "bicgstab")
LEAST_SQUARES = ("lsqr", "lsmr")
each_method = pytest.mark.parametrize("name", SYSTEMS + LEAST_SQUARES)
each_system = pytest.mark.parametrize("name", SYSTEMS)


def matrix(values: Any) -> LinearOperator:
    return linop.local_operators.matrix(np.asarray(values, float))


def solver(name: str) -> Any:
    return getattr(solvers, name)


# Breakdowns

small = st.integers(-3, 3)


@given(st.data(), st.integers(1, 5), st.sampled_from(["float64", "complex128", "float32"]))
def test_small_whole_numbers(data: st.DataObject, size: int, dtype: str) -> None:
    """Singular, indefinite and nilpotent matrices, zeros and exact guesses: x is finite, and a
    success is one: the system, or the least-squares problem, is solved."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    array = rng.integers(-2, 3, (size, size)).astype(dtype)
    if np.dtype(dtype).kind == "c":
        array = array + 1j * rng.integers(-2, 3, (size, size))
    symmetric = array + array.conj().T
    b, x0 = (rng.integers(-2, 3, size).astype(dtype) for _ in range(2))
    if data.draw(st.booleans()):
        b = symmetric @ x0
    guess = data.draw(st.sampled_from([None, x0]))
    rtol = 1e-4 if dtype == "float32" else 1e-8
    op = linop.local_operators.matrix(symmetric.astype(dtype))
    for name in SYSTEMS + LEAST_SQUARES:
        names = {"rtol": rtol} if name in SYSTEMS else {"atol": rtol, "btol": rtol, "conlim": 0}
        found = solver(name)(op, b, x0=guess, **names)
        x = op.domain.flatten(found.x)
        assert np.isfinite(x).all() and np.isfinite(found.residuals).all(), name
        assert found.message.startswith(f"{name}: ")
        residual = b - symmetric @ x
        scale = 100 * rtol * (np.linalg.norm(b) + np.linalg.norm(symmetric) * np.linalg.norm(x))
        least = name in LEAST_SQUARES or "least-squares" in found.message
        if found.success and least:
            residual = symmetric.conj().T @ residual
            scale *= 1 + np.linalg.norm(symmetric)
        assert not found.success or np.linalg.norm(residual) <= scale + 1e-6, found.message


@each_method
def test_zero_right_hand_side(name: str) -> None:
    op = matrix([[2.0, 1.0], [1.0, 3.0]])
    found = solver(name)(op, op.codomain.zeros())
    assert (found.success, found.nit) == (True, 0)
    assert not np.asarray(found.x).any()
    assert "converged" in found.message
    if name in SYSTEMS:  # whatever the guess
        assert not np.asarray(solver(name)(op, op.codomain.zeros(), [1.0, 2.0]).x).any()


@each_method
def test_an_exact_guess(name: str) -> None:
    op = matrix([[2.0, 1.0], [1.0, 3.0]])
    found = solver(name)(op, [4.0, 7.0], x0=[1.0, 2.0])
    assert (found.success, found.nit, np.asarray(found.x).tolist()) == (True, 0, [1, 2])


@pytest.mark.parametrize("pipelined", [False, True])
def test_cg_says_what_is_wrong(pipelined: bool) -> None:
    def said(values: Any, b: Any, **options: Any) -> str:
        found = solvers.cg(matrix(values), b, pipelined=pipelined, **options)
        assert (found.success, found.status, found[1]) == (False, 3, -1)
        return str(found.message)

    words = said(np.diag([1.0, -2.0]), [1.0, 1.0])
    assert "iteration 1: A is not positive definite: <p, A p> = -1; take minres, gmres" in words
    assert "<p, A p> = 0" in said(np.zeros((2, 2)), [1.0, 1.0])
    words = said(np.eye(2), [1.0, 1.0], M=matrix(-np.eye(2)))
    assert "M is not positive definite: <r, M r> = -2" in words
    skew = linop.local_operators.matrix(np.array([[1, 1j], [1j, 1]]))
    found = solvers.cg(skew, [1.0, 1.0], pipelined=pipelined)
    assert "A is not Hermitian" in found.message


def test_others_say_what_is_wrong() -> None:
    found = solvers.minres(matrix(np.zeros((2, 2))), [1.0, 1.0])
    assert found.success and "converged to a least-squares solution: ‖A r‖/(‖A‖ ‖r‖) = 0" in (
        found.message
    )
    found = solvers.minres(matrix(np.eye(2)), [1.0, 1.0], M=matrix(-np.eye(2)))
    assert "M is not positive definite" in found.message
    found = solvers.gmres(matrix([[0.0, 1.0], [0.0, 0.0]]), [1.0, 1.0])
    assert not found.success and "A is singular" in found.message
    found = solvers.bicgstab(matrix([[0.0, 1.0], [-1.0, 0.0]]), [1.0, 0.0])
    assert (found[1], found.status) == (-11, 3)
    assert "A p, p the direction, is zero or orthogonal to the first residual" in found.message
    found = solvers.lsqr(matrix(np.diag([1.0, 1e-12])), [1.0, 1.0], atol=0, btol=0, conlim=1e4)
    assert (found.success, found[1]) == (False, 3)
    assert "above conlim" in found.message
    found = solvers.cg(matrix(np.diag([1.0, 2.0, 3.0])), np.ones(3), maxiter=1)
    assert (found.status, found[1]) == (1, 1)
    assert "cg: 1 iterations done, the most allowed; residual" in found.message
    assert solvers.lsqr(matrix(np.eye(2)), [1.0, 1.0], iter_lim=0)[1] == 7


def test_eigenvalues_of_unusual_operators() -> None:
    X = Space(Region("x", 4))
    assert solvers.lanczos(linop.identity(X), 3).eigenvalues.tolist() == pytest.approx([1] * 3)
    assert solvers.lanczos(0 * linop.identity(X), 4)[0].tolist() == [0] * 4
    assert solvers.power(0 * linop.identity(X)).eigenvalue == 0
    assert "k is at most 4" in raised(ArgumentError, lambda: solvers.lanczos(linop.identity(X), 5))
    words = raised(ArgumentError, lambda: solvers.power(linop.identity(X), np.zeros(4)))
    assert words == "power: the first vector x0 is zero"
    words = raised(ArgumentError, lambda: solvers.lanczos(linop.identity(X), which="XX"))
    assert "which is one of LM, SM, LA, SA; given 'XX'" in words
    found = solvers.lanczos(linop.identity(X), 2, maxiter=1)
    assert (found.success, found.status, len(found.eigenvalues)) == (False, 1, 1)
    words = raised(ArgumentError, lambda: solvers.power(lambda v: v))
    assert "a function of vectors needs x0, the first vector" in words


# Arguments


@each_method
def test_arguments_are_checked(name: str) -> None:
    op, solve = matrix(np.eye(3)), solver(name)
    for wrong in (None, np.eye(3)):
        words = raised(ArgumentError, lambda wrong=wrong: solve(wrong, np.ones(3)))
        assert words.startswith(f"{name}: A is an operator or a plan")
    assert "given int as b" in raised(ArgumentError, lambda: solve(op, 3))
    assert "b has 2 elements, shape (2,); A.codomain has 3" in raised(
        ShapeError, lambda: solve(op, [1.0, 2.0])
    )
    assert "x0 has 2 elements" in raised(ShapeError, lambda: solve(op, np.ones(3), x0=[1.0, 2.0]))
    with pytest.raises(SpaceError, match=f"{name}, b: the spaces differ"):
        solve(op, Space(Region("z", 3)).zeros())
    with pytest.raises(DTypeError):
        solve(op, np.ones(3) * 1j)
    words = raised(ArgumentError, lambda: solve(op, np.ones(3), color="red"))
    assert f"{name}: unknown keyword argument 'color'" in words
    assert "checkpoint, every, resume, show" in words
    words = raised(ArgumentError, lambda: solve(op, np.ones(3), callback=3))
    assert words == f"{name}: callback is a function of a Vector; given 3"
    words = raised(ArgumentError, lambda: solve(op, np.ones(3), show="loud"))
    assert "show is True, False or 'bar'; given 'loud'" in words
    limit = "iter_lim" if name == "lsqr" else "maxiter"
    words = raised(ArgumentError, lambda: solve(op, np.ones(3), **{limit: -1}))
    assert "maxiter is a whole number from 0; given -1" in words
    first = "rtol" if name in SYSTEMS else "atol"
    words = raised(ArgumentError, lambda: solve(op, np.ones(3), **{first: -1}))
    assert words == f"{name}: {first} is a finite real number from 0; given -1"
    whole = linop.identity(Space(Region("x", 3), "int64"))
    with pytest.raises(DTypeError, match="a floating dtype is expected; given int64"):
        solve(whole, whole.codomain.zeros())


@each_system
def test_square_operators_are_wanted(name: str) -> None:
    with pytest.raises(SpaceError, match=f"{name} needs an operator of a space to itself"):
        solver(name)(matrix(np.ones((3, 2))), np.ones(3))
    with pytest.raises(ShapeError, match=f"{name}: x0 is a vector or a list of 2"):
        op = matrix(np.eye(3))
        solver(name)(op, [op.codomain.zeros()] * 2, [op.domain.zeros()])
    with pytest.raises(ArgumentError, match=f"{name}: M returns a Vector; given int"):
        solver(name)(matrix(np.eye(3)), np.ones(3), M=lambda v: 3)


def test_arrays_are_in_the_global_order() -> None:
    """Of one process: flat or shaped, lists too; in C order of the tensor."""
    X = TensorSpace((4, 6), Partition((2, 2)))
    b = np.arange(24.0).reshape(4, 6)
    for given_ in (b, b.ravel(), b.tolist(), b.astype(np.float32)):
        found = solvers.cg(2 * linop.identity(X), given_).x
        np.testing.assert_array_equal(X.gather(found), b / 2)


def test_vectors_of_one_process_on_workers() -> None:
    op = hermitian(12, 2, "float64", 1.0)

    def main(backend: Backend) -> None:
        plan, b = op.compile(backend), op.codomain.random(1)
        words = raised(SpaceError, lambda: solvers.cg(plan, b))
        assert "cg: b is a vector of one process, A the plan of one worker of several" in words
        words = raised(ShapeError, lambda: solvers.lsqr(plan, np.ones(12)))
        assert "lsqr, b: array of region" in words and "shape (12,) given, (6,) expected" in words
        assert solvers.power(plan, maxiter=3).nit == 3

    linop.launch(main, 2)


def test_workers_give_what_their_plan_takes() -> None:
    """An array, a list, arrays by region name, or None where the worker holds no region: x is that
    of the backend's vectors, with their bits."""
    X = TensorSpace((6,), Partition((2,)))

    def main(backend: Backend) -> None:
        worker = backend.worker or 0
        plan = (-linop.laplacian(X)).compile(backend)
        b = np.arange(6.0)[X.slices(worker)] if worker < 2 else None
        made = backend.vector(X, b)
        wanted = solvers.cg(plan, made, made).x
        for k in range(4):
            forms = (
                [b, b.tolist(), b.astype(np.float32), {f"x@{worker}": b}] if b is not None else []
            )
            form = forms[k] if forms else None
            found = solvers.cg(plan, form, {} if form is None else form).x
            for name, array in found.arrays.items():
                assert array.tobytes() == wanted[name].tobytes()

    linop.launch(main, 3)


def test_arrays_by_region_of_one_process() -> None:
    X = TensorSpace((4,), (2,))
    b = {"x@0": np.array([2.0, 4.0]), "x@1": np.array([6.0, 8.0])}
    np.testing.assert_array_equal(X.gather(solvers.cg(2 * linop.identity(X), b).x), [1, 2, 3, 4])
    for given_ in ({"y": np.ones(2)}, {"x@0": np.ones(3), "x@1": np.ones(2)}):
        with pytest.raises((RegionError, ShapeError), match="cg, b: "):
            solvers.cg(2 * linop.identity(X), given_)


@each_method
def test_what_is_not_finite_is_named(name: str) -> None:
    op, solve = matrix(np.eye(3)), solver(name)
    words = raised(ArgumentError, lambda: solve(op, [1.0, np.nan, 1.0]))
    assert f"{name}: the right-hand side b is not finite: nan at [1] of region 'x'" in words
    words = raised(ArgumentError, lambda: solve(op, np.ones(3), x0=[np.inf, 0.0, 0.0]))
    assert f"{name}: the initial guess x0 is not finite: inf at [0]" in words
    X, calls = Space(Region("x", 3)), []

    def late(x: np.ndarray) -> np.ndarray:
        calls.append(x)
        return x * [1, 2, 3] if len(calls) < 3 else np.array([1, np.nan, 1])

    bad = linop.local(X, X, late, lambda y: y * [1, 2, 3])
    words = raised(ArgumentError, lambda: solve(bad, [1.0, 2.0, 4.0]))
    assert f"{name}, iteration " in words
    assert "nan at [1] of region 'x' (1 of 3 elements are not finite)" in words


# Callbacks and progress


@pytest.mark.parametrize("name", (*SYSTEMS, *LEAST_SQUARES, "cgls"))
@pytest.mark.parametrize("how", ["return", "raise"])
@pytest.mark.parametrize("at", [1, 2])
def test_callbacks_stop(name: str, how: str, at: int) -> None:
    op, seen = hermitian(12, 1, "float64", 1.0), []

    def ask(x: Any) -> bool:
        seen.append(x)
        if how == "raise" and len(seen) == at:
            raise StopIteration
        return len(seen) == at

    options = {"restart": 2, "maxiter": 9} if name == "gmres" else {}
    found = solver(name)(op, op.codomain.random(1), callback=ask, **options)
    steps = 2 * at if name == "gmres" else at  # a call a cycle
    assert (found.status, found.nit, len(seen)) == (2, steps, at)
    assert found.x.equals(seen[-1])
    assert len(found.residuals) == steps + 1
    assert "the callback asked to stop; residual" in found.message


def test_gmres_tells_norms() -> None:
    op, seen = hermitian(12, 1, "float64", 1.0), []
    b = op.codomain.random(1)
    found = solvers.gmres(op, b, restart=3, callback=seen.append, callback_type="pr_norm")
    np.testing.assert_allclose(seen, np.array(found.residuals[1:]) / b.norm(), rtol=1e-6)

    def enough(norm: float) -> bool:
        return norm < 0.5

    stopped = solvers.gmres(op, b, callback=enough, callback_type="pr_norm")
    assert stopped.status == 2
    assert (op(stopped.x) - b).norm() == pytest.approx(stopped.residuals[-1])
    with pytest.raises(ArgumentError, match="callback_type is 'x' or 'pr_norm'"):
        solvers.gmres(op, b, callback_type="legacy")


def test_one_of_several_right_hand_sides_stops() -> None:
    op = hermitian(12, 1, "float64", 1.0)
    calls = []

    def first(x: Any) -> bool:
        calls.append(x)
        return len(calls) == 1

    one, other = solvers.cg(op, [op.codomain.random(k) for k in (1, 2)], callback=first)
    assert (one.status, one.nit, other.status) == (2, 1, 0)


def test_progress(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    op = hermitian(12, 2, "float64", 1.0)
    b = op.codomain.random(1)

    def main(backend: Backend) -> None:
        solvers.cg(op.compile(backend), backend.vector(op.codomain, b), maxiter=2, show=True)

    linop.launch(main, 2)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[:3] for line in lines] == [["cg", str(k), "residual"] for k in (1, 2)]
    pytest.importorskip("tqdm")
    solvers.lsqr(op, b, show="bar")
    assert "lsqr: " in capsys.readouterr().err
    monkeypatch.setattr("linop.solvers.iteration.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'linop-algebra\[progress\]'"):
        solvers.lsqr(op, b, show="bar")


# Results


def test_results_are_tuples_with_names() -> None:
    op = hermitian(12, 1, "float64", 1.0)
    x, info = found = solvers.cg(op, op.codomain.random(1))
    assert info == 0 and x is found.x and len(found) == 2
    text = repr(found)
    assert "   success: True\n" in text and "reductions: " in text
    again = pickle.loads(pickle.dumps(found))
    assert (again.message, again.residuals) == (found.message, found.residuals)
    assert again[0].equals(x)
    assert len(solvers.lsqr(op, op.codomain.random(1))) == 10
    assert len(solvers.lsmr(op, op.codomain.random(1))) == 8
    assert len(solvers.cgls(op, op.codomain.random(1))) == 6


@given(st.integers(0, 99))
def test_minres_does_not_claim_a_system_that_is_not_hermitian(seed: int) -> None:
    rng = np.random.default_rng(seed)
    M, b = rng.standard_normal((10, 10)), rng.standard_normal(10)
    found = solvers.minres(matrix(M), b, rtol=1e-3, maxiter=400)
    assert not found.success
    if found.status == 3:
        assert "A is not Hermitian" in found.message


def test_a_checkpoint_is_of_its_operator(tmp_path: Path) -> None:
    rng, file = np.random.default_rng(0), tmp_path / "state"
    a, b = rng.standard_normal((8, 8)), rng.standard_normal(8)
    spd = a @ a.T + np.eye(8)
    for solve in (solvers.cg, solvers.minres, solvers.lsqr, solvers.lsmr, solvers.gmres):
        solve(matrix(spd), b, maxiter=3, checkpoint=file)
        assert solve(matrix(spd), b, resume=file).nit > 3
        with pytest.raises(ArgumentError, match="no checkpoint of this problem"):
            solve(matrix(2 * spd + np.eye(8)), b, resume=file)


def test_maxiter_is_a_name_of_every_limit() -> None:
    A, b = matrix(np.diag([1.0, 2, 3, 4, 5])), np.ones(5)
    for solve in (solvers.lsqr, solvers.lsmr, solvers.cg, solvers.cgls):
        given_b = A.codomain.vector(b) if solve is solvers.cgls else b
        assert solve(A, given_b, maxiter=2).nit == 2
    with pytest.raises(ArgumentError, match="maxiter"):
        solvers.cgls(A, A.codomain.vector(b), maxiter=-1)


def test_the_units_of_an_operator_are_no_condition() -> None:
    A = np.diag([1.0, 2, 3, 4])
    for scale in (1e-30, 1e30, 1e-150):
        found = solvers.lsmr(matrix(scale * A), np.ones(4))
        assert "condition" not in found.message
        assert np.allclose(scale * A @ found.x["x"], 1, atol=1e-3)
