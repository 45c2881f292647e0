"""Copies and sums of boxes in strided arrays, bound once and run often.

A `View` says where: a box of the array that a `Cell` holds during a run. `copying` and `adding`
give what does the work, without looking anything up again where both arrays are fixed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from linop.region import Subset
from linop.scalars import Array, Scalar

Work = Callable[[], Any]

_NARROW = 64
"""Bytes of a contiguous run up to which NumPy copies runs faster as one wide item each: two columns
of float32 and 2,050 rows took 21 µs as they are, 7.6 as eight-byte items."""
_TALL = 16
"""Rows from which either is worth its own overhead."""
_WIDE: dict[int, np.dtype[Any]] = {
    2: np.dtype("u2"),
    4: np.dtype("u4"),
    8: np.dtype("u8"),
    16: np.dtype("c16"),
}


class Cell:
    """The memory of one region during a run: one array for good, or another one every run."""

    __slots__ = ("array", "fixed", "shape")

    def __init__(self, shape: tuple[int, ...], array: Array | None = None) -> None:
        self.shape = shape
        self.array: Array = array  # type: ignore[assignment]  # set before every run, if not here
        self.fixed = array is not None


@dataclass(frozen=True)
class View:
    """A box of a cell's array, or all of it (None)."""

    cell: Cell
    shape: tuple[int, ...]
    index: tuple[Any, ...] | None = None

    @staticmethod
    def of(cell: Cell, subset: Subset) -> View:
        return View(cell, subset.shape, None if subset.whole else subset.index)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def cut(self, axis: int, start: int, stop: int) -> View:
        """The part of the box between two indices along an axis."""
        slices = list(self.index or (*(slice(0, n) for n in self.shape), ...))
        first = slices[axis].start
        slices[axis] = slice(first + start, first + stop)
        shape = (*self.shape[:axis], stop - start, *self.shape[axis + 1 :])
        return View(self.cell, shape, tuple(slices))

    def get(self) -> Array:
        """The view, of the array of this run."""
        array = self.cell.array
        return array if self.index is None else array[self.index]

    @property
    def getter(self) -> Callable[[], Array]:
        """`get`, bound."""
        cell, index = self.cell, self.index
        if index is None:
            return lambda: cell.array
        return lambda: cell.array[index]

    @property
    def contiguous(self) -> bool:
        """Whether the box is one contiguous run of a C-contiguous array."""
        ones = 0
        while ones < len(self.shape) and self.shape[ones] == 1:
            ones += 1
        return self.shape[ones + 1 :] == self.cell.shape[ones + 1 :]


def fixed(array: Array) -> View:
    """The view of an array that stays."""
    return View(Cell(array.shape, array), array.shape)


def copying(target: View, source: View, dtype: np.dtype[Any], coefficient: Scalar = 1) -> Work:
    """What sets a box to a multiple of another."""
    if coefficient != 1:
        return _bound(target, source, partial(_multiply, coefficient))
    if not (_is_narrow(target, dtype) or _is_narrow(source, dtype)):
        return _bound(target, source, np.copyto)
    if target.cell.fixed and source.cell.fixed:
        return partial(np.copyto, *_widened(target.get(), source.get()))
    return _bound(target, source, _copy_narrow)


def adding(target: View, source: View, dtype: np.dtype[Any], coefficient: Scalar = 1) -> Work:
    """What adds a multiple of a box to another. Narrow runs are summed in a contiguous array: with
    two columns of 2,048 rows NumPy's loop over both took 42 µs, the way there and back 18."""
    if coefficient != 1:
        scaled = fixed(np.empty(source.shape, dtype))
        return _all(copying(scaled, source, dtype, coefficient), adding(target, scaled, dtype))
    if not _is_narrow(target, dtype):
        return _bound(target, source, _add)
    total = fixed(np.empty(target.shape, dtype))
    return _all(
        copying(total, target, dtype),
        _bound(total, source, _add),
        copying(target, total, dtype),
    )


def summing(target: View, first: View, second: View) -> Work:
    """What sets a box to the sum of two others, in one pass."""
    if target.cell.fixed and first.cell.fixed and second.cell.fixed:
        return partial(np.add, first.get(), second.get(), target.get())
    to, a, b = target.getter, first.getter, second.getter
    return lambda: np.add(a(), b(), to())


def _all(*works: Work) -> Work:
    def run() -> None:
        for work in works:
            work()

    return run


def _bound(target: View, source: View, do: Callable[[Array, Array], Any]) -> Work:
    if target.cell.fixed and source.cell.fixed:
        return partial(do, target.get(), source.get())
    if target.cell.fixed:
        array, get = target.get(), source.getter
        return lambda: do(array, get())
    to, of = target.cell, source.cell
    if target.index is None and source.index is None:
        return lambda: do(to.array, of.array)
    get_target, get_source = target.getter, source.getter
    return lambda: do(get_target(), get_source())


def _add(target: Array, source: Array) -> None:
    np.add(target, source, out=target)


def _multiply(coefficient: Scalar, target: Array, source: Array) -> None:
    np.multiply(source, target.dtype.type(coefficient), out=target)


def _is_narrow(view: View, dtype: np.dtype[Any]) -> bool:
    """Whether a box has many short runs of several elements."""
    columns = view.shape[-1] if view.shape else 0
    short = 1 < columns <= _NARROW // dtype.itemsize
    return short and view.size >= _TALL * columns and not view.contiguous


def _copy_narrow(target: Array, source: Array) -> None:
    np.copyto(*_widened(target, source))


def _widened(target: Array, source: Array) -> tuple[Array, Array]:
    """Both views with each short contiguous run as one item, where they have such runs."""
    runs = target.strides[-1] == source.strides[-1] == target.itemsize
    if not runs:
        return target, source
    width = target.shape[-1] * target.itemsize
    wide: np.dtype[Any] = _WIDE.get(width) or np.dtype((np.void, width))
    return target.view(wide), source.view(wide)
