"""Validation of the users' arrays as contents of regions, and the messages of its errors.

Arrays are not copied; other sequences of numbers are converted to new arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from linop.errors import ArgumentError, DTypeError, ShapeError
from linop.spaces.region import Region
from linop.spaces.scalars import Array, conversion, name_of, of_dtype, plain


def accepted(
    region: Region, dtype: np.dtype[Any], array: npt.ArrayLike, kind: type[Any] = np.ndarray
) -> Array:
    """Check that an array has the region's shape and the space's dtype, and return it.

    Args:
        array: of shape `region.shape` and of `dtype`, or a sequence of numbers to convert.
        kind: the array class expected; device backends pass their own.

    Raises:
        ShapeError, DTypeError: the shape or the dtype differs.
        ArgumentError: the array is in another memory (host or device), or of a subclass of
            `numpy.ndarray` (`linop.spaces.scalars.plain`).
    """
    where = f"array of region {region.name!r}"
    given: Any = array if hasattr(array, "dtype") else of_dtype(array, dtype, where)
    given = plain(given, where)
    if isinstance(given, np.generic):
        given = np.asarray(given)
    if not (isinstance(given, np.ndarray) or isinstance(given, kind) or _is_on_device(given)):
        raise ArgumentError(
            f"{where}: {name_of(type(given))} given, {name_of(kind)} expected{conversion(given)}"
        )
    if given.shape != region.shape:
        raise ShapeError(f"{where}: shape {given.shape} given, {region.shape} expected")
    if given.dtype != dtype:
        mend = _converted(given.dtype, dtype)
        raise DTypeError(f"{where}: dtype {given.dtype} given, {dtype} expected; {mend}")
    if not isinstance(given, kind):
        wanted, found = name_of(kind), name_of(type(given))
        lives = "" if region.memory == "default" else f" in {region.memory} memory"
        mend = _moved(given, kind)
        raise ArgumentError(f"{where}{lives}: {found} given, {wanted} expected{mend}")
    checked: Array = given
    return checked


def _converted(given: np.dtype[Any], dtype: np.dtype[Any]) -> str:
    """Advice for an error: a conversion between two dtypes, or why there is none."""
    if np.can_cast(given, dtype, "same_kind"):
        return f"convert it with .astype({dtype.name!r})"
    lost = {"f": "fractions", "V": "fractions", "c": "imaginary parts", "i": "signs"}
    if given.kind not in lost:
        return "give numbers"
    return f"a conversion would lose {lost[given.kind]}: build the space with dtype={given.name!r}"


def _moved(array: Any, kind: type) -> str:
    """Advice for an error: the copy between host and device memory that is missing; else empty."""
    if isinstance(array, np.ndarray) and hasattr(kind, "__cuda_array_interface__"):
        return f"; copy it to the device with {kind.__module__.split('.')[0]}.asarray"
    return conversion(array) if kind is np.ndarray else ""


def _is_on_device(array: Any) -> bool:
    """True for arrays in device memory; torch's tensors are none, wherever they are."""
    kind = type(array)
    torch = kind.__module__.partition(".")[0] == "torch"
    return hasattr(kind, "__cuda_array_interface__") and not torch
