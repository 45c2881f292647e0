"""Copies and sums of boxes in strided arrays, as emitted lines
(`linop.backends.execution.emitter`), and overlap of an array with itself.

A `View` is a box of the array in a `Cell`. Views of fixed arrays are created when the source is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from linop.backends.execution.emitter import Code
from linop.spaces.region import Subset
from linop.spaces.scalars import Array, Scalar

_NARROW = 512
"""Largest contiguous run, in bytes, that NumPy copies faster as one wide item: a copy of 2,050 rows
of two float32 took 21 µs as it is, 7.6 µs as eight-byte items; one of 128 rows of 64 took 2.7 and
1.3 µs."""
_TALL = 16
"""Smallest number of rows for wide items if both views are created at binding."""
_TALLER = 256
"""Smallest number of rows for wide items if a view is created at every run."""
_WIDE: dict[int, np.dtype[Any]] = {
    2: np.dtype("u2"),
    4: np.dtype("u4"),
    8: np.dtype("u8"),
    16: np.dtype("c16"),
}


class Cell:
    """Memory of one region during a run: a fixed `array`, or one that differs from run to run, in
    the local variable `name`. `apart`: in host memory, while the plan's arrays are on a device.
    `within`: the flat cell that this one is a piece of, and its offset in elements."""

    __slots__ = ("apart", "array", "name", "shape", "within")

    def __init__(
        self,
        shape: tuple[int, ...],
        name: str = "",
        array: Array | None = None,
        apart: bool = False,
        within: tuple[Cell, int] | None = None,
    ) -> None:
        self.shape = shape
        self.name = name
        self.array = array
        self.apart = apart
        self.within = within


@dataclass(frozen=True)
class View:
    """A box of a cell's array; all of it if `index` is None."""

    cell: Cell
    shape: tuple[int, ...]
    index: tuple[Any, ...] | None = None

    @staticmethod
    def of(cell: Cell, subset: Subset) -> View:
        return View(cell, subset.shape, None if subset.whole else subset.index)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def fixed(self) -> bool:
        """True if the cell's array is fixed."""
        return self.cell.array is not None

    @property
    def memory(self) -> Cell:
        """Cell that owns the memory: the view's own, or the one that this is a piece of."""
        return self.cell.within[0] if self.cell.within else self.cell

    def part(self, axis: int, start: int, stop: int) -> tuple[Any, ...]:
        """Index, in the cell's array, of the box's elements from `start` to `stop` on an axis."""
        slices = list(self.index or (*(slice(0, n) for n in self.shape), ...))
        first = slices[axis].start
        slices[axis] = slice(first + start, first + stop)
        return tuple(slices)

    def of_array(self, array: Array) -> Array:
        """The box of a given array."""
        return array if self.index is None else array[self.index]

    def get(self) -> Array:
        """The box of the fixed array."""
        assert self.cell.array is not None
        return self.of_array(self.cell.array)

    def array(self, code: Code) -> str:
        """Expression of the cell's array."""
        return code.name(self.cell.array) if self.fixed else self.cell.name

    def text(self, code: Code) -> str:
        """Expression of the view."""
        if self.fixed:
            return code.name(self.get())
        return self.cell.name + ("" if self.index is None else f"[{code.name(self.index)}]")

    def place(self, code: Code) -> str:
        """Expression of the view as the target of an assignment, which costs half of
        ``numpy.copyto``."""
        if self.fixed:
            return f"{code.name(self.get())}[...]"
        return f"{self.cell.name}[{'...' if self.index is None else code.name(self.index)}]"

    @property
    def run(self) -> int:
        """Elements in each contiguous run of the box, in a C-contiguous array."""
        size = 1
        for n, whole in zip(reversed(self.shape), reversed(self.cell.shape), strict=True):
            size *= n
            if n != whole:
                break
        return size

    @property
    def contiguous(self) -> bool:
        """True if the box is one contiguous run of a C-contiguous array."""
        return self.run == self.size


