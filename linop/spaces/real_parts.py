"""Numbers as rows of their real parts: two of a complex number, one of a real one.

Over the real numbers, complex arrays of shape (…) are real ones of shape (…, 2), in the same
memory, and the real inner product Re <v, w> is theirs. Real arrays get shape (…, 1) beside them, so
that operators between both are operators of one dtype. These are views: nothing is copied.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from linop.errors import DTypeError
from linop.spaces.scalars import Array


def parts_of(dtype: np.dtype[Any]) -> tuple[int, np.dtype[Any]]:
    """The number of real parts of a number, and their dtype."""
    return (2, np.zeros(0, dtype).real.dtype) if dtype.kind == "c" else (1, dtype)


def complex_of(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The complex dtype whose parts are of a real dtype; a complex dtype itself.

    Raises:
        DTypeError: there is none.
    """
    found = np.result_type(dtype, np.complex64) if dtype.kind in "fc" else dtype
    if found != dtype and parts_of(found) != (2, dtype):
        raise DTypeError(f"no complex dtype has parts of dtype {dtype}; float32 and float64 have")
    return found


def in_parts(array: Any) -> Any:
    """A view of an array of any array module as rows of real parts, of shape (…, 2) or (…, 1)."""
    rows = array.reshape(*array.shape, 1)
    return rows.view(parts_of(array.dtype)[1]) if array.dtype.kind == "c" else rows


def of_parts(rows: Any, dtype: np.dtype[Any]) -> Any:
    """The array of a dtype whose parts these are; a view, unless the parts of a complex number are
    not side by side."""
    if dtype.kind == "c" and rows.strides[-1] != rows.itemsize and rows.size:
        rows = rows.copy()
    return (rows.view(dtype) if dtype.kind == "c" else rows)[..., 0]


def arrays_in_parts(arrays: dict[str, Array]) -> dict[str, Array]:
    """`in_parts` of each array."""
    return {name: in_parts(array) for name, array in arrays.items()}


def arrays_of_parts(arrays: dict[str, Array], dtype: np.dtype[Any]) -> dict[str, Array]:
    """`of_parts` of each array."""
    return {name: of_parts(rows, dtype) for name, rows in arrays.items()}
