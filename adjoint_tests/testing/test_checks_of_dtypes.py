"""Every check in every dtype; operators whose dtype SciPy guessed; and those that are linear over
the real numbers only."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pylops
import pytest
import scipy.sparse.linalg
from hypothesis import given
from hypothesis import strategies as st

import linop
import linop.testing as lt
from linop import Region, Space
from linop.errors import ArgumentError, DTypeError, UndecidableError
from linop.local_operators import from_scipy, local, matrix
from linop.spaces.float_formats import machine_epsilon
from linop.testing.report import Report
from linop.testing.verify_command import PROPERTIES, Case, verified

WHOLE = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
FLOATS = ["float16", "float32", "float64", "longdouble", "complex64", "complex128", "clongdouble"]
DTYPES = [np.dtype(name) for name in WHOLE + FLOATS] + [np.dtype(ml_dtypes.bfloat16)]


def entries(dtype: np.dtype[Any], n: int, seed: int) -> np.ndarray:
    """Small whole numbers, so that results are exact in every dtype, and no entry is zero."""
    A = np.random.default_rng(seed).integers(1, 4, (n, n))
    return (A if dtype.kind != "c" else A + 1j * A.T).astype(dtype)


SINGLE: list[Callable[..., Report]] = [
    lt.check_adjoint,
    lt.check_dot_exact,
    lt.check_exact,
    lt.check_linear,
]


@given(st.sampled_from(DTYPES), st.integers(1, 6), st.integers(0, 2**32), st.booleans())
def test_every_check_in_every_dtype(dtype: np.dtype[Any], n: int, seed: int, by_hand: bool) -> None:
    space = Space(Region("x", n), dtype)
    A = matrix(entries(dtype, n, seed), space)
    wrong = A.to_matrix().toarray().astype(dtype)
    wrong[0, n - 1] += dtype.type(32 if machine_epsilon(dtype) > 1e-3 else 1)
    B, one = matrix(wrong, space), linop.identity(space)
    op = local(space, space, A, A.H) if by_hand else A
    for check in SINGLE:
        assert check(op), str(check(op))
    assert lt.check_equal(op, A)
    assert not lt.check_equal(op, B)
    assert lt.check_inverse(one, one)
    assert lt.check_unitary(one)
    assert lt.check_self_adjoint(one)
    assert lt.check_self_adjoint(A + A.H)
    for check in SINGLE[:3]:
        assert not check(op, adjoint=B.H), str(check(op, adjoint=B.H))
    report = lt.check_adjoint(op, adjoint=B.H)
    assert isinstance(report.error, float)
    assert report.as_dict()["passed"] is False


NARROW: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "saturates": lambda x: np.minimum(x, np.iinfo(x.dtype).max // 8),
    "int8": lambda x: x.astype("int8"),
    "uint16": lambda x: x.astype("uint16"),
    "int32": lambda x: x.astype("int32"),
    "float32": lambda x: x.astype("float32"),
    "float64": lambda x: x.astype("float64"),
}


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
@given(st.sampled_from(WHOLE), st.sampled_from([*NARROW]), st.integers(8, 12))
def test_integers_that_lose_their_high_or_low_digits(dtype: str, how: str, n: int) -> None:
    """Numbers are drawn up to the largest of the dtype: small ones do not show it."""
    kind, narrow = np.dtype(dtype), NARROW[how]
    ends = np.array([np.iinfo(kind).min, np.iinfo(kind).max // 2, np.iinfo(kind).max], kind)
    lost = bool((narrow(ends).astype(kind) != ends).any())
    A = entries(kind, n, 0)

    def there(x: np.ndarray) -> np.ndarray:
        return A @ narrow(x).astype(kind)

    def back(y: np.ndarray) -> np.ndarray:
        return narrow(A.T @ y).astype(kind)

    op = lt.pair(there, back, n, n, dtype=kind)
    for check in (lt.check_adjoint, lt.check_dot_exact, lt.check_linear):
        assert bool(check(op, trials=8)) is not lost, str(check(op, trials=8))
    assert bool(lt.check_exact(op)) is not lost
    assert bool(lt.check_equal(op, A, trials=8)) is not lost
    one = lt.pair(
        lambda x: narrow(x).astype(kind), lambda x: narrow(x).astype(kind), n, n, dtype=kind
    )
    assert bool(lt.check_unitary(one, trials=8)) is not lost
    assert bool(lt.check_self_adjoint(one, trials=8)) is not lost


@given(st.sampled_from(WHOLE), st.sampled_from(WHOLE), st.integers(0, 2**16))
def test_integers_of_two_lengths(dtype: str, other: str, seed: int) -> None:
    """Sums that wrap in the shorter one only are no faults."""
    X, Y = Space(Region("x", 3), dtype), Space(Region("y", 4), other)
    A = np.random.default_rng(seed).integers(-9, 9, (4, 3))
    op = lt.pair(
        lambda x: (A @ x.astype(int)).astype(other), lambda y: (A.T @ y.astype(int)).astype(dtype),
        X, Y,
    )  # fmt: skip
    for check in (lt.check_adjoint, lt.check_dot_exact, lt.check_linear):
        assert check(op, seed=seed), str(check(op, seed=seed))


def test_masked_arrays_are_refused() -> None:
    A = np.ma.array([[1.0, 2.0], [3.0, 4.0]], mask=[[0, 1], [0, 0]])
    for call in (lambda: lt.check_adjoint(A), lambda: lt.check_equal(A.data, A)):
        with pytest.raises(ArgumentError, match="MaskedArray given"):
            call()
    report = lt.check_adjoint(lt.pair(lambda x: np.ma.array(x, mask=[1, 0]), np.copy, 2, 2))
    assert not report and "MaskedArray" in str(report)


@given(st.sampled_from(["longdouble", "clongdouble"]), st.integers(-12000, 12000))
def test_long_doubles_beyond_the_range_of_floats(dtype: str, power: int) -> None:
    kind = np.dtype(dtype)
    A = matrix(entries(kind, 3, 0) * np.ldexp(np.longdouble(1), power), Space(Region("x", 3), kind))
    for check in (lt.check_adjoint, lt.check_exact, lt.check_linear):
        assert check(A), str(check(A))
    half = local(A.domain, A.domain, A, lambda y: A.H(y) * kind.type(1 + 1e-9))
    assert not lt.check_adjoint(half)
    assert not lt.check_exact(half)


def test_an_error_that_long_doubles_show_and_floats_do_not() -> None:
    space = Space(Region("x", 2), np.longdouble)
    near = local(space, space, lambda x: x * 1, lambda y: y * (1 + np.longdouble(1e-17)))
    assert not lt.check_exact(near)
    assert not lt.check_equal(near.H, linop.identity(space))


def test_dtypes_in_which_a_check_shows_nothing() -> None:
    for dtype in (ml_dtypes.float8_e4m3, ml_dtypes.float8_e5m2, ml_dtypes.float4_e2m1fn):
        assert machine_epsilon(np.dtype(dtype)) >= 1 / 16
        one = linop.identity(Space(Region("x", 2), dtype))
        double = lt.pair(lambda x: x * 1, lambda y: y + y, one.domain, one.domain)
        for check in (lt.check_adjoint, lt.check_linear):
            with pytest.raises(UndecidableError, match="explains any error"):
                check(double)
    assert lt.check_dot_exact(linop.identity(Space(Region("x", 2), ml_dtypes.float8_e4m3)))
    for A in (np.ones((2, 2), bool), np.ones((2, 2), object)):
        for check in SINGLE:
            with pytest.raises(DTypeError, match="a space holds numbers"):
                check(A)


# Dtypes that SciPy guessed


def custom(forward: Any, adjoint: Any, **options: Any) -> scipy.sparse.linalg.LinearOperator:
    return scipy.sparse.linalg.LinearOperator((4, 4), forward, adjoint, **options)


def truncated(x: np.ndarray) -> np.ndarray:
    y = np.zeros_like(np.arange(4))
    y[:] = x
    return y


M = np.arange(16).reshape(4, 4)
WRONG = {
    "rounds": custom(np.round, np.round),
    "another adjoint": custom(lambda x: x, lambda y: 257 * y),
    "into whole numbers": custom(truncated, truncated),
    "of complex numbers alone": custom(lambda x: 1 * x, lambda y: y if y.dtype.kind != "c" else -y),
}
RIGHT = {
    "a matrix": custom(lambda x: M @ x, lambda y: M.T @ y),
    "reversal": custom(lambda x: x[::-1], lambda y: y[::-1]),
    "the real part": custom(np.real, np.real),
}
COMPOSED: dict[str, Callable[[Any], Any]] = {
    "itself": lambda op: op,
    "its adjoint": lambda op: op.H,
    "a multiple": lambda op: 2 * op,
    "a sum": lambda op: op + scipy.sparse.linalg.aslinearoperator(M),
    "a product": lambda op: op @ RIGHT["reversal"],
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "way"),
    [
        (name, way)
        for name in [*WRONG, *RIGHT]
        for way in COMPOSED
        if (name, way) != ("the real part", "a sum")  # which takes complex numbers, and is wrong
    ],
)
def test_operators_without_a_dtype_are_checked_on_floats(name: str, way: str) -> None:
    op = COMPOSED[way]((WRONG | RIGHT)[name])
    assert op.dtype.kind in "iu"
    known = from_scipy(op)
    assert known.dtype == np.float64
    report = lt.check_adjoint(op)
    assert bool(report) == (name in RIGHT)
    assert "in float64" in str(report).splitlines()[0]
    found = verified(Case(name, op), "reference", "dot product", 0, 3)
    assert found.failed == (name in WRONG)
    every = [lt.check_adjoint(op), lt.check_exact(op), lt.check_linear(op)]
    assert all(every) == (name in RIGHT)


def test_whole_numbers_alone() -> None:
    """The report's first line says if floats are refused, or a dtype is declared."""
    bits = custom(lambda x: x ^ 0, lambda y: y ^ 0)
    declared = custom(lambda x: 3 * x, lambda y: 3 * y, dtype=np.int32)
    for op, dtype in ((bits, "int8"), (declared, "int32")):
        report = lt.check_adjoint(op)
        assert report
        assert f"on whole numbers of {dtype} alone passed" in str(report).splitlines()[0]
    assert from_scipy(declared).dtype == np.int32
    space = Space(Region("x", 4), np.int64)
    whole = from_scipy(RIGHT["a matrix"], space)
    assert whole.dtype == np.int64
    assert (whole(np.arange(4)) == M @ np.arange(4)).all()
    halves = from_scipy(custom(lambda x: x / 2, lambda y: y / 2, dtype=np.int64))
    with pytest.raises(DTypeError, match=r"matvec of .* returned dtype float64 for int64"):
        halves(np.arange(4))


