"""Numbers that a dtype can hold: scalars, and sequences that users pass for arrays."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from linop.errors import ArgumentError, DTypeError
from linop.spaces.exact import Exact, Gaussian, exact, inverse, rounded, shown, wrapped

Array = npt.NDArray[Any]
Scalar = int | float | complex

_RANK = {"b": 0, "i": 0, "u": 0, "f": 1, "V": 1, "c": 2}
"""Which kinds of dtype hold the numbers of which; V is that of other packages' (bfloat16)."""


def sparse_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype itself, or float64 for the short floating ones, of which SciPy has no matrices."""
    short = dtype.kind not in "iuc" and dtype.itemsize < 4
    return np.dtype(np.float64) if short else dtype


def is_scalar(value: Any) -> TypeGuard[Scalar | Exact]:
    """Whether a value is one number."""
    return isinstance(value, int | float | complex | np.number | Fraction | Gaussian)


def as_exact(scalar: Any) -> Exact:
    """A scalar as the number that it is exactly.

    Raises:
        ArgumentError: not a number, or not a finite one.
    """
    if not is_scalar(scalar):
        raise ArgumentError(f"expected a scalar, given {scalar!r}")
    if isinstance(scalar, float | complex | np.inexact) and not np.isfinite(scalar):
        raise ArgumentError(f"a scalar multiple needs a finite number, given {scalar!r}")
    return exact(scalar)


def check_scalar(scalar: Any, dtype: np.dtype[Any]) -> Exact:
    """The scalar as it is exactly, if a space of this dtype is closed under it.

    Raises:
        ArgumentError: not a number, or not a finite one. DTypeError: complex for a real space, a
            fraction for an integer one, or out of range.
    """
    value = as_exact(scalar)
    rounded(value, dtype)
    if wrapped(value, dtype) != value:
        raise DTypeError(f"scalar {shown(value)} is out of range on a space of dtype {dtype}")
    return value


def factor_of(scalar: Any, dtype: np.dtype[Any]) -> Any:
    """The scalar as what arrays of a dtype are multiplied by; see `check_scalar`."""
    return rounded(check_scalar(scalar, dtype), dtype)


def reciprocal(scalar: Any) -> Exact:
    """1 / scalar, exactly.

    Raises:
        ArgumentError: not a finite number, or zero.
    """
    value = as_exact(scalar)
    if value == 0:
        raise ArgumentError(f"division by zero, given {scalar!r}")
    return inverse(value)


def of_dtype(values: npt.ArrayLike, dtype: np.dtype[Any], what: str) -> Array:
    """Numbers as a new array of a dtype: whole ones exactly, others as near as it has them.

    Raises:
        DTypeError: they are no numbers, or fractions or complex where the dtype holds none, or
            the dtype lacks one of them. ArgumentError: as `plain`.
    """
    array = np.asarray(plain(values, what))
    given = f"an array of {array.dtype}" if isinstance(values, np.ndarray) else repr(values)
    if _RANK.get(array.dtype.kind, 3) > _RANK[dtype.kind]:
        raise DTypeError(f"{what}: {given} given, numbers of dtype {dtype} expected")
    with np.errstate(all="ignore"):
        found = array.astype(dtype)
    if not _holds(found, array):
        raise DTypeError(f"{what}: {given} given, of which {dtype} does not hold every number")
    return found


def _holds(found: Array, array: Array) -> bool:
    """True if numbers that were converted are still there."""
    if array.dtype.kind not in "iu":
        lost: Any = np.isfinite(array) & ~np.isfinite(found) if array.dtype.kind in "fc" else False
        return not np.any(lost)
    wide = found.astype(np.complex128 if found.dtype.kind == "c" else np.float64)
    if array.size and max(int(array.max()), -int(array.min())) > 2**53:
        wide = found.astype(object) if found.dtype.kind in "iufc" else wide.astype(object)
        array = array.astype(object)
    return bool(np.all(wide == array))


def plain(values: Any, what: str) -> Any:
    """The values, unless they are an array of a subclass, which may mean more than its numbers.

    Raises:
        ArgumentError: they are a masked array, one with units, a matrix.
    """
    if not isinstance(values, np.ndarray) or type(values) in (np.ndarray, np.memmap):
        return values
    kind = type(values)
    masked = isinstance(values, np.ma.MaskedArray)
    mend = ".filled(value) says what masked elements are" if masked else "np.asarray(x) says so"
    raise ArgumentError(
        f"{what}: {kind.__module__}.{kind.__qualname__} given, numpy.ndarray expected, for what "
        f"it says beside its numbers would be lost; if these are meant, {mend}"
    )
