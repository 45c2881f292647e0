"""Buffers of calls of mpi4py, read as elements of memory: which numbers a call sends and receives.

A buffer is given to mpi4py as an array, or as a list of an array, counts, displacements and a
datatype. Here it becomes an `Area`: a piece of memory, and the positions in it of the elements that
are moved, in the order in which they are sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI


class UnreadError(Exception):
    """A buffer cannot be read: the call is not looked at."""


@dataclass
class Area:
    """Elements of memory.

    Attributes:
        memory: flat, with the bytes of the whole buffer in its dtype; keeps it alive.
        positions: of the elements in ``memory``, as many as are moved.
        shape: of the array that was given if all of it is moved, else (count,).
    """

    memory: np.ndarray
    positions: np.ndarray
    shape: tuple[int, ...]

    @property
    def values(self) -> np.ndarray:
        """A copy of the elements, flat."""
        found: np.ndarray = self.memory[self.positions]
        return found

    @property
    def address(self) -> int:
        return address_of(self.memory)

    def part(self, first: int, count: int) -> Area:
        """Some of its elements."""
        return Area(self.memory, self.positions[first : first + count], (count,))

    def chunks(self, counts: Sequence[int]) -> list[Area]:
        """Its elements cut into parts of these sizes."""
        ends = np.cumsum([0, *counts])
        return [self.part(int(a), c) for a, c in zip(ends, counts, strict=False)]


def address_of(array: np.ndarray) -> int:
    """The address of the first byte of an array."""
    found: int = array.__array_interface__["data"][0]
    return found


def is_in_place(spec: Any) -> bool:
    return spec is MPI.IN_PLACE


def area(spec: Any) -> Area:
    """The elements of a buffer that is given without counts for each rank.

    Raises:
        UnreadError: it is no memory of numbers.
    """
    given, count, start, kind = _taken(spec)
    memory, shape = _memory(given)
    if np.ndim(count) or np.ndim(start):
        raise UnreadError("counts for each rank")
    if count is None:
        positions = _positions(memory[int(start or 0) :], kind, None)
    else:
        positions = _positions(memory[int(start or 0) :], kind, int(count))
    if len(positions) == memory.size:
        return Area(memory, positions, shape)
    return Area(memory, positions + int(start or 0), (len(positions),))


def areas(spec: Any, counts: int) -> list[Area]:
    """The elements of a buffer that has a part for each rank.

    Args:
        counts: the number of ranks.

    Raises:
        UnreadError: it is no memory of numbers.
    """
    given, sizes, starts, kind = _taken(spec)
    memory, _ = _memory(given)
    each = _elements_of(kind, memory)
    if each != 1:
        raise UnreadError("a derived datatype with counts")
    if sizes is None:
        sizes = _balanced(memory.size, counts)
    elif isinstance(sizes, int | np.integer):
        sizes = [int(sizes) // counts] * counts
    sizes = [int(one) for one in np.ravel(sizes)]
    starts = np.cumsum([0, *sizes[:-1]]) if starts is None else np.ravel(starts)
    return [
        Area(memory, np.arange(int(a), int(a) + n), (n,))
        for a, n in zip(starts, sizes, strict=True)
    ]


def _balanced(size: int, counts: int) -> list[int]:
    """The counts that mpi4py takes where none are given."""
    least, more = divmod(size, counts)
    return [least + (r < more) for r in range(counts)]


def _taken(spec: Any) -> tuple[Any, Any, Any, Any]:
    """The parts of a buffer: an array, counts, displacements and a datatype, each but the first
    None where it is not given."""
    if not isinstance(spec, list | tuple):
        return spec, None, None, None
    parts = list(spec)
    given, rest = parts[0], parts[1:]
    kind = rest.pop() if rest and isinstance(rest[-1], MPI.Datatype | str) else None
    if isinstance(kind, str):
        kind = None  # a name of the array's own dtype
    counts = rest.pop(0) if rest else None
    starts = rest.pop(0) if rest else None
    if isinstance(counts, tuple) and len(counts) == 2 and starts is None:
        counts, starts = counts
    return given, counts, starts, kind


def _memory(given: Any) -> tuple[np.ndarray, tuple[int, ...]]:
    """The memory of what was given, flat in its order, and its shape."""
    if given is None or given is MPI.BOTTOM or given is MPI.IN_PLACE:
        raise UnreadError("no memory is given")
    if hasattr(given, "untyped_storage"):  # a tensor of torch
        given = given.detach().numpy()
    if not isinstance(given, np.ndarray):
        try:
            given = np.frombuffer(given, np.uint8)
        except (TypeError, ValueError, BufferError):
            raise UnreadError(f"a {type(given).__name__} is no memory of numbers") from None
    array = given.view(np.ndarray)
    if array.flags.c_contiguous:
        return array.reshape(-1), array.shape
    if array.flags.f_contiguous:
        return array.T.reshape(-1), (array.size,)
    raise UnreadError("an array that is not contiguous")


def _elements_of(kind: Any, memory: np.ndarray) -> int:
    """Elements of the memory in one item of a datatype."""
    if kind is None:
        return 1
    size = memory.itemsize
    if kind.Get_size() % size:
        raise UnreadError(f"a datatype of {kind.Get_size()} bytes in an array of {memory.dtype}")
    return int(kind.Get_size() // size)


def _positions(memory: np.ndarray, kind: Any, count: int | None) -> np.ndarray:
    """Positions of the elements of some items of a datatype; None for all of the memory."""
    if kind is None or _is_plain(kind, memory):
        return np.arange(memory.size if count is None else count)
    if kind.Get_size() % memory.itemsize:
        raise UnreadError(f"a datatype of {kind.Get_size()} bytes in an array of {memory.dtype}")
    extent = kind.Get_extent()[1]
    items = memory.nbytes // extent if count is None and extent > 0 else count or 1
    return _packed(memory, kind, items)


def _is_plain(kind: Any, memory: np.ndarray) -> bool:
    lower, extent = kind.Get_extent()
    return bool(kind.Get_size() == extent == memory.itemsize and lower == 0)


def _packed(memory: np.ndarray, kind: Any, count: int) -> np.ndarray:
    """Positions of the elements of a derived datatype: MPI itself packs the numbers of elements,
    written to memory that is laid out alike."""
    if memory.itemsize not in (4, 8, 16):
        raise UnreadError(f"a derived datatype in an array of {memory.dtype}")
    width = min(memory.itemsize, 8)
    each = memory.itemsize // width
    numbers = np.arange(memory.size * each, dtype=f"i{width}")
    lower, extent = kind.Get_true_extent()
    if lower < 0 or lower + extent + (count - 1) * kind.Get_extent()[1] > numbers.nbytes:
        raise UnreadError("a datatype that reaches beyond the array")
    packed = np.zeros(count * kind.Get_size() // width, numbers.dtype)
    MPI.COMM_SELF.Sendrecv([numbers, count, kind], 0, 0, [packed, MPI.BYTE], 0, 0)
    return (packed[::each] // each).astype(np.int64)
