"""Overlap of the elements of a strided array with each other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from linop.spaces.scalars import Array


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
