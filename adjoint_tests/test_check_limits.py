"""Faults that checks see: errors far below others, rare faults, results that do not last; and that
right operators pass at every size and scale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.fft
import scipy.sparse

import linop
import linop.testing as lt
from linop import Region, Space
from linop.errors import ArgumentError
from linop.testing import pair

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
    return of_matrix(scipy.sparse.random_array((3000, 9000), density=0.01, rng=0).tocsr())


def dense() -> lt.Pair:
    return of_matrix(np.random.default_rng(0).standard_normal((700, 900)))


def dense_single() -> lt.Pair:
    return of_matrix(np.random.default_rng(0).standard_normal((700, 900)).astype(np.float32))


def dense_half() -> lt.Pair:
    return of_matrix(np.random.default_rng(0).standard_normal((70, 90)).astype(np.float16))


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