def test_a_guess_beside_operators_of_declared_dtypes() -> None:
    op = RIGHT["a matrix"]
    assert lt.check_equal(op, M)
    assert lt.check_equal(op, M.astype(np.complex64).astype(complex))
    assert lt.check_equal(op, matrix(M.astype(np.int32)))
    assert not lt.check_equal(op, matrix(M + 1.0))
    assert lt.check_adjoint(op, adjoint=M.T)
    assert lt.check_adjoint(M, adjoint=custom(lambda y: M.T @ y, lambda x: M @ x))


# Operators that are linear over the real numbers only


REAL = [
    pylops.signalprocessing.FFT(8, real=True),
    pylops.Real(4, dtype="complex128"),
    pylops.Imag(4, dtype="complex128"),
    pylops.Conj(4, dtype="complex128"),
]
WRAPPED: dict[str, Callable[[Any], Any]] = {
    "itself": lambda F: F,
    "adjoint": lambda F: F.H,
    "multiple": lambda F: 1j * F,
    "sum": lambda F: F + F,
    "product": lambda F: F.H @ F,
    "stack": lambda F: pylops.VStack([F, F]),
    "SciPy's": scipy.sparse.linalg.aslinearoperator,
    "multiple of SciPy's": lambda F: 2j * scipy.sparse.linalg.aslinearoperator(F).H,
    "its methods": lambda F: scipy.sparse.linalg.LinearOperator(
        F.shape, F.matvec, functools.partial(F.rmatvec), dtype=complex
    ),
}


