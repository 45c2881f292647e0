"""Faults that checks see: errors far below others, rare faults, results that do not last; and that
right operators pass at every size and scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import scipy.fft
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st

import linop
import linop.testing as lt
from linop import Region, Space
from linop.errors import ArgumentError
from linop.testing import pair

pytestmark = pytest.mark.slow

Functions = tuple[Callable[[Any], Any], Callable[[Any], Any]]


def of_matrix(A: Any, B: Any = None) -> lt.Pair:
    """The pair of functions of a matrix and its adjoint, or of two matrices."""
    back = A.conj().T if B is None else B
    return pair(lambda x: A @ x, lambda y: back @ y, A.shape[1], A.shape[0], dtype=A.dtype)


# Faults that were not seen


def one_entry_off(n: int, entry: int, by: float) -> Functions:
    def adjoint(y: np.ndarray) -> np.ndarray:
        x = y.copy()
        x[entry] *= 1 + by
        return x

    return np.copy, adjoint


def test_one_entry_of_a_million_that_is_off_by_a_millionth() -> None:
    report = lt.check_adjoint(pair(*one_entry_off(10**6, 654321, 1e-6), 10**6, 10**6))
    assert not report
    assert "from x[654321] (worker 0) to y[654321] (worker 0)" in report.details


@pytest.mark.parametrize("check", [lt.check_adjoint, lt.check_linear])
@pytest.mark.parametrize("every", [2, 3, 4, 5])
def test_a_function_that_fails_now_and_then(check: Callable[..., lt.Report], every: int) -> None:
    calls = [0]

    def forward(x: np.ndarray) -> np.ndarray:
        calls[0] += 1
        return x * (np.nan if calls[0] % every == 0 else 1)

    report = check(pair(forward, np.copy, 3, 3))
    assert not report
    assert "the forward function gives nan at y[0]" in report.details


@pytest.mark.parametrize("scale", [1e-310, 1e-170, 1e-160, 1.0, 1e160, 1e300])
def test_entries_whose_squares_no_number_holds(scale: float) -> None:
    A = scale * np.array([[1.0, 2.0], [0.0, 1.0]])
    assert lt.check_adjoint(of_matrix(A))
    report = lt.check_adjoint(of_matrix(A, A.T * [[1, 1], [-1, 1]]))
    assert not report
    assert f"F has {2 * scale:.12g}, the conjugate transpose of the adjoint has -" in report.details


@pytest.mark.parametrize("dtype", ["float32", "float16", "complex64"])
def test_small_and_large_entries_in_narrow_dtypes(dtype: str) -> None:
    info = np.finfo(dtype)
    for scale in (float(info.tiny) * 4, float(info.max) / 64):
        A = (scale * np.array([[1, 2], [0, 1]])).astype(dtype)
        assert lt.check_adjoint(of_matrix(A))
        assert not lt.check_adjoint(of_matrix(A, A.T * np.array([[1, 1], [-1, 1]], dtype)))


def test_an_entry_far_below_the_largest_has_its_own_scale() -> None:
    report = lt.check_exact(of_matrix(np.diag([1e8, 1, 1e-8]), np.diag([1e8, 1, -1e-8])))
    assert not report
    assert "the adjoint has -1e-08, the conjugate transpose of F has 1e-08" in report.details
    lt.assert_exact(of_matrix(np.diag([1e8, 1, 1e-8])))
    # Rounding of a large entry is not an error of a small one beside it.
    lt.assert_exact(of_matrix(np.array([[1e8, 1.0]]), np.array([[1e8], [1.0 + 1e-9]])))


def clipped(x: np.ndarray) -> np.ndarray:
    return np.clip(x, -100.0, 100.0)


def dead(x: np.ndarray) -> np.ndarray:
    return np.where(abs(x) < 1e-3, 0.0, x)


@pytest.mark.parametrize("forward", [clipped, dead])
@pytest.mark.parametrize("check", [lt.check_linear, lt.check_exact])
def test_what_is_linear_at_one_scale_alone(
    check: Callable[..., lt.Report], forward: Callable[[Any], Any]
) -> None:
    report = check(pair(forward, forward, 3, 3))
    assert not report
    assert "F(2**" in report.details


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
@pytest.mark.parametrize("check", [lt.check_linear, lt.check_exact])
def test_what_changes_far_from_one(check: Callable[..., lt.Report], dtype: str) -> None:
    bounded: list[Callable[[Any], Any]] = [
        lambda x: np.where(abs(x) > 1e8, x / (abs(x) + (x == 0)), x),
        lambda x: np.where(abs(x) < 1e-8, 0, x),
    ]
    for forward in bounded:
        assert not check(pair(forward, forward, 8, 8, dtype=dtype))


@pytest.mark.parametrize("trials", [1, 3])
@pytest.mark.parametrize("check", [lt.check_adjoint, lt.check_linear, lt.check_exact])
def test_a_result_that_the_next_call_overwrites(
    check: Callable[..., lt.Report], trials: int
) -> None:
    scratch = np.empty(3)
    report = check(
        pair(lambda x: np.multiply(x, 2, out=scratch), lambda y: 2 * y, 3, 3),
        **({} if check is lt.check_exact else {"trials": trials}),
    )
    assert not report
    assert (
        "the forward function overwrote the result y of its call before: a result must be memory "
        "of its own" in report.details
    )


def test_a_plan_whose_result_is_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan on one worker's backend is held to the same."""

    def main(backend: Any) -> str:
        op = 2 * linop.identity(Space([Region("a", 3), Region("b", 3, 1)]))
        plan = op.compile(backend)
        scratch = np.empty(3)
        whole = type(plan).__call__

        def wrong(self: Any, x: Any = None, *, out: Any = None) -> Any:
            scratch[...] = whole(self, x)
            return scratch

        monkeypatch.setattr(type(plan), "__call__", wrong)
        backend.vector(op.domain, np.zeros(3)).norm()  # both have the wrong one
        report = str(lt.check_adjoint(plan, backend))
        backend.vector(op.domain, np.zeros(3)).norm()
        return report

    assert all("overwrote the result" in said for said in linop.launch(main, workers=2))


