"""Regions of memory and rectangular subsets of them (the paper's x_a).

A `Region` is a named n-d piece of memory on a worker, or one logical piece that several workers
hold identical copies of. A `Subset` is a box in it. A worker may have memories of several kinds
(the paper's "auxiliary memories", section 2). Nothing here knows dtypes or spaces.
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
"""The kinds of memory that a region may live in. "default": where a backend's arrays are. "host":
that of the processor. "device": that of the accelerator; a backend that has none keeps such a
region in host memory, as memory of its own all the same."""

Index = slice | EllipsisType | tuple["slice | EllipsisType", ...]


@dataclass(frozen=True, slots=True)
class Region:
    """A named n-d piece of memory.

    Args:
        name: unique within a space.
        shape: extent of each dimension; may be empty (a scalar) or hold zeros (no memory at all).
        workers: the worker that holds it; or several, which then hold identical copies of *one*
            logical piece: a replicated region counts once in the inner product.
        memory: the kind of memory that it lives in, one of `MEMORIES`. Regions that differ in
            nothing else are different regions.

    Raises:
        ArgumentError: an argument is of another kind, or there is no such memory.
        SpaceError: an extent or a worker is negative, a worker is named twice, or there is none.

    Indexing with slices of unit step gives a `Subset`: ``region[2:5, :]``.
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
        """A region from arguments known to be right, workers in order: for spaces of thousands."""
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
        """Number of elements, one copy counted."""
        return math.prod(self.shape)

    @property
    def replicated(self) -> bool:
        """Whether several workers hold identical copies of this region."""
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
# A frozen dataclass forbids assignment; its slots do not, at a third of object.__setattr__'s time.
_set_name, _set_shape, _set_workers, _set_memory = (
    vars(Region)[slot].__set__ for slot in ("name", "shape", "workers", "memory")
)


@dataclass(frozen=True, slots=True)
class Subset:
    """A rectangular part of a region: ``start[k] <= i[k] < stop[k]`` in every dimension k."""

    region: Region
    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(operator.sub, self.stop, self.start))

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def workers(self) -> tuple[int, ...]:
        return self.region.workers

    @property
    def memory(self) -> str:
        return self.region.memory

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    @property
    def index(self) -> tuple[slice | EllipsisType, ...]:
        """What selects the subset in an array, as a view even where it has no dimension."""
        return (*self.slices, ...)

    @property
    def whole(self) -> bool:
        """Whether this is all of its region."""
        return self.shape == self.region.shape

    def overlaps(self, other: Subset) -> bool:
        """Whether the two share an element."""
        return self._same_region(other) and self.meets(other)

    def _same_region(self, other: Subset) -> bool:
        # Most are the same object: a third of the time of comparing fields.
        return self.region is other.region or self.region == other.region

    def meets(self, other: Subset) -> bool:
        """Whether the two have an index in common."""
        return all(
            max(a, c) < min(b, d)
            for a, b, c, d in zip(self.start, self.stop, other.start, other.stop, strict=True)
        )

    def contains(self, other: Subset) -> bool:
        """Whether every element of `other` is one of this subset."""
        return (
            self._same_region(other)
            and all(map(operator.le, self.start, other.start))
            and all(map(operator.ge, self.stop, other.stop))
        ) or other.size == 0

    def __str__(self) -> str:
        if self.whole:
            return self.region.name
        return f"{self.region.name}[{', '.join(f'{s.start}:{s.stop}' for s in self.slices)}]"


Part = Region | Subset


def as_subset(part: Part) -> Subset:
    """The part as a subset: a region stands for all of itself."""
    if isinstance(part, Subset):
        return part
    if isinstance(part, Region):
        return Subset(part, (0,) * part.ndim, part.shape)
    raise ArgumentError(f"expected a Region or a Subset of one, given {part!r}")


def known_memory(memory: str, what: str) -> str:
    """A kind of memory, if there is such a one.

    Raises:
        ArgumentError: there is not.
    """
    if not isinstance(memory, str) or memory not in MEMORIES:
        known = ", ".join(map(repr, MEMORIES))
        raise ArgumentError(f"{what}: memory is one of {known}; given {memory!r}")
    return memory


def memory_mark(region: Region) -> str:
    """What is printed behind a region that does not live in the default memory."""
    return "" if region.memory == "default" else f":{region.memory}"


LARGEST = 2**63 - 1
"""The largest number of elements, or bytes, that is counted."""


def integer(value: Any, what: str) -> int:
    """A whole number as an int: Python's, NumPy's, or whatever indexes a sequence.

    Raises:
        ArgumentError: it is none.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise ArgumentError(f"{what}: expected a whole number, given {value!r}") from None


def naturals(
    values: int | Iterable[int], what: str, error: type[LinopError] = SpaceError
) -> tuple[int, ...]:
    """A number or several as a tuple of whole numbers.

    Raises:
        ArgumentError: they are not; or `error`, where one is negative.
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
    """Start and stop of an index into a region."""
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
