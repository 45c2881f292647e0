"""Krylov methods against SciPy's, on random problems of every dtype: the same iterations, the same
solutions.

Tolerances: iterations may differ by a few, since coefficients are double precision here and of the
dtype in SciPy, and sums are in another order; solutions by what the criterion leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse.linalg as scipy_solvers
from hypothesis import given
from hypothesis import strategies as st

import linop
from linop import LinearOperator

solvers = linop.solvers
DTYPES = ("float64", "complex128", "float32", "complex64")
RTOL = {"float64": 1e-9, "complex128": 1e-9, "float32": 1e-4, "complex64": 1e-4}
sizes = st.integers(2, 40)
seeds = st.integers(0, 2**32 - 1)


def drawn(rng: np.random.Generator, shape: tuple[int, int], dtype: str) -> np.ndarray:
    values = rng.standard_normal(shape)
    if np.dtype(dtype).kind == "c":
        values = values + 1j * rng.standard_normal(shape)
    return values


def matrices(size: int, seed: int, dtype: str) -> dict[str, np.ndarray]:
    """Positive definite, indefinite and not Hermitian; condition numbers stay below 100."""
    rng = np.random.default_rng(seed)
    some = drawn(rng, (size, size), dtype)
    q = np.linalg.qr(some)[0]
    spread = np.linspace(1, 20, size)
    signs = np.where(np.arange(size) % 2, -1, 1)
    made = {
        "definite": (q * spread) @ q.conj().T,
        "indefinite": (q * spread * signs) @ q.conj().T,
        "general": some / (2 * np.sqrt(size)) + 2 * np.eye(size),
    }
    return {name: array.astype(dtype) for name, array in made.items()}


def operator(array: np.ndarray) -> LinearOperator:
    return linop.local_operators.matrix(array)


class Counter:
    """A callback that counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Any) -> None:
        self.calls += 1


def close(x: Any, op: LinearOperator, wanted: np.ndarray, rtol: float) -> None:
    """Equal to what a residual of `rtol` leaves at condition numbers of 100."""
    found = op.domain.flatten(x)
    assert np.linalg.norm(found - wanted) <= 100 * rtol * np.linalg.norm(wanted)


dtypes = st.sampled_from(DTYPES)
SQUARE: dict[str, tuple[str, Callable[..., Any], Callable[..., Any], dict[str, Any]]] = {
    "cg": ("definite", solvers.cg, scipy_solvers.cg, {}),
    "minres": ("indefinite", solvers.minres, scipy_solvers.minres, {}),
    "gmres": ("general", solvers.gmres, scipy_solvers.gmres, {"callback_type": "pr_norm"}),
    "bicgstab": ("general", solvers.bicgstab, scipy_solvers.bicgstab, {}),
}


def assert_as_many(found: int, wanted: int) -> None:
    """Steps of two iterations: rounding costs either one a step in ten."""
    assert abs(found - wanted) <= 2 + wanted // 10


@pytest.mark.parametrize("name", SQUARE)
@given(dtypes, sizes, seeds, st.booleans(), st.booleans())
def test_square_systems_as_scipy(
    name: str, dtype: str, size: int, seed: int, guess: bool, preconditioned: bool
) -> None:
    kind, solve, scipy_solve, options = SQUARE[name]
    rtol = RTOL[dtype]
    array = matrices(size, seed, dtype)[kind]
    op = operator(array)
    rng = np.random.default_rng(seed)
    b, x0 = (rng.standard_normal(size).astype(dtype) for _ in range(2))
    M = np.diag(1 + rng.random(size)).astype(dtype) if preconditioned else None
    counter = Counter()
    found = solve(
        op,
        b,
        x0 if guess else None,
        rtol=rtol,
        M=None if M is None else operator(M),
    )
    assert found.success
    close(found.x, op, np.linalg.solve(array.astype("c16"), b), rtol)
    if name == "minres" and np.dtype(dtype).kind == "c":
        return  # SciPy's is real
    scipy_solve(array, b, x0=x0 if guess else None, rtol=rtol, M=M, callback=counter, **options)
    if not (name == "gmres" and preconditioned):  # there SciPy's is measured in another norm
        assert_as_many(found.nit, counter.calls)


