"""Alignment of large arrays: all buffers of linop begin at the same offset within a memory page.

The C library copies some kilobytes up to a megabyte by an instruction (``rep movsb``) that is slow
on some processors for some targets (https://lunnova.dev/articles/ryzen-slow-short-rep-mov).
Measured on an AMD EPYC: up to twenty times slower if the target begins 16 bytes after the source,
modulo the page size; not at offset 0, nor from 32 on. Arrays of a power of two of bytes that are
allocated one after the other differ by those 16 bytes.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from linop.spaces.scalars import Array

PAGE = 4096
"""Bytes of a page; arrays of at least this size count as large."""
BEGIN = PAGE // 2
"""Offset of large arrays in a page, in bytes: far from the page's start, near which other arrays
often begin."""


def placed(start: int, size: int) -> int:
    """First aligned address, from `start` on, for `size` bytes; `start` itself if these are less
    than a page."""
    return start if size < PAGE else start + (BEGIN - start) % PAGE


def memory(shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[Array, int]:
    """New aligned memory for an array: a uint8 array that ends with its last byte, and the array's
    offset in it."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + (PAGE if size >= PAGE else 0), np.uint8)
    start = placed(raw.ctypes.data, size) - raw.ctypes.data
    return raw[: start + size], start


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """A new, uninitialised array; aligned if it is large."""
    if math.prod(shape) * dtype.itemsize < PAGE:
        return np.empty(shape, dtype)
    raw, start = memory(shape, dtype)
    return np.ndarray(shape, dtype, raw.data, start)
