"""Local operators apply their matrix: integers exactly, floats to a bound for each element, and
what is not finite only where it is needed. Every dtype, and sizes at which SciPy changes its method
of convolution."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st

import linop
from linop import LinearOperator, Region, Space
from linop.local_operators import convolution, diagonal, matrix, restriction
from linop.spaces.float_formats import machine_epsilon

WHOLE = [np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)]
FLOATS = [np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, np.float32, float, np.longdouble)]
FLOATS += [np.dtype(t) for t in (np.complex64, complex, np.clongdouble)]
SHORT = [np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16)]
BOUND = 2
"""The constant c of the documented bound c n eps (abs(A) abs(x))."""


def numbers(shape: Any, dtype: np.dtype[Any], rng: np.random.Generator) -> np.ndarray:
    """Random numbers, a third of them zero: integers of all sizes, so that sums wrap."""
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        found = rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)
        found = np.where(rng.random(shape) < 0.5, found, found % dtype.type(7))
    else:
        found = rng.standard_normal(shape) * 2.0 ** rng.integers(-3, 4, shape)
        if dtype.kind == "c":
            found = found + 1j * rng.standard_normal(shape)
    return np.where(rng.random(shape) < 1 / 3, np.zeros((), dtype), found.astype(dtype))


@st.composite
def local_operators(draw: st.DrawFn, dtypes: list[np.dtype[Any]]) -> LinearOperator:
    dtype = draw(st.sampled_from(dtypes))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = draw(st.sampled_from(["convolution", "dense", "sparse", "diagonal", "restriction"]))
    if kind == "convolution":
        return draw(convolutions(dtype, rng))
    m, n = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    x = Space(Region("x", n), dtype)
    if kind == "diagonal":
        return diagonal(numbers(n, dtype, rng), x)
    if kind == "restriction":
        return restriction(x, rng.integers(0, n, m))
    A = numbers((m, n), dtype, rng)
    if kind == "sparse" and dtype not in SHORT:
        return matrix(scipy.sparse.csr_array(A), x, Space(Region("y", m), dtype))
    return matrix(A, x, Space(Region("y", m), dtype))


@st.composite
def convolutions(draw: st.DrawFn, dtype: np.dtype[Any], rng: np.random.Generator) -> LinearOperator:
    """Of one to three dimensions; kernels of up to some hundred elements on thousands."""
    ndim = draw(st.integers(1, 3))
    most = (300, 30, 8)[ndim - 1]
    shape, kernel, stride, dilation, padding, output = [], [], [], [], [], []
    for _ in range(ndim):
        k, s = draw(st.integers(1, most // 2)), draw(st.integers(1, 3))
        d, pads = draw(st.integers(1, 2)), (draw(st.integers(0, 3)), draw(st.integers(0, 3)))
        n = d * (k - 1) + 1 + draw(st.integers(0, most))
        shape.append(n)
        kernel.append(k)
        stride.append(s)
        dilation.append(d)
        padding.append(pads)
        output.append((n + sum(pads) - d * (k - 1) - 1) // s + 1)
    return convolution(
        numbers(kernel, dtype, rng),
        Space(Region("x", shape), dtype),
        Space(Region("y", output), dtype),
        stride=stride,
        padding=padding,
        dilation=dilation,
    )


def results(op: LinearOperator, x: np.ndarray) -> list[np.ndarray]:
    """The operator of a flat vector, here and in a plan."""
    vector = op.domain.unflatten(x)
    plan = op.compile(linop.backends.get("threads"))
    return [op.codomain.flatten(y) for y in (op(vector), plan(vector))]


@given(local_operators(WHOLE), st.integers(0, 2**32))
def test_integers_are_exact(op: LinearOperator, seed: int) -> None:
    for A in (op, op.H):
        x = numbers(A.domain.size, A.dtype, np.random.default_rng(seed))
        known = scipy.sparse.csr_array(A.to_matrix())
        bits = 8 * A.dtype.itemsize
        wanted = [
            sum(int(a) * int(x[j]) for a, j in zip(row.data, row.indices, strict=True)) % 2**bits
            for row in (known[[i]] for i in range(A.codomain.size))
        ]
        for y in results(A, x):
            assert y.dtype == A.dtype
            assert [int(value) % 2**bits for value in y] == wanted


def magnitudes(A: LinearOperator, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """In the longest precision: A x, the bound of the error of each element, and abs(A)."""
    long = np.dtype(np.clongdouble if A.dtype.kind == "c" else np.longdouble)
    known = scipy.sparse.csr_array(A.to_matrix()).astype(long)
    sizes = abs(known)
    terms = np.diff(known.indptr)
    eps = machine_epsilon(A.dtype)
    wide = x.astype(np.float64) if x.dtype in SHORT else x
    bound = BOUND * terms * eps * (sizes @ np.abs(wide.astype(long)))
    if eps < 1e-18:
        bound = 2 * bound  # the reference rounds as well
    return known @ wide.astype(long), bound + 2.0**-24 * (A.dtype in SHORT), sizes


@given(local_operators(FLOATS), st.integers(0, 2**32))
def test_floats_are_within_the_bound(op: LinearOperator, seed: int) -> None:
    for A in (op, op.H):
        x = numbers(A.domain.size, A.dtype, np.random.default_rng(seed))
        wanted, bound, _ = magnitudes(A, x)
        for y in results(A, x):
            found = y.astype(np.float64) if y.dtype in SHORT else y
            assert (np.abs(found - wanted) <= bound).all()


@given(local_operators(FLOATS), st.integers(0, 2**32))
def test_infinity_and_nan_reach_only_what_needs_them(op: LinearOperator, seed: int) -> None:
    for A in (op, op.H):
        rng = np.random.default_rng(seed)
        x = numbers(A.domain.size, A.dtype, rng)
        bad = rng.random(x.size) < 0.1
        bad[rng.integers(x.size)] = True
        spoiled = np.where(bad, rng.choice([np.inf, -np.inf, np.nan], x.size).astype(A.dtype), x)
        wanted, bound, sizes = magnitudes(A, np.where(bad, np.zeros((), A.dtype), x))
        reached = (sizes @ bad.astype(np.longdouble)) > 0
        for y in results(A, spoiled):
            found = y.astype(np.float64) if y.dtype in SHORT else y
            assert not np.isfinite(found[reached]).any()
            assert (np.abs(found - wanted) <= bound)[~reached].all()


def test_zeros_multiply_nothing() -> None:
    M = np.array([[1.0, 0], [1, 1]])
    x = np.array([3.0, np.nan])
    kernel = np.array([2.0, 0])
    C = convolution(kernel, Region("x", 2), Region("y", 2), padding=[(0, 1)])
    for op in (matrix(M), matrix(scipy.sparse.csr_array(M)), diagonal([1.0, 0]), C):
        assert np.isfinite(op(x)[0])
    assert (diagonal([1.0, 0])(x) == [3, 0]).all()


def test_sums_that_a_fourier_transform_loses() -> None:
    """The issue's: int32 sums past 2^31, int64 sums past 2^53's precision, a NaN and 1e20."""
    for dtype, n, k, value in ((np.int32, 60, 20, 3000), (np.int64, 64, 9, 7402123)):
        x = np.full((n, n), value, dtype) + np.arange(n, dtype=dtype)
        kernel = np.full((k, k), value, dtype)
        y = n - k + 1
        C = convolution(
            kernel, Space(Region("x", (n, n)), dtype), Space(Region("y", (y, y)), dtype)
        )
        assert (C(x).ravel() == C.to_matrix() @ x.ravel()).all()
        assert C.equals(matrix(C.to_matrix(), C.domain, C.codomain))
    C = convolution(np.ones((20, 20)), Region("x", (60, 60)), Region("y", (41, 41)))
    for spoiler in (np.nan, 1e20):
        x = np.ones((60, 60))
        x[0, 0] = spoiler
        y = C(x).ravel()
        assert (y[1:] == 400).all()


def test_a_square_matrix_has_powers() -> None:
    M = np.arange(9.0).reshape(3, 3)
    known = scipy.sparse.linalg.LinearOperator((3, 3), lambda x: M @ x, lambda y: M.T @ y)
    for A in (
        matrix(M),
        matrix(scipy.sparse.csr_array(M)),
        matrix(M, Region("a", 3)),
        matrix(M, codomain=Region("b", 3, 2)),
        linop.local_operators.from_scipy(known),
    ):
        assert A.domain == A.codomain
        assert ((A**2).to_matrix().toarray() == M @ M).all()
        assert ((A @ A.H + A).to_matrix().toarray() == M @ M.T + M).all()
    A = matrix(np.ones((2, 3)))
    assert (A.domain.regions[0].name, A.codomain.regions[0].name) == ("x", "y")


def test_a_replicated_region_has_one_local_operator() -> None:
    X = linop.TensorSpace((4,), linop.Partition((2,)), axes=[linop.REPLICATED], name="x")
    M = np.eye(4)
    with pytest.raises(linop.errors.SpaceError, match=r"give both sides regions with workers"):
        matrix(M, X.region(0), Region("y", 4, 0))
    with pytest.raises(linop.errors.RegionError, match=r"is replicated: .* once and not for each"):
        linop.direct_sum(*(matrix(M, X.region(w)) for w in (0, 1)))
    assert (matrix(M, X.region(0))(np.ones(4)) == 1).all()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2])
def test_entries_are_those_of_the_dtype(dtype: Any) -> None:
    space = Space(Region("x", 1), dtype)
    third = float(np.float64(1 / 3).astype(dtype))
    assert matrix([[1 / 3]], space).to_matrix()[0, 0] == third
    given = matrix(np.array([[1 / 3]]), space)
    assert given.to_matrix()[0, 0] == third


def test_whose_matrix_changes_later() -> None:
    """An operator keeps the numbers that it was given."""
    for M in (np.ones((2, 2)), scipy.sparse.csr_array(np.ones((2, 2)))):
        A = matrix(M)
        if scipy.sparse.issparse(M):
            M.data[:] = 5
        else:
            M[:] = 5
        assert (A(np.ones(2)) == 2).all()
    d = np.ones(2)
    D = diagonal(d)
    d[:] = 5
    assert (D(np.ones(2)) == 1).all()
