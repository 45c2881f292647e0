"""Numberings: the regions of a space by number, and as whole arrays.

The normal form and the planner compute with these arrays. The number of a region is its position in
the space, from 0. `BlockNumbering` is that of a global tensor in blocks: it builds a region when
it is asked for, because a worker of thousands needs a few of them. Dtypes, and vectors, belong to
`linop.spaces.space`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from linop.caching import attributes, cached_property
from linop.spaces.decomposition import REPLICATED, Axis, Bounds, Role
from linop.spaces.partition import GridAxis, Partition
from linop.spaces.region import MEMORIES, Region

Ints = npt.NDArray[np.int64]


class Numbering:
    """The regions of a space, by number; equal for the same regions in the same order.

    Args:
        regions: n regions, with different names.
    """

    def __init__(self, regions: Sequence[Region]) -> None:
        self.regions: tuple[Region, ...] = tuple(regions)

    def at(self, number: int) -> Region:
        """The region with a number."""
        return self.regions[number]

    @cached_property
    def index(self) -> Mapping[str, int]:
        """The number of each region, by name."""
        return {region.name: k for k, region in enumerate(self.regions)}

    @cached_property
    def shapes(self) -> Ints:
        """The shapes of all regions, (n, d): one row per region, padded with ones to the largest
        number of dimensions d, at least 1."""
        ndim = max((region.ndim for region in self.regions), default=0) or 1
        return padded([region.shape for region in self.regions], ndim, 1)

    @cached_property
    def holders(self) -> tuple[Ints, ...]:
        """The workers of all regions in compressed form: the concatenated workers, and for each
        region the offset of its first worker and the number of its workers."""
        many = np.array([len(r.workers) for r in self.regions], np.int64)
        flat = np.array([w for r in self.regions for w in r.workers], np.int64)
        return flat, np.cumsum(many) - many, many

    @cached_property
    def memories(self) -> Ints:
        """The memory of each region, (n,): its position in `linop.spaces.region.MEMORIES`."""
        return np.array([MEMORIES.index(region.memory) for region in self.regions], np.int64)

    @cached_property
    def workers(self) -> tuple[int, ...]:
        """Every worker that holds a region, in order."""
        return tuple(sorted({w for region in self.regions for w in region.workers}))

    @cached_property
    def _on(self) -> dict[int, list[int]]:
        held: dict[int, list[int]] = {}
        for number, region in enumerate(self.regions):
            for worker in region.workers:
                held.setdefault(worker, []).append(number)
        return held

    def numbers_on(self, worker: int) -> Ints:
        """The numbers of the regions that a worker holds, increasing."""
        return np.array(self._on.get(worker, []), np.int64)

    def on(self, worker: int) -> tuple[Region, ...]:
        """The regions that a worker holds, in the order of the space."""
        known = self._held_on
        if worker not in known:
            known[worker] = tuple(map(self.at, self.numbers_on(worker).tolist()))
        return known[worker]

    @cached_property
    def _held_on(self) -> dict[int, tuple[Region, ...]]:
        """The regions of the workers that were asked for."""
        return {}

    def __len__(self) -> int:
        return len(self.regions)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Numbering):
            return NotImplemented
        return self is other or (len(self) == len(other) and self.regions == other.regions)

    __hash__ = None  # type: ignore[assignment]


class BlockNumbering(Numbering):
    """The blocks of a global tensor on a grid of workers, row-major by their coordinates along
    `region_axes`.

    Args:
        partition: the grid.
        axes: for each grid axis, the tensor dimension that it splits, `COPIES` or `REPLICATED`.
        bounds: global (start, stop) of the blocks along each tensor dimension.
        name: regions are named ``name@worker``, after the first worker that holds them.
        memory: the kind of memory of all blocks.
    """

    def __init__(
        self,
        partition: Partition,
        axes: tuple[Axis, ...],
        bounds: tuple[Bounds, ...],
        name: str,
        memory: str,
    ) -> None:
        self.partition, self.axes, self.bounds = partition, axes, bounds
        self.name, self.memory = name, memory
        self._built: dict[int, Region] = {}  # by `at`, by number; `regions` has the same objects

    @cached_property
    def regions(self) -> tuple[Region, ...]:  # type: ignore[override]
        # Zipped columns make half as many lists as rows, and half the garbage collection.
        columns = self.shapes[:, : len(self.bounds)].T.tolist()
        shapes = zip(*columns, strict=True) if columns else repeat(())
        holders = zip(*self._held.T.tolist(), strict=True)
        regions = list(map(Region.checked, self.index, shapes, holders, repeat(self.memory)))
        for number, region in self._built.items():
            regions[number] = region
        return tuple(regions)

    def at(self, number: int) -> Region:
        if "regions" in attributes(self):
            return self.regions[number]
        if number not in self._built:
            held = tuple(self._held[number].tolist())
            shape = tuple(self.shapes[number, : len(self.bounds)].tolist())
            region = Region.checked(f"{self.name}@{held[0]}", shape, held, self.memory)
            self._built[number] = region
        return self._built[number]

    @cached_property
    def region_axes(self) -> dict[int, GridAxis]:
        """The grid axes along which blocks differ (all but the replicated ones), by axis."""
        stride, axes = 1, {}
        for k in reversed(range(self.partition.ndim)):
            if self.axes[k] is not REPLICATED:
                axes[k] = GridAxis(self.partition.shape[k], stride)
                stride *= self.partition.shape[k]
        return axes

    @cached_property
    def _held(self) -> Ints:
        """The workers that hold each block, sorted; (blocks, copies)."""
        shared = tuple(k for k, axis in enumerate(self.axes) if axis is REPLICATED)
        last = np.moveaxis(self.partition.grid, shared, tuple(range(-len(shared), 0)))
        length = math.prod(self.partition.shape[k] for k in shared)
        return np.sort(last.reshape(-1, length), axis=1)

    @cached_property
    def index(self) -> Mapping[str, int]:
        return {f"{self.name}@{w}": k for k, w in enumerate(self._held[:, 0].tolist())}

    @cached_property
    def shapes(self) -> Ints:
        return self._by_block([[b - a for a, b in cuts] for cuts in self.bounds], 1)

    @cached_property
    def starts(self) -> Ints:
        """Global start index of each block; (blocks, max(1, ndim))."""
        return self._by_block([[a for a, _ in cuts] for cuts in self.bounds], 0)

    def _by_block(self, given: Sequence[Sequence[int]], none: int) -> Ints:
        """Numbers given per cut of each dimension, expanded to (blocks, max(1, ndim)); `none` fills
        the column of a 0-d tensor."""
        numbers = np.arange(len(self._held))
        columns = []
        for d, of_cuts in enumerate(given):
            at = self.region_axes[self.axes.index(d)].of(numbers) if d in self.axes else 0 * numbers
            columns.append(np.array(of_cuts, np.int64)[at])
        return np.stack(columns or [np.full(len(numbers), none)], axis=1)

    @cached_property
    def holders(self) -> tuple[Ints, ...]:
        blocks, each = self._held.shape
        return self._held.ravel(), each * np.arange(blocks), np.full(blocks, each)

    @cached_property
    def memories(self) -> Ints:
        return np.full(len(self._held), MEMORIES.index(self.memory))

    @cached_property
    def workers(self) -> tuple[int, ...]:
        return tuple(sorted(self.partition.workers))

    def number(self, worker: int) -> int:
        """The number of the block that a worker holds.

        Raises:
            PartitionError: the worker is not in the partition.
        """
        at = self.partition.coordinates(worker)
        return sum(at[k] * axis.stride for k, axis in self.region_axes.items())

    def numbers_on(self, worker: int) -> Ints:
        return np.array([self.number(worker)] if worker in self.partition else [], np.int64)

    @cached_property
    def made_from(self) -> tuple[Any, ...]:
        """The fields that determine the regions and their order."""
        axes = tuple(axis.value if isinstance(axis, Role) else axis for axis in self.axes)
        return self.partition, axes, self.bounds, self.name, self.memory

    def __len__(self) -> int:
        return len(self._held)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, BlockNumbering) and self.made_from == other.made_from:
            return True
        return super().__eq__(other)

    __hash__ = None


def padded(rows: Sequence[tuple[int, ...]], length: int, beyond: int) -> Ints:
    """Rows of at most `length` numbers as an array, (n, length), filled up with `beyond`."""
    filled = np.full((len(rows), length), beyond, np.int64)
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    given = np.arange(length) < lengths[:, None]
    filled[given] = np.fromiter(chain.from_iterable(rows), np.int64, int(lengths.sum()))
    return filled
