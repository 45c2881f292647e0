"""Conversion of users' numbers to a dtype: scalars, and sequences passed as arrays."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, TypeGuard

import numpy as np
import numpy.typing as npt

from linop.errors import ArgumentError, DTypeError, LinopError, ShapeError
from linop.spaces.exact import Exact, Gaussian, exact, inverse, rounded, shown, wrapped
from linop.spaces.float_formats import cast, limits, native, overflows_at

Array = npt.NDArray[Any]
Scalar = int | float | complex

_RANK = {"b": 0, "i": 0, "u": 0, "f": 1, "V": 1, "c": 2}
"""Rank of each dtype kind: a kind holds numbers of its rank and below; V is bfloat16's kind."""


def numeric_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """The dtype of a space's elements.

    Raises:
        DTypeError: it is no dtype, or not one of numbers; or one of another package that is no
            floating format with a zero, such as ml_dtypes' int4 and float8_e8m0fnu.
    """
    try:
        given: np.dtype[Any] = np.dtype(dtype)
    except (TypeError, ValueError):
        raise DTypeError(f"a space holds numbers; given {dtype!r}, which is no dtype") from None
    # Kind V is also that of numbers from other packages, such as ml_dtypes.bfloat16.
    if given.kind not in "iufcV" or given.type is np.void:
        raise DTypeError(f"a space holds numbers; given dtype {given}")
    if not native(given):
        _check_format(given)
    return given


def _check_format(dtype: np.dtype[Any]) -> None:
    """Check that a dtype of another package is a floating format that has a zero.

    Raises:
        DTypeError: it is not.
    """
    try:
        limits(dtype)
    except (ValueError, TypeError):
        raise DTypeError(
            f"a space holds numbers of NumPy's dtypes, or of a floating format of another package; "
            f"given {dtype}, whose whole numbers do not wrap as NumPy's do: int8 and uint8 are the "
            f"shortest"
        ) from None
    if np.zeros(1, dtype).astype(np.float64)[0] != 0:
        raise DTypeError(f"a space holds zero; given dtype {dtype}, which has none")


def holds_kind(dtype: np.dtype[Any], given: np.dtype[Any]) -> bool:
    """True if numbers of the dtype `given` are of the kind of `dtype` or of a narrower one: whole,
    real, complex."""
    return _RANK.get(given.kind, 3) <= _RANK[dtype.kind]


def sparse_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of sparse matrices: float64 for 16-bit and shorter floats, which SciPy lacks."""
    short = dtype.kind not in "iuc" and dtype.itemsize < 4
    return np.dtype(np.float64) if short else dtype


def is_scalar(value: Any) -> TypeGuard[Scalar | Exact]:
    """True if a value is a single number of Python, NumPy or `linop.spaces.exact`."""
    return isinstance(value, int | float | complex | np.number | Fraction | Gaussian)


def as_exact(scalar: Any) -> Exact:
    """The exact value of a scalar.

    Raises:
        ArgumentError: not a number, or not a finite one.
    """
    if not is_scalar(scalar):
        raise ArgumentError(f"expected a scalar, given {scalar!r}")
    if isinstance(scalar, float | complex | np.inexact) and not np.isfinite(scalar):
        raise ArgumentError(f"a scalar multiple needs a finite number, given {scalar!r}")
    return exact(scalar)


def check_scalar(scalar: Any, dtype: np.dtype[Any]) -> Exact:
    """The exact value of a scalar, after a check that a space of `dtype` is closed under it.

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
    """The scalar rounded to `dtype`, as a factor of arrays; raises as `check_scalar`."""
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
    """Convert numbers to a new array of a dtype: integers exactly, others rounded to nearest.

    Raises:
        DTypeError: not numbers; fractions or complex numbers for a dtype without them; integers
            that it cannot represent exactly; or numbers out of range. Others: as `array_of`.
    """
    array = array_of(values, what)
    if array.dtype == dtype:
        return array.copy()
    given = f"an array of {array.dtype}" if isinstance(values, np.ndarray) else repr(values)
    if not holds_kind(dtype, array.dtype):
        raise DTypeError(f"{what}: {given} given, numbers of dtype {dtype} expected")
    found = cast(array, dtype)
    if array.dtype != dtype and not _holds(found, array):
        raise DTypeError(f"{what}: {given} given, of which {dtype} does not hold every number")
    return found