# Tolerances


def test_a_tolerance_for_an_ill_conditioned_operator() -> None:
    rng = np.random.default_rng(0)
    U, V = (np.linalg.qr(rng.standard_normal((30, 30)))[0] for _ in range(2))
    A = U @ np.diag(np.logspace(0, -9, 30)) @ V
    inverse = pair(lambda x: np.linalg.solve(A, x), lambda y: np.linalg.solve(A.T, y), 30, 30)
    assert not lt.check_adjoint(inverse)
    report = lt.check_adjoint(inverse, tolerance=1e-6)
    assert report
    assert report.tolerance == 1e-6
    assert "tolerance=1e-06)" in str(report)
    assert not lt.check_exact(inverse)
    assert lt.check_exact(inverse, tolerance=1e-3)
    assert not lt.check_inverse(of_matrix(A), inverse, tolerance=1e-30)
    for check in (lt.check_linear, lt.check_unitary, lt.check_self_adjoint):
        assert check(of_matrix(np.eye(3)), tolerance=1e-9).tolerance == 1e-9


@pytest.mark.parametrize("tolerance", [-1.0, np.nan, np.inf, "1e-3"])
def test_what_is_no_tolerance(tolerance: Any) -> None:
    with pytest.raises(ArgumentError, match=r"tolerance: .* given, a relative error expected"):
        lt.check_adjoint(of_matrix(np.eye(2)), tolerance=tolerance)


# Maps that are not linear, in short formats and beside zeros

BENT: dict[str, Callable[[Any], Any]] = {
    "absolute": np.abs,
    "positive": lambda x: np.maximum(x, 0),
    "one positive": lambda x: np.r_[x[:-1], np.maximum(x[-1:], 0)],
    "whole": np.round,
    "clipped": lambda x: np.clip(x, -1, 1),
}


@pytest.mark.parametrize("name", BENT)
@given(
    dtype=st.sampled_from([np.float16, ml_dtypes.bfloat16, np.float32, np.float64]),
    n=st.one_of(st.integers(1, 40), st.sampled_from([300, 3_000, 20_000])),
)
def test_bent_maps_are_found_in_short_formats(name: str, dtype: Any, n: int) -> None:
    """The tolerance of a sum of so many terms is larger than any error of theirs."""
    bent = pair(BENT[name], BENT[name], n, n, dtype=dtype)
    assert not lt.check_linear(bent)
    assert not lt.check_linear(bent, seed=12, trials=8)


@given(n=st.integers(2, 60), data=st.data(), dtype=st.sampled_from("fdgFD"))
def test_maps_that_are_others_at_zeros_are_found(n: int, data: st.DataObject, dtype: str) -> None:
    """No random vector has zeros, and unit vectors have little else."""
    watched, lost = data.draw(st.permutations(range(n)))[:2]

    def skipping(x: np.ndarray) -> np.ndarray:
        y = x.copy()
        if x[watched] == 0:
            y[lost] = 0
        return y

    bent = pair(skipping, skipping, n, n, dtype=dtype)
    assert not lt.check_exact(bent)
    assert not lt.check_linear(bent, trials=20)


# What is right passes at every size

N = 200_000


