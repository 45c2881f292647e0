"""`equals` where only rounding differs: UndecidableError, whatever cancels; else an answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import linop
from linop import LinearOperator, Region, Space
from linop.errors import UndecidableError
from linop.local_operators import diagonal, fft, matrix


def pieces(dtype: Any, shape: Any) -> tuple[LinearOperator, LinearOperator, LinearOperator]:
    """A product that is the identity up to rounding, the identity, and zero."""
    space = Space(Region("x", shape), dtype)
    F = fft(space)
    return F.H @ F, linop.identity(space), linop.zero(space, space)


WAYS = {
    "the difference": lambda G, one, zero: (G - one, zero),
    "its opposite": lambda G, one, zero: (one - G, zero),
    "the other way round": lambda G, one, zero: (zero, G - one),
    "a multiple": lambda G, one, zero: (3 * (G - one) / 7, zero),
    "a product": lambda G, one, zero: ((G - one) @ (G + one), zero),
    "nested": lambda G, one, zero: (G - (one - (G - one)), zero),
    "simplified": lambda G, one, zero: ((G - one).simplify(), zero),
    "a direct sum": lambda G, one, zero: (
        linop.direct_sum(G - one),
        linop.direct_sum(zero),
    ),
    "beside one that differs not at all": lambda G, one, zero: (G - one + one, one),
    "squared": lambda G, one, zero: (G @ G - G, zero),
}


@given(
    st.sampled_from(sorted(WAYS)),
    st.sampled_from([np.complex64, np.complex128, np.clongdouble]),
    st.sampled_from([2, 3, 5, 6, (2, 3)]),
)
def test_rounding_is_not_decided_whatever_cancels(way: str, dtype: Any, shape: Any) -> None:
    left, right = WAYS[way](*pieces(dtype, shape))
    with pytest.raises(UndecidableError, match="may be rounding"):
        left.equals(right)
    assert not (left + linop.identity(left.domain) / 1000).equals(right)


@given(st.integers(1, 5), st.integers(0, 2**32), st.sampled_from([np.float32, np.float64]))
def test_what_is_different_stays_so_beside_what_cancels(n: int, seed: int, dtype: Any) -> None:
    """D + D' - D' is D, with a D' that is 10**16 times as large, for D of known numbers."""
    rng = np.random.default_rng(seed)
    space = Space(Region("x", n), dtype)
    D = diagonal(rng.integers(1, 9, n).astype(dtype), space)
    A = matrix(rng.standard_normal((n, n)).astype(dtype), space)
    zero = linop.zero(space, space)
    for op in (D, A):
        sum_ = (1e16 * op + op) - 1e16 * op
        assert not sum_.equals(zero)
        assert sum_.equals(op)
        assert (op - op).equals(zero)
        assert not op.equals(1.01 * op)
    assert not (A @ D).equals(A @ (D + linop.identity(space) / 1000))


def test_rounded_entries_of_every_format() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for dtype in (ml_dtypes.bfloat16, np.float16, np.float32, np.float64, ml_dtypes.float8_e4m3):
        space = Space(Region("x", 1), dtype)
        one = linop.identity(space)
        A = matrix([[1 / 3]], space)
        for left, right in ((3 * A, one), (3 * A - one, linop.zero(space, space))):
            with pytest.raises(UndecidableError, match="may be rounding"):
                left.equals(right)
        assert not (3 * A).equals(2 * one)
