"""Floating formats: their limits, and arrays rounded to them once.

Other packages register formats with NumPy, such as ml_dtypes' bfloat16. NumPy knows neither their
limits nor more than one road to them, through float32, which rounds twice.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def native(dtype: np.dtype[Any]) -> bool:
    """True for NumPy's own dtypes. (`numpy.dtype.isbuiltin` is 0 for them, too, once they have been
    pickled.)"""
    return dtype.type.__module__ == "numpy"


def limits(dtype: np.dtype[Any]) -> Any:
    """The `numpy.finfo` of a floating or complex dtype (of its parts), or what the package that has
    the dtype gives for it: ``eps``, ``max``, ``minexp``, ``maxexp``, ``smallest_subnormal``.

    Raises:
        ValueError: the dtype is no floating one.
    """
    if native(dtype):
        return np.finfo(dtype)
    return _package_limits(dtype)


@cache
def _package_limits(dtype: np.dtype[Any]) -> Any:
    finfo = getattr(import_module(dtype.type.__module__), "finfo", np.finfo)
    return finfo(dtype)


def machine_epsilon(dtype: np.dtype[Any]) -> float:
    """The distance from 1 to the next number of a dtype; 0 for integers."""
    return 0.0 if dtype.kind in "iu" else float(limits(dtype).eps)


def overflows_at(dtype: np.dtype[Any]) -> Fraction:
    """The least number that rounds to nothing that a format holds: half a unit in the last place
    above its largest."""
    most, eps = Fraction(float(limits(dtype).max)), Fraction(machine_epsilon(dtype))
    return most + Fraction(2) ** (math.frexp(float(most))[1] - 1) * eps / 2


def cast(values: Array, dtype: np.dtype[Any]) -> Array:
    """A new array of a dtype. A floating one rounds each number once, to nearest, half to even.
    Numbers out of range become what the format has for them.

    Args:
        values: numbers, of a dtype of the same kind or of a narrower one.
    """
    with np.errstate(all="ignore"):
        if values.dtype.kind in "fc" and dtype.kind in "fV":
            if not native(dtype) and values.dtype.itemsize > 4:
                values = _odd(_odd(values, np.float64), np.float32)
            elif dtype.itemsize < 4 and values.dtype.itemsize > 8:
                values = _odd(values, np.float64)
        return values.astype(dtype)


def _odd(values: Array, narrow: type[Any]) -> Array:
    """Numbers in a narrower format, rounded to odd: those between two of its numbers become the one
    with an odd significand, so that rounding again, to at least two bits less, is rounding once."""
    if values.dtype.itemsize <= np.dtype(narrow).itemsize:
        return values
    near = values.astype(narrow)
    bits: Array = near.view(np.int64 if narrow is np.float64 else np.int32)
    between = (near.astype(values.dtype) != values) & ~np.isnan(values) & (bits % 2 == 0)
    toward = np.where(near.astype(values.dtype) < values, np.inf, -np.inf).astype(narrow)
    return np.where(between, np.nextafter(near, toward), near)
