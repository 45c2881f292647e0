"""Regions of memory and rectangular subsets of them (the paper's x_a).

A `Region` is a named n-d array of elements on one worker, or a replicated one of which several
workers hold identical copies. A `Subset` is a box in it. A worker may have memories of several
kinds (the paper's "auxiliary memories", section 2). Dtypes belong to `linop.spaces.space`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import numpy as np

from linop.errors import ArgumentError, LinopError, SpaceError, SubsetError

MEMORIES = ("default", "host", "device")
"""The kinds of memory of a region. "default": the memory of the backend's arrays. "host": the
processor's. "device": the accelerator's; a backend without one stores such a region in host memory,
and still treats it as a memory distinct from "host"."""

Index = slice | EllipsisType | tuple["slice | EllipsisType", ...]


@dataclass(frozen=True, slots=True)
class Region:
    """A named n-d array of elements in the memory of a worker, or replicated on several.

    Args:
        name: unique within a space.
        shape: extent of each dimension; may be empty (a scalar) or hold zeros (no elements).
        workers: the worker that holds it; several if it is replicated: they hold identical copies,
            and the region counts once in the inner product.
        memory: the kind of memory, one of `MEMORIES`. Regions that differ in memory alone are
            different regions.

    Raises:
        ArgumentError: an argument has the wrong type, or `memory` is none of `MEMORIES`.
        SpaceError: an extent or a worker is negative, a worker is listed twice, or none is given.

    Indexing with slices of unit step gives a `Subset`: ``region[2:5, :]``.

    Example:
        >>> a = linop.Region("a", (4, 3), workers=2)
        >>> print(a[1:3, :], a[1:3, :].shape)
        a[1:3, 0:3] (2, 3)
        >>> linop.Region("b", 5, workers=[0, 1]).replicated
        True
    """

    name: str
    shape: tuple[int, ...]
    workers: tuple[int, ...]
    memory: str

    def __init__(
        self,
        name: str,
        shape: int | Sequence[int],
        workers: int | Iterable[int] = 0,
        memory: str = "default",
    ) -> None:
        if not isinstance(name, str) or not name:
            raise ArgumentError(f"a region's name is a non-empty string; given {name!r}")
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "shape", naturals(shape, f"shape of region {name!r}"))
        held = naturals(workers, f"workers of region {name!r}")
        if not held:
            raise SpaceError(f"region {name!r} is held by no worker; give at least one")
        if len(set(held)) < len(held):
            raise SpaceError(f"region {name!r} names a worker twice: {held}")
        object.__setattr__(self, "workers", tuple(sorted(held)))
        object.__setattr__(self, "memory", known_memory(memory, f"region {name!r}"))

    @staticmethod
    def checked(
        name: str, shape: tuple[int, ...], workers: tuple[int, ...], memory: str = "default"
    ) -> Region:
        """A region without validation of its arguments, `workers` sorted: for large spaces."""
        region = _new(Region)
        _set_name(region, name)
        _set_shape(region, shape)
        _set_workers(region, workers)
        _set_memory(region, memory)
        return region

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements; copies of a replicated region count once."""
        return math.prod(self.shape)

    @property
    def replicated(self) -> bool:
        """True if several workers hold identical copies of this region."""
        return len(self.workers) > 1

    def __getitem__(self, index: Index) -> Subset:
        return Subset(self, *_bounds(self, index))

    def __iter__(self) -> Iterator[Any]:
        raise ArgumentError(f"region {self.name!r} is not iterable; index it with slices")

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        memory = "" if self.memory == "default" else f", memory={self.memory!r}"
        return f"Region(name={self.name!r}, shape={self.shape}, workers={self.workers}{memory})"


_new = object.__new__
# Slot setters bypass the frozen dataclass, in a third of the time of object.__setattr__.
_set_name, _set_shape, _set_workers, _set_memory = (
    vars(Region)[slot].__set__ for slot in ("name", "shape", "workers", "memory")
)


@dataclass(frozen=True, slots=True)
class Subset:
    """A box in a region: the indices i with ``start[k] <= i[k] < stop[k]`` in every dimension k.

    Example:
        >>> part = linop.Region("a", (4, 3))[1:3, :]
        >>> part.shape, part.size, part.whole
        ((2, 3), 6, False)
        >>> np.arange(12).reshape(4, 3)[part.index].tolist()
        [[3, 4, 5], [6, 7, 8]]
    """

    region: Region
    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __init__(self, region: Region, start: tuple[int, ...], stop: tuple[int, ...]) -> None:
        _set_region(self, region)
        _set_start(self, start)
        _set_stop(self, stop)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(operator.sub, self.stop, self.start))

    @property
    def size(self) -> int:
        return math.prod(map(operator.sub, self.stop, self.start))

    @property
    def workers(self) -> tuple[int, ...]:
        return self.region.workers

    @property
    def memory(self) -> str:
        return self.region.memory

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(map(slice, self.start, self.stop))

    @property
    def index(self) -> tuple[slice | EllipsisType, ...]:
        """NumPy index of the subset in the region's array; gives a view for 0-d regions too."""
        return (*self.slices, ...)

    @property
    def whole(self) -> bool:
        """True if this is the entire region."""
        return self.shape == self.region.shape

    def overlaps(self, other: Subset) -> bool:
        """True if the two are in one region and share an element."""
        return self._same_region(other) and self.meets(other)

    def _same_region(self, other: Subset) -> bool:
        # Mostly the same object: identity takes a third of the time of comparing fields.
        return self.region is other.region or self.region == other.region

    def meets(self, other: Subset) -> bool:
        """True if the two boxes intersect, whatever their regions."""
        return all(
            max(a, c) < min(b, d)
            for a, b, c, d in zip(self.start, self.stop, other.start, other.stop, strict=True)
        )

    def contains(self, other: Subset) -> bool:
        """True if every element of `other` is in this subset; always for an empty `other`."""
        return (
            self._same_region(other)
            and all(map(operator.le, self.start, other.start))
            and all(map(operator.ge, self.stop, other.stop))
        ) or any(map(operator.ge, other.start, other.stop))

    def __str__(self) -> str:
        if self.whole:
            return self.region.name
        return f"{self.region.name}[{', '.join(f'{s.start}:{s.stop}' for s in self.slices)}]"


