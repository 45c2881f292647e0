"""Checks of operators whose terms cancel, so that results are rounding errors alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import linop
from linop import LinearOperator, Region, Space
from linop.testing import check_adjoint, check_equal, check_exact, check_linear
from linop.testing.cancellation import noise_of_entries
from linop.testing.describing import seeds
from linop.testing.tested_maps import foreign

pytestmark = pytest.mark.slow

DTYPES = [np.float32, np.float64, np.complex64, np.complex128]
CHECKS = [check_adjoint, check_exact, check_linear]


def annihilated(n: int, seed: int, dtype: Any, ends: tuple[int, int] = (0, 0)) -> LinearOperator:
    """A product B A, zero but for rounding: B takes away what A keeps.

    Args:
        ends: workers of the space between, and of that of the ends.
    """
    rng = np.random.default_rng(seed)
    matrix = rng.standard_normal((n, n))
    if np.dtype(dtype).kind == "c":
        matrix = matrix + 1j * rng.standard_normal((n, n))
    basis = np.linalg.qr(matrix)[0]
    kept, gone = basis[:, : n // 2], basis[:, n // 2 :]
    sizes = 10.0 ** rng.integers(-3, 4, 2)
    outer, inner = (Space(Region(name, n, at), dtype) for name, at in zip("xz", ends, strict=True))
    here = Space(Region("y", n, ends[0]), dtype)
    A = linop.local_operators.matrix((sizes[0] * kept @ kept.conj().T).astype(dtype), outer, here)
    there = Space(Region("w", n, ends[1]), dtype)
    B = linop.local_operators.matrix((sizes[1] * gone @ gone.conj().T).astype(dtype), there, inner)
    return B @ linop.move(here, here["y"], there.regions[0]) @ A


@given(st.integers(2, 12), seeds, st.sampled_from(DTYPES), st.sampled_from([(0, 0), (0, 1)]))
def test_a_product_that_is_zero(n: int, seed: int, dtype: Any, ends: tuple[int, int]) -> None:
    op = annihilated(n, seed, dtype, ends)
    for backend in ("reference", "threads"):
        for check in CHECKS:
            report = check(op, backend=backend)
            assert report, report
        report = check_equal(op, 0 * op, backend)
        assert report, report


@given(st.integers(2, 12), seeds, st.sampled_from(DTYPES))
def test_a_difference_that_is_zero(n: int, seed: int, dtype: Any) -> None:
    """Of sums in another order."""
    rng = np.random.default_rng(seed)
    x, y = Space(Region("x", n), dtype), Space(Region("y", n), dtype)
    several = [
        linop.local_operators.matrix(rng.standard_normal((n, n)).astype(dtype), x, y)
        for _ in range(3)
    ]
    one, two, three = several
    op = (one + two + three) - (three + two + one)
    for check in CHECKS:
        report = check(op)
        assert report, report


@pytest.mark.parametrize("check", [check_adjoint, check_exact])
@given(n=st.integers(2, 12), seed=seeds, dtype=st.sampled_from(DTYPES))
def test_a_wrong_adjoint_of_it_is_found(check: Any, n: int, seed: int, dtype: Any) -> None:
    """One whose error is a thousandth of the terms that cancel."""
    op = annihilated(n, seed, dtype)
    noise = noise_of_entries(foreign.tested_map("check_exact", op))
    assert noise is not None
    size = 1e-3 * noise.max()
    back = op.H
    M = np.full((n, n), size, dtype)
    off = linop.local_operators.matrix(M, back.domain, back.codomain)
    assert not check(op, adjoint=back + off)


@pytest.mark.parametrize("check", [check_adjoint, check_exact])
@given(
    n=st.integers(1, 6),
    power=st.integers(1, 80),
    seed=seeds,
    dtype=st.sampled_from(DTYPES),
    wrong=st.sampled_from([1e-3, 1.0, -1.0]),
)
def test_long_products_hide_nothing(
    check: Any, n: int, power: int, seed: int, dtype: Any, wrong: float
) -> None:
    """Of a matrix that keeps norms, in which nothing cancels however long the product is."""
    Q = np.linalg.qr(np.random.default_rng(seed).standard_normal((n, n)))[0]
    X = Space(Region("x", n), dtype)
    op = linop.local_operators.matrix(Q.astype(dtype), X, X) ** power
    assert check(op)
    assert not check(op, adjoint=(1 + wrong) * op.H)
    assert not check_equal(op, (1 + wrong) * op)


@example(n=2, steps=1, seed=7998)  # one pair of vectors in each trial did not show it
@given(n=st.integers(2, 20), steps=st.integers(1, 60), seed=seeds)
def test_a_recurrence_of_functions_hides_nothing(n: int, steps: int, seed: int) -> None:
    """That of a wave, of a hand-written step whose adjoint is zero, or that is not linear."""
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(rng.standard_normal((n, n)))[0]
    S = basis * (2 * np.cos(rng.uniform(0.1, 3, n))) @ basis.T
    X = Space(Region("x", n))

    def wave(forward: Any, adjoint: Any) -> LinearOperator:
        step = linop.local(X, X, forward, adjoint)
        before, op = linop.identity(X), step
        for _ in range(steps):
            before, op = op, step @ op - before
        return op

    def bent(x: Any) -> Any:
        return S @ x + 0.1 * np.where(x * np.roll(x, 1) > 0, x, 0)

    right = wave(lambda x: S @ x, lambda y: S.T @ y)
    for check in (check_adjoint, check_linear):
        report = check(right)
        assert report, report
    assert not check_adjoint(wave(lambda x: S @ x, lambda y: 0 * y))
    assert not check_linear(wave(bent, bent))
