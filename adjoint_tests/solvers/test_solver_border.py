"""`cgls` at the border: data of any size and units, arguments that are none, numbers that are not
finite, callbacks that stop it, and vectors of one process on workers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import linop
from linop import LinearOperator, Region, Space, Vector
from linop.errors import ArgumentError, DTypeError, SpaceError
from support.contracts import vectors
from support.contracts.plans import raised
from support.requirements import needs_mpi
from support.workers import on_ranks, on_threads

cgls = linop.solvers.cgls


def tall(dtype: Any = np.float64) -> LinearOperator:
    """Six equations for three unknowns; its condition number is below 3."""
    rng = np.random.default_rng(1)
    values = rng.standard_normal((6, 3)) / 4 + 2 * np.eye(6, 3)
    if np.dtype(dtype).kind == "c":
        values = values + 0.5j * rng.standard_normal((6, 3))
    return linop.local_operators.matrix(values.astype(dtype))


# The units of the data and of the operator


@given(
    st.sampled_from(["float64", "float32", "complex128", "complex64", "longdouble"]),
    st.integers(-900, 900),
    st.sampled_from([0.0, 0.5]),
    st.booleans(),
)
def test_iterations_do_not_depend_on_units(name: str, power: int, damp: float, guess: bool) -> None:
    """Data times a power of two give the solution times it, in the same steps."""
    op = tall(name)
    power = power if name not in ("float32", "complex64") else power // 9
    y, x0 = op.codomain.random(0), op.domain.random(1) if guess else None
    x, *said = cgls(op, y, x0, damp=damp, tol=1e-5)
    far = None if x0 is None else moved(x0, power)
    found, *told = cgls(op, moved(y, power), far, damp=damp, tol=1e-5)
    assert told[:2] == said[:2]
    assert said[0] == 1
    assert told[2] == pytest.approx(vectors.scaled(power, said[2]), rel=1e-5)
    np.testing.assert_allclose(
        np.asarray(moved(found, -power)), np.asarray(x), rtol=0, atol=1e-5 * x.norm()
    )


def moved(v: Vector, power: int) -> Vector:
    """The vector times a power of two that its dtype may not hold."""
    half = np.ldexp(np.ones((), v.space.dtype).real, power // 2)
    rest = np.ldexp(np.ones((), v.space.dtype).real, power - power // 2)
    return v.space.vector(np.asarray(v) * half * rest)


@given(st.integers(-700, 700), st.sampled_from([0.0, 0.5]))
def test_iterations_do_not_depend_on_the_operator_s_units(power: int, damp: float) -> None:
    op, factor = tall(), 2.0**power
    y = op.codomain.random(0)
    x, *said = cgls(op, y, damp=damp, tol=1e-12, niter=20)
    found, *told = cgls(factor * op, y, damp=factor * damp, tol=1e-12, niter=20)
    assert told[:2] == said[:2]
    np.testing.assert_allclose(np.asarray(factor * found), np.asarray(x), rtol=1e-9)


@pytest.mark.parametrize("scale", [1e-4, 1e-25, 1e-160, 1e-300])
def test_small_data_are_solved(scale: float) -> None:
    op = tall()
    truth = op.domain.random(3)
    x, istop, iterations, *_ = cgls(op, scale * op(truth), tol=1e-20)
    assert (istop, iterations > 0) == (1, True)
    assert (x - scale * truth).norm() <= 1e-8 * scale * truth.norm()


def test_a_guess_that_solves_it_is_enough() -> None:
    op = tall()
    truth = op.domain.integers(3)
    assert cgls(op, op(truth), truth)[1:3] == (1, 0)
    assert cgls(op, op.codomain.zeros(), truth, tol=1e-20)[1] == 1


# Arguments


@pytest.mark.parametrize("damp", [1j, 1 + 0j, np.complex64(1), np.nan, np.inf, "1", None])
def test_damp_is_a_finite_real_number(damp: Any) -> None:
    op = tall()
    words = raised(ArgumentError, lambda: cgls(op, op.codomain.random(0), damp=damp))
    assert words == f"cgls: damp is a finite real number; given {damp!r}"


def test_other_arguments() -> None:
    op = tall()
    y = op.codomain.random(0)
    for tol in (-1, np.nan, 1j):
        words = raised(ArgumentError, lambda tol=tol: cgls(op, y, tol=tol))
        assert words == f"cgls: tol is a finite real number from 0; given {tol!r}"
    assert "niter" in raised(ArgumentError, lambda: cgls(op, y, niter=2.5))
    assert "niter is a whole number from 0" in raised(ArgumentError, lambda: cgls(op, y, niter=-1))
    assert "callback is a function" in raised(ArgumentError, lambda: cgls(op, y, callback=3))
    assert "damp=1e+200 is so much larger than Op" in raised(
        ArgumentError, lambda: cgls(op, y, damp=1e200)
    )
    for none in (None, np.eye(3)):
        words = raised(ArgumentError, lambda none=none: cgls(none, y))
        assert "Op is an operator or a plan, with an adjoint Op.H; given" in words
    assert "damp is a finite real number; given 1000" in raised(
        ArgumentError, lambda: cgls(op, y, damp=10**400)
    )
    assert "given int as x0" in raised(ArgumentError, lambda: cgls(op, y, 3))
    assert cgls(op, y, damp=np.float32(0.5))[0].equals(cgls(op, y, damp=-0.5)[0])


@pytest.mark.parametrize("name", vectors.INTEGERS)
def test_integers_are_refused(name: str) -> None:
    space = Space(Region("x", 3), name)
    words = raised(DTypeError, lambda: cgls(linop.identity(space), space.integers(0)))
    assert f"a floating dtype is expected; given {name}" in words


# What is not finite


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_data_that_are_not_finite(value: float) -> None:
    op = tall()
    y, x0 = op.codomain.random(0), op.domain.random(0)
    y["y"][2] = value
    words = raised(ArgumentError, lambda: cgls(op, y))
    assert f"the data y is not finite: {value} at [2] of region 'y' (1 of 6 elements" in words
    x0["x"][1:] = value
    words = raised(ArgumentError, lambda: cgls(op, op.codomain.random(0), x0))
    assert f"the initial guess x0 is not finite: {value} at [1] of region 'x' (2 of 3" in words


def test_operators_that_are_not_finite() -> None:
    S = Space(Region("x", 3))
    calls = []

    def late(x: np.ndarray) -> np.ndarray:
        calls.append(x)
        return x / 3 if len(calls) < 3 else np.array([1, np.nan, 1])

    op = linop.local(S, S, late, lambda y: y * [1, 2, 3] / 3)
    words = raised(ArgumentError, lambda: cgls(op, S.vector([1.0, 2.0, 4.0]), tol=0))
    assert "iteration 3: the product Op c with the search direction c is not finite: " in words
    assert "nan at [1] of region 'x' (1 of 3" in words
    op = linop.local(S, S, lambda x: x, lambda y: y * np.inf)
    words = raised(ArgumentError, lambda: cgls(op, S.vector([1.0, 2.0, 4.0])))
    assert "Op* y is not finite: inf at [0] of region 'x' (3 of 3" in words


def test_an_adjoint_that_is_none() -> None:
    S = Space(Region("x", 3))
    op = linop.local(S, S, lambda x: 0 * x, lambda y: y)
    words = raised(ArgumentError, lambda: cgls(op, S.vector([1.0, 2.0, 4.0])))
    assert "to zero; Op.H is not the adjoint of Op (see linop.testing.check_adjoint)" in words


# Callbacks


@pytest.mark.parametrize("how", ["return", "raise"])
@pytest.mark.parametrize("at", [1, 2])
def test_a_callback_stops_it(how: str, at: int) -> None:
    op, seen = tall(), []

    def ask(x: Vector) -> bool:
        seen.append(x)
        if how == "raise" and len(seen) == at:
            raise StopIteration
        return len(seen) == at

    y = op.codomain.random(0)
    x, istop, iterations, *_, cost = cgls(op, y, tol=0, callback=ask)
    assert (istop, iterations, len(seen), len(cost)) == (3, at, at, at + 1)
    assert x.equals(seen[-1])
    assert x.equals(cgls(op, y, tol=0, niter=at)[0])


@pytest.mark.parametrize("answer", [None, False, 0, "x", np.ones(3)])
def test_other_answers_do_not_stop_it(answer: Any) -> None:
    op = tall()

    def says(x: Vector) -> Any:
        return x if isinstance(answer, str) else answer

    assert cgls(op, op.codomain.random(0), tol=0, niter=4, callback=says)[1:3] == (2, 4)


def test_what_a_callback_does_to_x_is_its_own() -> None:
    op = tall()
    y = op.codomain.random(0)

    def clears(x: Vector) -> None:
        x["x"][:] = 0

    assert cgls(op, y, callback=clears)[0].equals(cgls(op, y)[0])


@given(st.integers(1, 4), st.data(), st.sampled_from(["return", "raise"]))
def test_one_worker_stops_all_on_threads(workers: int, data: st.DataObject, how: str) -> None:
    stopper, at = data.draw(st.integers(0, workers - 1)), data.draw(st.integers(1, 3))
    on_threads(workers, vectors.one_worker_stops_all, 8, stopper, at, how)


@needs_mpi
@given(st.integers(1, 3), st.data())
def test_one_worker_stops_all_on_ranks(ranks: int, data: st.DataObject) -> None:
    stopper, at = data.draw(st.integers(0, ranks - 1)), data.draw(st.integers(1, 3))
    on_ranks(ranks, vectors.one_worker_stops_all, 8, stopper, at, "return")


# Workers


@given(st.integers(1, 4), st.integers(0, 6), st.sampled_from([np.nan, np.inf]))
def test_not_finite_on_threads(workers: int, where: int, value: float) -> None:
    on_threads(workers, vectors.says_where_it_is_not_finite, 7, where, value)


@needs_mpi
@given(st.integers(1, 3), st.integers(0, 6))
def test_not_finite_on_ranks(ranks: int, where: int) -> None:
    on_ranks(ranks, vectors.says_where_it_is_not_finite, 7, where, np.nan)


@given(st.integers(1, 4))
def test_vectors_of_one_process_on_threads(workers: int) -> None:
    on_threads(workers, vectors.vectors_of_one_process, 6)


@needs_mpi
def test_vectors_of_one_process_on_ranks() -> None:
    on_ranks(2, vectors.vectors_of_one_process, 6)


def test_arithmetic_of_both_kinds_says_so() -> None:
    X = linop.TensorSpace((6,), linop.Partition((2,)))

    def main(backend: Any) -> None:
        v = backend.vector(X, X.random(0))
        assert "backend.vector(space, v)" in raised(SpaceError, lambda: v + X.random(0))

    linop.launch(main, 2)