def _holds(found: Array, array: Array) -> bool:
    """True if the conversion lost no number: integers are equal, finite floats are finite."""
    if array.dtype.kind not in "iu":
        lost = np.isfinite(array) & ~np.isfinite(found)
        if not native(found.dtype):  # some formats saturate
            wide = array.astype(np.float64) if array.dtype.kind == "V" else array
            beyond = np.abs(wide) >= float(overflows_at(found.dtype))
            lost |= np.where(np.isfinite(array), beyond, ~_same(array, found))
        return not np.any(lost)
    wide = found.astype(np.complex128 if found.dtype.kind == "c" else np.float64)
    if array.size and max(int(array.max()), -int(array.min())) > 2**53:
        wide = found.astype(object) if found.dtype.kind in "iufc" else wide.astype(object)
        array = array.astype(object)
    return bool(np.all(wide == array))


def _same(array: Array, found: Array) -> Any:
    """True where numbers are equal, or both are not a number."""
    with np.errstate(over="ignore"):
        a, b = array.astype(np.float64), found.astype(np.float64)
    return (a == b) | (np.isnan(a) & np.isnan(b))


def array_of(values: npt.ArrayLike, what: str) -> Array:
    """The array of `values`, which is not copied if it is one.

    Raises:
        ShapeError: sequences of different lengths, or of too many dimensions. ArgumentError: as
            `plain`; or an array of another package that does not convert, as one on a device.
    """
    values = plain(values, what)
    given = f"{what}: {name_of(type(values))} given, numpy.ndarray expected{conversion(values)}"
    try:
        array = np.asarray(values)
    except LinopError:
        raise
    except ValueError as error:
        raise ShapeError(
            f"{what}: {values!r} given, sequences of equal lengths expected; {error}"
        ) from None
    except (TypeError, RuntimeError) as error:
        raise ArgumentError(f"{given} ({error})") from None
    if array.dtype == object and not array.ndim and hasattr(values, "dtype"):
        raise ArgumentError(given)  # NumPy took it for one object
    return array


def conversion(values: Any) -> str:
    """Advice for an error: how another package's array becomes NumPy's; empty if unknown."""
    kind = type(values)
    if kind.__module__.partition(".")[0] == "torch":
        return (
            "; linop.autograd.apply(op, x) and linop.autograd.Module(op) take tensors, and have "
            "derivatives; x.detach().cpu().numpy() is an array without them"
        )
    if hasattr(kind, "__cuda_array_interface__"):
        return "; copy it to main memory with .get()"
    ways = {"toarray": "x.toarray()", "to_numpy": "x.to_numpy()", "__array__": "np.asarray(x)"}
    way = next((way for name, way in ways.items() if hasattr(kind, name)), None)
    return f"; give {way}" if way else ""


def name_of(kind: type) -> str:
    """The full name of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


def plain(values: Any, what: str) -> Any:
    """The values unchanged; subclasses of `numpy.ndarray` are refused, since their meaning would
    be lost.

    Raises:
        ArgumentError: a masked array, a matrix, an array with units, or another subclass except
            `numpy.memmap`.
    """
    if not isinstance(values, np.ndarray) or type(values) in (np.ndarray, np.memmap):
        return values
    kind = type(values)
    masked = isinstance(values, np.ma.MaskedArray)
    mend = ".filled(value) says what masked elements are" if masked else "np.asarray(x) says so"
    raise ArgumentError(
        f"{what}: {name_of(kind)} given, numpy.ndarray expected, for what "
        f"it says beside its numbers would be lost; if these are meant, {mend}"
    )
