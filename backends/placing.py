"""Where large arrays begin in a page of memory: all of ours at the same place.

The C library copies some kilobytes up to a megabyte by an instruction (``rep movsb``) that is slow
on some processors for some targets (https://lunnova.dev/articles/ryzen-slow-short-rep-mov).
Measured here, on an AMD EPYC: up to twenty times slower where the target begins 16 bytes after the
source, modulo the size of a page; not at 0, nor from 32 on. Arrays of a power of two of bytes that
are allocated one after the other are 16 bytes apart by that measure.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np

from linop.scalars import Array

PAGE = 4096
"""Bytes of a page; and from which on an array is large."""
BEGIN = PAGE // 2
"""Where large arrays begin: not near the start, where others often do."""


def placed(start: int, size: int) -> int:
    """The first place for so many bytes from an address on."""
    return start if size < PAGE else start + (BEGIN - start) % PAGE


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """A new array. Its views have it as their base, so that references to it count its users."""
    size = math.prod(shape) * dtype.itemsize
    if size < PAGE:
        return np.empty(shape, dtype)
    raw: Any = np.empty(size + PAGE, np.uint8)
    start = placed(raw.ctypes.data, size) - raw.ctypes.data
    # What is no array: a view's base is the last array on the way to the memory.
    memory: Any = (ctypes.c_char * size).from_buffer(raw, start)
    return np.ndarray(shape, dtype, memory)