@given(dtypes, sizes, seeds, st.booleans())
def test_pipelined_is_cg(dtype: str, size: int, seed: int, preconditioned: bool) -> None:
    array = matrices(size, seed, dtype)["definite"]
    op = operator(array)
    M = operator(np.diag(np.linspace(1, 2, size)).astype(dtype)) if preconditioned else None
    b = op.codomain.random(seed)
    plain = solvers.cg(op, b, rtol=RTOL[dtype], M=M)
    found = solvers.cg(op, b, rtol=RTOL[dtype], M=M, pipelined=True)
    assert plain.success and found.success
    close(found.x, op, op.domain.flatten(plain.x), RTOL[dtype])
    assert found.nit <= 2 + 1.5 * plain.nit


LEAST_SQUARES = {
    "lsqr": (solvers.lsqr, scipy_solvers.lsqr),
    "lsmr": (solvers.lsmr, scipy_solvers.lsmr),
}


@pytest.mark.parametrize("name", LEAST_SQUARES)
@given(dtypes, sizes, sizes, seeds, st.sampled_from([0.0, 0.7]), st.booleans())
def test_least_squares_as_scipy(
    name: str, dtype: str, rows: int, columns: int, seed: int, damp: float, guess: bool
) -> None:
    """Over- and underdetermined; all numbers of SciPy's tuple, not the solution only."""
    solve, scipy_solve = LEAST_SQUARES[name]
    rng = np.random.default_rng(seed)
    short = min(rows, columns)
    left, right = (np.linalg.qr(drawn(rng, (n, short), dtype))[0] for n in (rows, columns))
    array = ((left * np.linspace(1, 5, short)) @ right.conj().T).astype(dtype)
    op, b = operator(array), rng.standard_normal(rows).astype(dtype)
    x0 = rng.standard_normal(columns).astype(dtype) if guess else None
    options = {"damp": damp, "atol": RTOL[dtype], "btol": RTOL[dtype]}
    x, *numbers = solve(op, b, x0=x0, **options)
    wanted, *others = scipy_solve(array, b, x0=x0, **options)
    found = op.domain.flatten(x)
    size = np.linalg.norm(wanted) + np.linalg.norm(b) + (0 if x0 is None else np.linalg.norm(x0))
    assert np.linalg.norm(found - wanted) <= 100 * RTOL[dtype] * size
    assert_as_many(numbers[1], others[1])
    if numbers[1] == others[1] and RTOL[dtype] < 1e-6 and numbers[0] == others[0]:
        count = 6 if name == "lsqr" else 5
        known = [k for k in range(2, count + 2) if k not in (_GRADIENT[name], _CONDITION[name])]
        for k in known:  # number 4 estimates ‖A‖ from vectors that are no longer orthogonal
            rel = 3e-2 if k == 4 else 1e-5
            assert numbers[k] == pytest.approx(others[k], rel=rel, abs=1e-6 * size)


_GRADIENT = {"lsqr": 6, "lsmr": 3}
_CONDITION = {"lsqr": 5, "lsmr": 5}
"""Numbers that rounding decides: of a gradient at its end, and a quotient with it."""


