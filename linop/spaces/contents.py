"""Contents of regions: which of the users' arrays are accepted, and what is said to the others.

Nothing is copied but what is no array yet.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from linop.errors import ArgumentError, DTypeError, ShapeError
from linop.spaces.region import Region
from linop.spaces.scalars import Array, of_dtype, plain


def accepted(
    region: Region, dtype: np.dtype[Any], array: npt.ArrayLike, kind: type[Any] = np.ndarray
) -> Array:
    """The array, if it can be the content of the region in a space of that dtype.

    Args:
        kind: what arrays are; a backend on a device has others.

    Raises:
        ShapeError, DTypeError: it cannot. ArgumentError: it is not in this kind of memory, or
            more than an array (`linop.spaces.scalars.plain`).
    """
    where = f"array of region {region.name!r}"
    given: Any = array if hasattr(array, "dtype") else of_dtype(array, dtype, where)
    given = plain(given, where)
    if isinstance(given, np.generic):
        given = np.asarray(given)
    if given.shape != region.shape:
        raise ShapeError(f"{where}: shape {given.shape} given, {region.shape} expected")
    if given.dtype != dtype:
        mend = _converted(given.dtype, dtype)
        raise DTypeError(f"{where}: dtype {given.dtype} given, {dtype} expected; {mend}")
    if not isinstance(given, kind):
        wanted, found = (f"{k.__module__}.{k.__qualname__}" for k in (kind, type(given)))
        lives = "" if region.memory == "default" else f" in {region.memory} memory"
        mend = _moved(given, kind)
        raise ArgumentError(f"{where}{lives}: {found} given, {wanted} expected{mend}")
    checked: Array = given
    return checked


def _converted(given: np.dtype[Any], dtype: np.dtype[Any]) -> str:
    """How numbers of one dtype become another's, or why they do not."""
    if np.can_cast(given, dtype, "same_kind"):
        return f"convert it with .astype({dtype.name!r})"
    lost = {"f": "fractions", "V": "fractions", "c": "imaginary parts", "i": "signs"}
    if given.kind not in lost:
        return "give numbers"
    return f"a conversion would lose {lost[given.kind]}: build the space with dtype={given.name!r}"


def _moved(array: Any, kind: type) -> str:
    """How an array comes into the memory that is wanted, where that is another one."""
    there, here = (hasattr(k, "__cuda_array_interface__") for k in (type(array), kind))
    if here and isinstance(array, np.ndarray):
        return f"; copy it to the device with {kind.__module__.split('.')[0]}.asarray"
    return "; copy it to main memory with .get()" if there and kind is np.ndarray else ""