def sums() -> lt.Pair:
    return pair(lambda x: x.sum(keepdims=True), lambda y: np.full(N, y[0]), N, 1)


def running_sums() -> lt.Pair:
    return pair(np.cumsum, lambda y: np.cumsum(y[::-1])[::-1].copy(), N, N)


def single_sums() -> lt.Pair:
    return pair(
        lambda x: x.sum(keepdims=True),
        lambda y: np.full(N, y[0], np.float32),
        N,
        1,
        dtype=np.float32,
    )


def cosines() -> lt.Pair:
    return pair(
        lambda x: scipy.fft.dct(x, norm="ortho"), lambda y: scipy.fft.idct(y, norm="ortho"), N, N
    )


def transforms() -> lt.Pair:
    return pair(np.fft.fft, lambda y: np.fft.ifft(y) * N, N, N, dtype=complex)


def differences() -> lt.Pair:
    return pair(np.diff, lambda y: np.r_[-y[:1], -np.diff(y), y[-1:]], N, N - 1)


def sparse() -> lt.Pair:
    return of_matrix(scipy.sparse.random(3000, 9000, density=0.01, format="csr", random_state=0))


def dense() -> lt.Pair:
    return of_matrix(np.random.default_rng(0).standard_normal((700, 900)))


def dense_single() -> lt.Pair:
    return of_matrix(np.random.default_rng(0).standard_normal((700, 900)).astype(np.float32))


def dense_half() -> lt.Pair:
    return of_matrix(np.random.default_rng(0).standard_normal((70, 90)).astype(np.float16))


def dense_half_large() -> lt.Pair:
    return of_matrix(np.random.default_rng(0).standard_normal((500, 400)).astype(np.float16))


def dense_bfloat16() -> lt.Pair:
    A = np.random.default_rng(0).standard_normal((300, 200)).astype(ml_dtypes.bfloat16)
    forward, adjoint = (lambda x, B=B: (B @ x).astype(B.dtype) for B in (A, A.T))
    return pair(forward, adjoint, 200, 300, dtype=A.dtype)


def running_half_sums() -> lt.Pair:
    return pair(np.cumsum, lambda y: np.cumsum(y[::-1])[::-1].copy(), 2000, 2000, dtype=np.float16)


def badly_scaled() -> lt.Pair:
    return pair(*[lambda x: x * np.logspace(-40, 40, N)] * 2, N, N)


RIGHT = (
    sums,
    running_sums,
    single_sums,
    cosines,
    transforms,
    differences,
    sparse,
    dense,
    dense_single,
    dense_half,
    dense_half_large,
    dense_bfloat16,
    running_half_sums,
    badly_scaled,
)


@pytest.mark.parametrize("operator", RIGHT, ids=lambda f: f.__name__)
def test_what_is_right_passes_at_every_size(operator: Callable[[], lt.Pair]) -> None:
    for seed in range(3):
        report = lt.check_adjoint(operator(), seed=seed)
        assert report, str(report)
        # Far from the tolerance, which is so no matter of luck.
        assert report.error <= report.tolerance / 4
    lt.assert_linear(operator())


# Integers: products wrap, and zeros test nothing

INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
DOTS = (lt.check_adjoint, lt.check_dot_exact)


def some_matrix(dtype: str, seed: int, shape: tuple[int, int] = (6, 8)) -> np.ndarray:
    low = 0 if dtype[0] == "u" else -5
    return np.random.default_rng(seed).integers(low, 6, shape).astype(dtype)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_that_wrap_are_right(dtype: str) -> None:
    """Maps of integers are linear modulo 2**bits, and adjoint to each other modulo 2**bits."""
    for seed in range(8):
        op = linop.local_operators.matrix(some_matrix(dtype, seed))
        for check in DOTS:
            report = check(op)
            assert report, str(report)
    line = linop.identity(Space([Region("a", 3), Region("b", 2)], dtype))
    for factor in (100, 2 ** (8 * np.dtype(dtype).itemsize - 2)):
        for check in (*DOTS, lt.check_self_adjoint, lt.check_exact, lt.check_linear):
            for backend in ("reference", "threads"):
                report = check(factor * line, backend=backend)
                assert report, str(report)