@pytest.mark.parametrize("way", WRAPPED)
@pytest.mark.parametrize("F", REAL, ids=lambda F: type(F).__name__)
def test_real_linear_operators_are_checked_as_such(F: Any, way: str) -> None:
    """In real inner products, in which PyLops' and SciPy's adjoints of complex multiples are wrong:
    conj(a) F* is not the adjoint of a F. Those of linop are right."""
    op = WRAPPED[way](F)
    right = "multiple" not in way
    taken = from_scipy(op)
    m, n = op.shape
    x, y = Space(Region("x", n), complex), Space(Region("y", m), complex)
    by_hand = local(x, y, op.matvec, op.rmatvec)
    for one in (op, taken, by_hand):
        assert bool(lt.check_adjoint(one)) == right
        assert bool(lt.check_exact(one)) == right
        assert lt.check_linear(one)
    assert not taken.clinear and not by_hand.clinear
    for multiple in (1j * from_scipy(F), from_scipy(F) * (2 - 1j), from_scipy(F).H * 1j):
        assert lt.check_exact(multiple)
    for name in PROPERTIES:
        found = verified(Case(name, op), "reference", name, 0, 1)
        assert not found.error


def test_real_linear_operators_that_are_right() -> None:
    """On real spaces, and from a real space to a complex one."""
    F = pylops.signalprocessing.FFT(8, real=True)
    x, y = Space(Region("x", 8), float), Space(Region("y", 5), complex)
    assert lt.check_adjoint(lt.pair(F.matvec, lambda y: F.rmatvec(y).real.copy(), x, y))
    same = pylops.Conj(4, dtype="float64")
    assert lt.check_exact(same)
    assert from_scipy(same).dtype == np.float64


def test_pairs_that_are_no_pair() -> None:
    for given_ in ((np.copy, np.copy), [np.copy, np.copy]):
        with pytest.raises(ArgumentError, match=r"give linop\.testing\.pair\(forward, adjoint,"):
            lt.check_adjoint(given_)