def fixed(array: Array, apart: bool = False) -> View:
    """View of a whole fixed array."""
    return View(Cell(array.shape, array=array, apart=apart), array.shape)


def cut(buffer: View, offset: int, shape: tuple[int, ...]) -> View:
    """View of a piece of a flat buffer, reshaped; `offset` in elements."""
    end, flat = offset + math.prod(shape), buffer.cell
    memory, begin = flat.within or (flat, 0)
    array = None if flat.array is None else flat.array[offset:end].reshape(shape)
    text = f"{flat.name}[{offset}:{end}].reshape({shape})"
    return View(Cell(shape, text, array, flat.apart, (memory, begin + offset)), shape)


def copying(
    code: Code, target: View, source: View, dtype: np.dtype[Any], coefficient: Scalar = 1
) -> list[str]:
    """Lines that set a box to a multiple of another."""
    if coefficient != 1:
        scale = code.name(dtype.type(coefficient))
        return [f"multiply({source.text(code)}, {scale}, {target.text(code)})"]
    both = target.fixed and source.fixed
    rows = _TALL if both else _TALLER
    if not any(_is_narrow(code, view, dtype, rows) for view in (target, source)):
        return [f"{target.place(code)} = {source.text(code)}"]
    if both:
        to, of = map(code.name, _widened(target.get(), source.get()))
        return [f"{to}[...] = {of}"]
    return [f"{code.name(_copy_narrow)}({target.text(code)}, {source.text(code)})"]


def adding(
    code: Code, target: View, source: View, dtype: np.dtype[Any], coefficient: Scalar = 1
) -> list[str]:
    """Lines that add a multiple of a box to another. Narrow runs are summed in a contiguous array:
    with 2,048 rows of two columns NumPy's strided sum took 42 µs, the copies there and back with a
    contiguous sum 18 µs."""
    if coefficient != 1:
        at_once = code.arrays.multiple_added(dtype, coefficient)
        if at_once is not None:
            return [f"{code.name(at_once)}({target.text(code)}, {source.text(code)})"]
        scaled = fixed(code.arrays.empty(source.shape, dtype))
        scale = copying(code, scaled, source, dtype, coefficient)
        return scale + adding(code, target, scaled, dtype)
    if not _is_narrow(code, target, dtype, _TALL):
        to = code.local()
        return [f"{to} = {target.text(code)}", f"add({to}, {source.text(code)}, {to})"]
    total = fixed(code.arrays.empty(target.shape, dtype))
    return [
        *copying(code, total, target, dtype),
        *adding(code, total, source, dtype),
        *copying(code, target, total, dtype),
    ]


def summing(code: Code, target: str, first: View, second: View) -> list[str]:
    """Lines that set a box to the sum of two others, in one pass."""
    return [f"add({first.text(code)}, {second.text(code)}, {target})"]


def _is_narrow(code: Code, view: View, dtype: np.dtype[Any], rows: int) -> bool:
    """True if a box has many short runs of several elements, which are copied faster as one item
    each."""
    if not code.arrays.wide_items:
        return False
    columns = view.shape[-1] if view.shape else 0
    short = 1 < columns <= _NARROW // dtype.itemsize
    return short and view.size >= rows * columns and not view.contiguous


def _copy_narrow(target: Array, source: Array) -> None:
    to, of = _widened(target, source)
    to[...] = of


def _widened(target: Array, source: Array) -> tuple[Array, Array]:
    """Both views with each short contiguous run as one wide item; unchanged if rows are not
    contiguous in both."""
    runs = target.strides[-1] == source.strides[-1] == target.itemsize
    if not runs:
        return target, source
    width = target.shape[-1] * target.itemsize
    wide: np.dtype[Any] = _WIDE.get(width) or np.dtype((np.void, width))
    return target.view(wide), source.view(wide)


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
