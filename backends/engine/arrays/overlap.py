"""Overlap of the elements of strided arrays, with each other and within one array, for the checks
of ``out`` (`linop.backends.engine.arrays.arguments`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np

from linop.spaces.scalars import Array

_FEW = 12


def overlaps_itself(array: Array) -> bool:
    """True if two elements of an array share a byte; exact. Only shape and strides are used."""
    if array.flags.c_contiguous or array.flags.f_contiguous or not array.size:
        return False
    axes = [(abs(s), n) for s, n in zip(array.strides, array.shape, strict=True) if n > 1]
    return not _nested(axes, array.itemsize) and _meets_itself(axes, array.itemsize)


def _nested(axes: Sequence[tuple[int, int]], itemsize: int) -> bool:
    """True if the stride of each axis exceeds the extent of all axes of smaller strides."""
    reach = itemsize
    for step, many in sorted(axes):
        if step < reach:
            return False
        reach += (many - 1) * step
    return True


def _meets_itself(axes: Sequence[tuple[int, int]], itemsize: int) -> bool:
    """True if two elements overlap. Let an axis be the first on which they differ, by 1 to n - 1;
    on later axes they differ by -(n - 1) to n - 1. For each axis, ``numpy.shares_memory`` decides
    if such a difference of addresses is less than an item."""
    middle = sum(step * many for step, many in axes)
    for k, (step, many) in enumerate(axes):
        others = axes[k + 1 :]
        first = middle + step - sum(s * (n - 1) for s, n in others)
        shape = (many - 1, *(2 * n - 1 for _, n in others))
        differences = _Somewhere(first, shape, (step, *(s for s, _ in others)), itemsize)
        nothing = _Somewhere(middle, (), (), itemsize)
        if np.shares_memory(np.asarray(differences), np.asarray(nothing)):
            return True
    return False


class _Somewhere:
    """Array interface of an address, which is never read."""

    def __init__(
        self, start: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int
    ) -> None:
        self.__array_interface__ = {
            "data": (start + itemsize, True),
            "shape": shape,
            "strides": strides,
            "typestr": f"|V{itemsize}",
            "version": 3,
        }


def near(arrays: Sequence[Array]) -> Iterator[tuple[int, int]]:
    """Pairs of indices of arrays whose address ranges overlap. All pairs of at most `_FEW` arrays,
    since the exact check is faster then, and of a device's."""
    if len(arrays) <= _FEW or not all(isinstance(array, np.ndarray) for array in arrays):
        yield from combinations(range(len(arrays)), 2)
        return
    spans = sorted((*_span(array), k) for k, array in enumerate(arrays) if array.size)
    open_: list[tuple[int, int]] = []
    for low, high, k in spans:
        open_ = [(end, j) for end, j in open_ if end > low]
        yield from ((j, k) for _, j in open_)
        open_.append((high, k))


def _span(array: Array) -> tuple[int, int]:
    """Addresses of an array's first byte, and after its last one."""
    start: int = array.__array_interface__["data"][0]
    if array.flags.forc:
        return start, start + array.nbytes
    ways = [(n - 1) * s for n, s in zip(array.shape, array.strides, strict=True)]
    back, on = (sum(way for way in ways if (way > 0) is up) for up in (False, True))
    return start + back, start + on + array.itemsize