@given(dtypes, st.integers(2, 5), sizes, seeds)
def test_several_right_hand_sides_at_once(dtype: str, count: int, size: int, seed: int) -> None:
    """Each as alone, bit for bit, with as many reductions as the longest takes."""
    for name, (kind, solve, _, _) in SQUARE.items():
        op = operator(matrices(size, seed, dtype)[kind])
        sides = [op.codomain.random(seed % 1000 + k) for k in range(count)]
        sides[0] = op.codomain.zeros()
        alone = [solve(op, b, rtol=RTOL[dtype]) for b in sides]
        together = solve(op, sides, rtol=RTOL[dtype])
        for one, other in zip(together, alone, strict=True):
            assert one.x.equals(other.x), name
            assert (one.nit, one.residuals, one.message) == (
                other.nit,
                other.residuals,
                other.message,
            )
        assert {one.reductions for one in together} == {together[0].reductions}
        most = max(one.reductions for one in alone) + 1  # a zero's norm is computed twice
        if name in ("bicgstab", "gmres"):  # some of their iterations need one more
            most += max(one.nit for one in alone)
        if name == "minres":  # each verifies the residual at its end
            most += count
        assert together[0].reductions <= most


@given(dtypes, st.integers(1, 30), seeds, st.sampled_from(["LM", "LA", "SA"]), st.data())
def test_eigenvalues_as_numpy(
    dtype: str, size: int, seed: int, which: str, data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, min(size, 5)))
    array = matrices(size, seed, dtype)["indefinite"]
    op = operator(array)
    values, vectors = found = solvers.lanczos(op, k, which, tol=RTOL[dtype])
    assert found.success and found.eigenvalues is values
    every = np.linalg.eigvalsh(array.astype("c16"))
    order = {"LM": -abs(every), "LA": -every, "SA": every}[which]
    wanted = np.sort(every[np.argsort(order)[:k]])
    if which != "LM":  # where two of opposite signs may be as large
        np.testing.assert_allclose(values, wanted, rtol=0, atol=200 * RTOL[dtype])
    for value, v in zip(values, vectors, strict=True):
        assert (op(v) - float(value) * v).norm() <= 200 * RTOL[dtype]
        assert v.norm() == pytest.approx(1, rel=1e-4)


@given(dtypes, st.integers(1, 20), st.integers(1, 20), seeds, st.data())
def test_singular_values_as_numpy(
    dtype: str, rows: int, columns: int, seed: int, data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, min(rows, columns, 4)))
    array = drawn(np.random.default_rng(seed), (rows, columns), dtype).astype(dtype)
    op = operator(array)
    left, values, right = found = solvers.lanczos(op, k, singular=True, tol=RTOL[dtype])
    assert found.success
    wanted = np.sort(np.linalg.svd(array.astype("c16"))[1])[-k:]
    np.testing.assert_allclose(values, wanted, rtol=0, atol=100 * RTOL[dtype])
    for u, value, v in zip(left, values, right, strict=True):
        assert (op(v) - float(value) * u).norm() <= 200 * RTOL[dtype]
        assert (op.H(u) - float(value) * v).norm() <= 200 * RTOL[dtype]


@given(dtypes, st.integers(1, 20), seeds)
def test_power_finds_the_largest(dtype: str, size: int, seed: int) -> None:
    array = matrices(size, seed, dtype)["definite"]
    value, x = found = solvers.power(operator(array), rtol=RTOL[dtype], maxiter=3000)
    assert found.success
    assert abs(value - np.linalg.eigvalsh(array)[-1]) <= 100 * RTOL[dtype] * 20
    assert (operator(array)(x)).norm() == pytest.approx(abs(value), rel=1e-3)


@given(st.integers(-900, 900), st.sampled_from(sorted(SQUARE)), seeds)
def test_iterations_do_not_depend_on_units(power: int, name: str, seed: int) -> None:
    kind, solve, _, _ = SQUARE[name]
    op = operator(matrices(12, seed, "float64")[kind])
    b = op.codomain.random(seed)
    plain = solve(op, b, rtol=1e-8)
    scaled = solve(op, op.codomain.vector(np.ldexp(np.asarray(b), power)), rtol=1e-8)
    assert (scaled.nit, scaled.success) == (plain.nit, True)
    found = np.ldexp(np.asarray(scaled.x), -power)
    np.testing.assert_allclose(found, np.asarray(plain.x), rtol=1e-9, atol=1e-12)
