"""Buffers and views: the memory that the instructions of a run read and write, as data.

`linop.backends.engine.execution.emitter` turns them into expressions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from linop.backends.engine.execution.numbers import Number
from linop.spaces.region import Subset
from linop.spaces.scalars import Array


class Buffer:
    """Memory of one array during a run: the fixed `array`, or one that differs from run to run.

    Attributes:
        array: the fixed array; None if it differs from run to run.
        on_host: True for host memory in a plan whose arrays are on a device.
        piece_of: the flat buffer that this one is a piece of, and the offset in it, in elements.
        within: the view of another buffer whose memory this is.
        choice: arrays, and the number of the one that a run uses.
    """

    __slots__ = ("array", "choice", "on_host", "piece_of", "shape", "within")

    def __init__(
        self,
        shape: tuple[int, ...],
        array: Array | None = None,
        on_host: bool = False,
        piece_of: tuple[Buffer, int] | None = None,
        choice: tuple[Sequence[Array], Number] | None = None,
    ) -> None:
        self.shape = shape
        self.array = array
        self.on_host = on_host
        self.piece_of = piece_of
        self.choice = choice
        self.within: View | None = None


@dataclass(frozen=True)
class View:
    """A box of a buffer's array; all of it if `index` is None."""

    buffer: Buffer
    shape: tuple[int, ...]
    index: tuple[Any, ...] | Number | None = None

    @staticmethod
    def of(buffer: Buffer, subset: Subset) -> View:
        return View(buffer, subset.shape, None if subset.whole else subset.index)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def fixed(self) -> bool:
        """True if the buffer's array is fixed."""
        return self.buffer.array is not None

    @property
    def memory(self) -> Buffer:
        """Buffer that owns the memory: the view's own, or the one that this is a piece of."""
        return self.buffer.piece_of[0] if self.buffer.piece_of else self.buffer

    @property
    def slices(self) -> tuple[slice, ...]:
        """Slices of the view in the array of its `memory`."""
        if self.buffer.piece_of:
            begin = self.buffer.piece_of[1]
            return (slice(begin, begin + self.size),)
        whole = tuple(slice(0, n) for n in self.shape)
        return self.index[: len(whole)] if isinstance(self.index, tuple) else whole

    def part(self, axis: int, start: int, stop: int) -> tuple[Any, ...]:
        """Index, in the buffer's array, of the box's elements from `start` to `stop` on an axis."""
        index = self.index if isinstance(self.index, tuple) else None
        slices = list(index or (*(slice(0, n) for n in self.shape), ...))
        first = slices[axis].start
        slices[axis] = slice(first + start, first + stop)
        return tuple(slices)

    def at(self, index: Number) -> View:
        """The part of the buffer's array at an index that is known in the run."""
        return View(self.buffer, self.shape, index)

    def of_array(self, array: Array) -> Array:
        """The box of a given array."""
        return array if self.index is None else array[self.index]  # type: ignore[index]

    def get(self) -> Array:
        """The box of the fixed array."""
        assert self.buffer.array is not None
        return self.of_array(self.buffer.array)

    @property
    def run(self) -> int:
        """Elements in each contiguous run of the box, in a C-contiguous array."""
        size = 1
        for n, whole in zip(reversed(self.shape), reversed(self.buffer.shape), strict=True):
            size *= n
            if n != whole:
                break
        return size

    @property
    def contiguous(self) -> bool:
        """True if the box is one contiguous run of a C-contiguous array."""
        return self.run == self.size


def whole(buffer: Buffer) -> View:
    """View of a whole buffer."""
    return View(buffer, buffer.shape)


def fixed(array: Array, on_host: bool = False) -> View:
    """View of a whole fixed array."""
    return whole(Buffer(array.shape, array, on_host))


def cut(flat: View, offset: int, shape: tuple[int, ...]) -> View:
    """View of a piece of a flat buffer, reshaped; `offset` in elements."""
    buffer, end = flat.buffer, offset + math.prod(shape)
    memory, begin = buffer.piece_of or (buffer, 0)
    array = None if buffer.array is None else buffer.array[offset:end].reshape(shape)
    return whole(Buffer(shape, array, buffer.on_host, (memory, begin + offset)))