@pytest.mark.parametrize(("dtype", "factor"), [("int64", 2**62), ("uint64", 2**63 + 5)])
def test_integers_that_wrap_on_several_workers(dtype: str, factor: int) -> None:
    """Sums of several regions' inner products need more than 64 bits."""
    space = Space([Region("a", 3), Region("b", 3), Region("c", 3, 1)], dtype)

    def main(backend: Any) -> list[lt.Report]:
        return [lt.check_adjoint(factor * linop.identity(space), backend, seed=s) for s in range(9)]

    for reports in linop.launch(main, workers=2):
        assert all(reports), str(reports)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_an_entry_that_is_off_by_one_in_integers(dtype: str) -> None:
    A = some_matrix(dtype, 19)
    for j in range(8):
        for i in range(6):
            B = A.T.copy()
            B[j, i] += 1
            places = f"from x[{j}] (worker 0) to y[{i}] (worker 0): F has "
            for check in DOTS:
                assert places in check(of_matrix(A, B), trials=1).details
            assert places in lt.check_equal(of_matrix(A), of_matrix(B.T), trials=1).details


@pytest.mark.parametrize("dtype", INTEGERS)
def test_entries_that_are_off_by_half_the_range_of_integers(dtype: str) -> None:
    """One vanishes where it is multiplied by even numbers, a pair where the numbers are odd."""
    half = np.array(2 ** (8 * np.dtype(dtype).itemsize - 1), np.uint64).astype(dtype)
    A = np.zeros((2, 3), dtype)
    B = A.T.copy()
    B[1, 1] = half
    place = "from x[1] (worker 0) to y[1] (worker 0): F has 0"
    for check in DOTS:
        assert place in check(of_matrix(A, B), trials=2).details
    assert place in lt.check_equal(of_matrix(A), of_matrix(B.T), trials=2).details
    B[0, 1] = half
    for check in DOTS:
        assert not check(of_matrix(A, B), trials=30)
    assert not lt.check_equal(of_matrix(A), of_matrix(B.T), trials=30)


@given(
    st.sampled_from(INTEGERS), st.integers(1, 6), st.integers(1, 6), st.integers(1, 2), st.data()
)
def test_blocks_that_are_off_by_a_multiple_of_half_the_range(
    dtype: str, rows: int, columns: int, bits: int, data: st.DataObject
) -> None:
    """Or of a quarter."""
    r, c = data.draw(st.integers(1, rows)), data.draw(st.integers(1, columns))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    A = rng.integers(0, 100, (rows, columns)).astype(dtype)
    B = A.T.copy()
    B[:c, :r] += np.array(2 ** (8 * A.itemsize - bits), np.uint64).astype(dtype)
    for check in DOTS:
        assert not check(of_matrix(A, B), trials=6)
    assert not lt.check_equal(of_matrix(A), of_matrix(B.T), trials=6)


@pytest.mark.parametrize("dtype", [one for one in INTEGERS if one.startswith("u")])
@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_unsigned_maps_that_bend_in_their_highest_bits(dtype: str, n: int) -> None:
    top = 8 * np.dtype(dtype).itemsize - 1
    one, half = (np.array(2**k, dtype) for k in (0, top))

    def squares(x: np.ndarray) -> np.ndarray:
        return x + x * x * (half >> one)

    def second_bits(x: np.ndarray) -> np.ndarray:
        return x + half * (x >> one & one)

    for forward in (squares, second_bits):
        for seed in range(0, 60, 6):
            assert not lt.check_linear(pair(forward, forward, n, n, dtype=dtype), seed=seed)


def test_no_zeros_are_drawn_in_floating_point() -> None:
    for dtype in ("float32", "complex64"):
        for seed in range(40):
            report = lt.check_dot_exact(
                of_matrix(np.ones((1, 1), dtype), np.full((1, 1), 2, dtype)), seed=seed, trials=1
            )
            assert "from x[0] (worker 0) to y[0] (worker 0): F has 1" in report.details


def test_a_missing_conjugate_is_seen_on_whole_numbers() -> None:
    for seed in range(40):
        A = np.array([[1j]])
        assert not lt.check_dot_exact(of_matrix(A, A), seed=seed, trials=1)


def test_integer_functions_that_are_not_linear_are_said_to_be() -> None:
    def forward(x: np.ndarray) -> np.ndarray:
        return np.where(x % 2 == 0, x, 3 * x)

    report = lt.check_adjoint(pair(forward, forward, 3, 3, dtype=np.int8))
    assert not report
    assert report.details.endswith("one of the two is not linear (check_linear)")


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "int64", "complex64"])
def test_absolute_values_of_one_element_are_not_linear(dtype: str) -> None:
    def absolute(x: np.ndarray) -> np.ndarray:
        return abs(x).astype(x.dtype)

    for seed in range(20):
        assert not lt.check_linear(pair(absolute, None, 1, 1, dtype=dtype), seed=seed, trials=1)
    for rows in (1, 6):
        A = np.ones((rows, 1), dtype)
        report = lt.check_exact(
            pair(lambda x, A=A: A @ absolute(x), lambda y, A=A: A.T @ y, 1, rows, dtype=dtype)
        )
        assert not report
