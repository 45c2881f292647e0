"""Sums that do not depend on the order of their terms: beside exact arithmetic, bit by bit."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from linop.errors import DTypeError
from linop.spaces.reproducible_sums import _CHUNK, exact_sum, rounded_total, tree_sum
from support.contracts.reproducible_sums import bits, drawn_terms, kinds

DTYPES = "float16", "float32", "float64", "complex64", "complex128"


def nearest(exact: Fraction, dtype: np.dtype[Any]) -> Any:
    """The nearest number of a float dtype, ties to even, by trying: no function of the library."""
    info = np.finfo(dtype)
    step = Fraction(float(info.smallest_subnormal))
    while step * 2 ** (info.nmant + 1) <= abs(exact):
        step *= 2
    rounded = round(exact / step) * step  # Python rounds ties to even
    if abs(rounded) > Fraction(float(info.max)):
        return dtype.type(math.copysign(math.inf, -1 if exact < 0 else 1))
    return dtype.type(float(rounded))


@given(st.sampled_from(DTYPES), st.integers(1, 17), kinds, st.integers(0, 2**32))
@example("float64", 8, "ties", 0)
@example("float32", 8, "cancelling", 0)
def test_an_exact_sum_is_rounded_once_in_any_order(
    dtype: str, many: int, kind: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    terms = drawn_terms(rng, np.dtype(dtype), many, 40, kind)
    before = [term.copy() for term in terms]
    total = exact_sum(*terms)
    assert total.dtype == dtype
    for a, b in zip(terms, before, strict=True):
        assert bits(a) == bits(b)
    assert bits(exact_sum(*(terms[k] for k in rng.permutation(many)))) == bits(total)
    parts = [x.view(x.real.dtype) for x in terms]
    for k, found in enumerate(total.view(parts[0].dtype)):
        column = [float(x[k]) for x in parts]
        if all(map(math.isfinite, column)):
            wanted = nearest(sum(map(Fraction, column)), found.dtype)
            assert found == wanted or (found == 0 == wanted), (column, found, wanted)
            assert rounded_total(column, found.dtype) == found
        else:  # as a plain sum
            with np.errstate(invalid="ignore"):
                plain = np.sum([x for x in column if not math.isfinite(x)])
            assert np.array_equal(found, found.dtype.type(plain), equal_nan=True)


@pytest.mark.parametrize("many", [3, 4, 9])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_what_is_left_decides_ties(dtype: str, many: int) -> None:
    info = np.finfo(dtype)
    rng = np.random.default_rng(many)
    half = 2.0 ** -(info.nmant + 1)
    for below in range(info.nmant + 2, min(3 * info.nmant, 24 - int(info.minexp))):
        # Often they cancel, but for their last bits.
        least = rng.choice([-1.0, 1.0], (many - 2, 12)) * 2.0**-below
        least *= rng.choice([1.0, 1 + 2 * half], least.shape)
        first = 1 + 2 * half * rng.integers(2**4, size=12)
        terms = np.array([first, np.full(12, half), *least]).astype(dtype)
        wanted = [nearest(sum(map(Fraction, map(float, x))), np.dtype(dtype)) for x in terms.T]
        assert exact_sum(*rng.permutation(terms)).tolist() == [float(x) for x in wanted], below


def test_the_sign_of_zero_is_that_of_a_plain_sum() -> None:
    for dtype in ("float32", "float64"):
        zeros = [np.array([-0.0, -0.0, 0.0, 1.0], dtype) for _ in range(3)]
        zeros[1][1] = 0.0
        zeros[2][3] = -2.0
        assert np.signbit(exact_sum(*zeros)).tolist() == [True, False, False, False]


def test_what_overflows_on_the_way_does_not() -> None:
    big = np.finfo(np.float64).max
    columns = np.array([[big, big, -big], [big, big, 1.0], [-big, -big, -big], [big, -big, -1.0]])
    assert exact_sum(*columns.T.copy()).tolist() == [big, math.inf, -math.inf, -1.0]


def test_shapes_of_few_elements_and_strides() -> None:
    for shape in ((), (0,), (3, 0), (2, 3)):
        x = np.ones(shape)
        for add in (exact_sum, tree_sum):
            total = add(x, x, x)
            assert isinstance(total, np.ndarray) and total.shape == shape and (total == 3).all()
            assert not np.shares_memory(add(x), x)
    x = np.arange(24.0).reshape(4, 6)
    assert (exact_sum(x[:, ::2], x[:, 1::2], x[:, ::2]) == x[:, ::2] * 2 + x[:, 1::2]).all()


def test_more_elements_than_are_summed_at_a_time() -> None:
    terms = np.random.default_rng(0).standard_normal((4, 50_001))
    wanted = [math.fsum(column) for column in terms.T.tolist()]
    assert exact_sum(*terms).tolist() == wanted
    assert terms.sum(axis=0).tolist() != wanted


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("many", [1, 2, 3])
def test_at_the_ends_of_chunks(dtype: str, many: int) -> None:
    """Neighbours of a chunk's end are summed as they are alone; NaN and infinities stay where they
    are, and terms may be views of one array, in any order of memory."""
    size = _CHUNK + 3
    rng, near = np.random.default_rng(many), slice(_CHUNK - 3, _CHUNK + 3)
    every = rng.standard_normal((2 * size, many)).astype(dtype)
    every[2 * _CHUNK, 0], every[2 * _CHUNK - 2, 0], every[2 * _CHUNK + 2] = np.nan, np.inf, -0.0
    terms = [every[::2, k] for k in range(many)]
    total = exact_sum(*terms)
    assert bits(total[near]) == bits(exact_sum(*(term[near].copy() for term in terms)))
    assert np.flatnonzero(~np.isfinite(total)).tolist() == [_CHUNK - 1, _CHUNK]
    assert np.signbit(total[_CHUNK + 1]) and total[_CHUNK + 1] == 0


@given(st.integers(0, 3), st.integers(0, 3), st.integers(0, 2**32))
def test_complete_parts_of_a_tree_may_be_summed_before(low: int, high: int, seed: int) -> None:
    terms = drawn_terms(np.random.default_rng(seed), np.dtype("float64"), 2 ** (low + high), 9, "")
    own = 2**low
    parts = [tree_sum(*terms[k : k + own]) for k in range(0, len(terms), own)]
    assert bits(tree_sum(*parts)) == bits(tree_sum(*terms))


def test_a_tree_of_an_odd_number() -> None:
    a, b, c, d, e = (np.array([x]) for x in (1e16, 1.0, 1.0, 1.0, -1e16))
    assert tree_sum(a, b, c, d, e) == ((a + b) + (c + d)) + e
    assert tree_sum(a, b, c) == (a + b) + c


@pytest.mark.parametrize("dtype", ["longdouble", "clongdouble", "int64"])
def test_other_dtypes_have_no_exact_sum(dtype: str) -> None:
    with pytest.raises(DTypeError, match=r"sums='exact' is of float16, float32, float64, complex"):
        exact_sum(np.ones(2, dtype))