_set_region, _set_start, _set_stop = (
    vars(Subset)[slot].__set__ for slot in ("region", "start", "stop")
)

Part = Region | Subset


def as_subset(part: Part) -> Subset:
    """Convert a region or a subset to a subset; a region gives the box of all its elements.

    Raises:
        ArgumentError: `part` is neither.
    """
    if isinstance(part, Subset):
        return part
    if isinstance(part, Region):
        return Subset(part, (0,) * part.ndim, part.shape)
    raise ArgumentError(f"expected a Region or a Subset of one, given {part!r}")


def known_memory(memory: str, what: str) -> str:
    """Check that `memory` is one of `MEMORIES`, and return it.

    Raises:
        ArgumentError: it is not; `what` opens the message.
    """
    if not isinstance(memory, str) or memory not in MEMORIES:
        known = ", ".join(map(repr, MEMORIES))
        raise ArgumentError(f"{what}: memory is one of {known}; given {memory!r}")
    return memory


def memory_mark(region: Region) -> str:
    """Suffix of a printed region: ``:host`` or ``:device``, empty in the default memory."""
    return "" if region.memory == "default" else f":{region.memory}"


LARGEST = 2**63 - 1
"""Largest number of elements, or of bytes, that is supported: the maximum of int64."""


def integer(value: Any, what: str) -> int:
    """Convert a whole number to an int: any type with ``__index__``, as Python's and NumPy's.

    Raises:
        ArgumentError: the value is not a whole number.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise ArgumentError(f"{what}: expected a whole number, given {value!r}") from None


def naturals(
    values: int | Iterable[int], what: str, error: type[LinopError] = SpaceError
) -> tuple[int, ...]:
    """Convert a whole number, or several, to a tuple of ints from 0 to `LARGEST`.

    Raises:
        ArgumentError: a value is not a whole number.
        LinopError: one is out of range; of the class `error`.
    """
    try:
        items = (values,) if isinstance(values, int | np.integer) else tuple(values)
        numbers = tuple(map(int, items))
        whole = numbers == items
    except (TypeError, ValueError, OverflowError):
        whole = False
    if not whole:
        raise ArgumentError(f"{what}: expected whole numbers, given {values!r}")
    if max(numbers, default=0) > LARGEST:
        raise error(f"{what}: {numbers} has a number above 2**63 - 1")
    if min(numbers, default=0) < 0:
        raise error(f"{what}: {numbers} has a negative number")
    return numbers


def _bounds(region: Region, index: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Start and stop, by dimension, of an index of slices and at most one ``...``.

    Raises:
        SubsetError: too many indices, no slice, a step other than 1, or out of bounds.
    """
    items = list(index) if isinstance(index, tuple) else [index]
    if items.count(Ellipsis) > 1:
        raise SubsetError(f"region {region.name!r}: more than one '...' in {index!r}")
    if Ellipsis in items:
        at = items.index(Ellipsis)
        items[at : at + 1] = [slice(None)] * (region.ndim - len(items) + 1)
    if len(items) > region.ndim:
        raise SubsetError(
            f"region {region.name!r} has {region.ndim} dimensions; {len(items)} indices given"
        )
    items += [slice(None)] * (region.ndim - len(items))
    bounds = [_slice(region, k, item) for k, item in enumerate(items)]
    return tuple(a for a, _ in bounds), tuple(b for _, b in bounds)


def _slice(region: Region, k: int, item: Any) -> tuple[int, int]:
    n = region.shape[k]
    where = f"region {region.name!r}, dimension {k} of extent {n}"
    if not isinstance(item, slice):
        raise SubsetError(
            f"{where}: index {item!r} given; a subset keeps all dimensions, so give a slice: i:i+1"
        )
    try:
        if item.step is not None and operator.index(item.step) != 1:
            raise SubsetError(f"{where}: step {item.step} given; subsets have unit steps")
        start = 0 if item.start is None else operator.index(item.start)
        stop = n if item.stop is None else operator.index(item.stop)
    except TypeError:
        step = "" if item.step is None else f":{item.step}"
        bounds = f"{item.start}:{item.stop}{step}"
        raise SubsetError(f"{where}: {bounds} given; bounds are whole numbers") from None
    start, stop = (start + n if start < 0 else start), (stop + n if stop < 0 else stop)
    if not (0 <= start <= n and 0 <= stop <= n):
        raise SubsetError(f"{where}: {item.start}:{item.stop} is out of bounds")
    if stop < start:
        raise SubsetError(f"{where}: {item.start}:{item.stop} ends before it starts")
    return start, stop
