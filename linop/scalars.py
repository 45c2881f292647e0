"""Numbers that a dtype can hold: scalars, and sequences that users pass for arrays."""

from __future__ import annotations

import math
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from linop.errors import ArgumentError, DTypeError

Array = npt.NDArray[Any]
Scalar = int | float | complex

_RANK = {"b": 0, "i": 0, "u": 0, "f": 1, "V": 1, "c": 2}
"""Which kinds of dtype hold the numbers of which; V is that of other packages' (bfloat16)."""


def sparse_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype itself, or float64 for the short floating ones, of which SciPy has no matrices."""
    short = dtype.kind not in "iuc" and dtype.itemsize < 4
    return np.dtype(np.float64) if short else dtype


def is_scalar(value: Any) -> TypeGuard[Scalar]:
    """Whether a value is one number."""
    return isinstance(value, int | float | complex | np.number)


def check_scalar(scalar: Any, dtype: np.dtype[Any]) -> Scalar:
    """The scalar as a Python number, if a space of this dtype is closed under it.

    Raises:
        ArgumentError: not a number, or not a finite one. DTypeError: complex for a real space, or a
            fraction, or out of range, for an integer one.
    """
    if not is_scalar(scalar):
        raise ArgumentError(f"expected a scalar, given {scalar!r}")
    value: Any = scalar.item() if isinstance(scalar, np.generic) else scalar
    if not math.isfinite(abs(value)):
        raise ArgumentError(f"a scalar multiple needs a finite number, given {scalar!r}")
    if isinstance(value, complex) and dtype.kind != "c":
        if value.imag:
            raise DTypeError(f"complex scalar {value} on a space of dtype {dtype}")
        value = value.real
    if dtype.kind in "iu":
        if value != int(value):
            raise DTypeError(f"fraction {value} on a space of dtype {dtype}")
        limits = np.iinfo(dtype)
        if not limits.min <= value <= limits.max:
            raise DTypeError(f"scalar {value} is out of range on a space of dtype {dtype}")
        value = int(value)
    result: Scalar = value
    return result


def of_dtype(values: npt.ArrayLike, dtype: np.dtype[Any], what: str) -> Array:
    """Numbers (not an array) as an array of a dtype.

    Raises:
        DTypeError: they are no numbers, or fractions or complex where the dtype holds none.
    """
    array = np.asarray(values)
    if _RANK.get(array.dtype.kind, 3) > _RANK[dtype.kind]:
        raise DTypeError(f"{what}: {values!r} given, numbers of dtype {dtype} expected")
    return array.astype(dtype)
