"""Where large arrays begin in a page of memory: all of ours at the same place.

The C library copies some kilobytes up to a megabyte by an instruction (``rep movsb``) that is slow
on some processors for some targets (https://lunnova.dev/articles/ryzen-slow-short-rep-mov).
Measured here, on an AMD EPYC: up to twenty times slower where the target begins 16 bytes after the
source, modulo the size of a page; not at 0, nor from 32 on. Arrays of a power of two of bytes that
are allocated one after the other are 16 bytes apart by that measure.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from linop.spaces.scalars import Array

PAGE = 4096
"""Bytes of a page; and from which on an array is large."""
BEGIN = PAGE // 2
"""Where large arrays begin: not near the start, where others often do."""


def placed(start: int, size: int) -> int:
    """The first place for so many bytes from an address on."""
    return start if size < PAGE else start + (BEGIN - start) % PAGE


def memory(shape: tuple[int, ...], dtype: np.dtype[Any]) -> tuple[Array, int]:
    """New memory for an array: bytes, to the array's last one, and where in them it begins."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + (PAGE if size >= PAGE else 0), np.uint8)
    start = placed(raw.ctypes.data, size) - raw.ctypes.data
    return raw[: start + size], start


def empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """A new array."""
    if math.prod(shape) * dtype.itemsize < PAGE:
        return np.empty(shape, dtype)
    raw, start = memory(shape, dtype)
    return np.ndarray(shape, dtype, raw.data, start)
