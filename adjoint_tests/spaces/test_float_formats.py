"""Numbers rounded to a floating format: once, to nearest, half to even; and what none holds."""

from __future__ import annotations

import pickle
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import linop
from linop import Region, Space
from linop.errors import DTypeError
from linop.spaces.exact import rounded
from linop.spaces.float_formats import cast
from linop.spaces.scalars import of_dtype

FORMATS = [
    np.dtype(getattr(ml_dtypes, name))
    for name in dir(ml_dtypes)
    if name.startswith(("float", "bfloat")) and name != "float8_e8m0fnu"
] + [np.dtype(np.float16)]


def all_values(dtype: np.dtype[Any]) -> np.ndarray:
    """Every finite number of a format, sorted."""
    bits = np.arange(2 ** (8 * dtype.itemsize), dtype=f"u{dtype.itemsize}")
    if dtype.itemsize == 1 and "float8" not in dtype.name:
        bits = bits[: 2 ** int(dtype.name[5])]
    values = bits.view(dtype).astype(np.float64)
    return np.unique(values[np.isfinite(values)])


VALUES = {dtype: all_values(dtype) for dtype in FORMATS}


@example(np.dtype(ml_dtypes.bfloat16), 0.5, Fraction(1, 2**40))
@given(
    st.sampled_from(FORMATS),
    st.floats(0, 1),
    st.fractions(-1, 1).map(lambda f: f / 2**30) | st.just(Fraction(0)),
)
def test_rounding_is_done_once(dtype: np.dtype[Any], where: float, more: Fraction) -> None:
    """Half way between two numbers, and a little more or less."""
    values = VALUES[dtype]
    k = int(where * (len(values) - 2))
    low, high = Fraction(values[k]), Fraction(values[k + 1])
    number = (low + high) / 2 + more * (high - low)
    wanted = low if number < (low + high) / 2 else high
    half = number == (low + high) / 2
    found = [rounded(number, dtype)]
    if Fraction(float(number)) == number:
        given = np.array([float(number)])
        found += [cast(given, dtype)[0], of_dtype(given, dtype, "")[0]]
        found.append(cast(given.astype(np.longdouble), dtype)[0])
    for value in found:
        assert value.dtype == dtype
        assert Fraction(float(value)) in ((low, high) if half else (wanted,))
    assert len({float(value) for value in found}) == 1


@given(st.sampled_from(FORMATS), st.floats(allow_nan=False))
def test_what_is_out_of_range_is_refused(dtype: np.dtype[Any], number: float) -> None:
    most = float(VALUES[dtype][-1])
    try:
        found = of_dtype([number], dtype, "")
    except DTypeError:
        assert abs(number) > most
    else:
        assert abs(float(found[0]) - number) <= most or np.isinf(number)
        if np.isinf(number):
            assert float(found[0]) == number


@pytest.mark.parametrize("name", ["int2", "int4", "uint2", "uint4", "float8_e8m0fnu", "complex32"])
def test_formats_that_are_refused(name: str) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name))
    with pytest.raises(DTypeError, match=r"a space holds"):
        Space(Region("x", 1), dtype)
    with pytest.raises(DTypeError, match=r"a space holds"):
        linop.local_operators.matrix([[0.5]], Space(Region("x", 1), dtype))


@given(st.sampled_from([np.int8, np.int64, np.float32, np.longdouble, complex, ml_dtypes.bfloat16]))
def test_dtypes_that_were_pickled(dtype: Any) -> None:
    """NumPy makes another object of them, of which it does not say that it is built in."""
    again = pickle.loads(pickle.dumps(np.dtype(dtype)))
    one = linop.identity(Space(Region("x", 2), again))
    x = np.ones(2, again)
    assert (linop.local_operators.matrix([[3, 1], [0, 1]], one.domain)(x) == [4, 1]).all()
    assert ((2 * one)(x) == 2).all()
    assert linop.testing.check_adjoint(one)


def test_a_coefficient_of_bfloat16() -> None:
    """The issue's: rounded through float32 it would be 128."""
    one = linop.identity(Space(Region("x", 1), ml_dtypes.bfloat16))
    number = 128.5 + 2**-40
    assert float((number * one)(np.ones(1, ml_dtypes.bfloat16))[0]) == 129
    assert linop.local_operators.matrix([[number]], one.domain).to_matrix()[0, 0] == 129
