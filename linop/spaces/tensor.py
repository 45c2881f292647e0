"""Tensor spaces: global tensors divided into blocks over a partition of workers."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from functools import cached_property
from itertools import accumulate, pairwise, repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from linop.errors import ArgumentError, PartitionError, ShapeError, SpaceError, expect
from linop.spaces.partition import GridAxis, Partition, balanced
from linop.spaces.region import MEMORIES, Region, Subset, known_memory, naturals
from linop.spaces.scalars import Array, of_dtype, plain
from linop.spaces.space import Space, Vector


class Role(Enum):
    """Role of a grid axis that splits no tensor dimension."""

    COPIES = "copies"
    REPLICATED = "replicated"

    def __repr__(self) -> str:
        return self.name


COPIES = Role.COPIES
"""Role of a grid axis along which every worker has an independent copy."""

REPLICATED = Role.REPLICATED
"""Role of a grid axis along which blocks are replicated: identical copies that count once."""

Axis = int | Role
Bounds = tuple[tuple[int, int], ...]
"""Global (start, stop) of each block along a tensor dimension."""


class TensorSpace(Space):
    """A space that holds a global tensor in blocks, one per worker of a partition.

    Args:
        shape: the global shape.
        partition: the grid of workers.
        dtype: of the elements.
        axes: for each grid axis, the tensor dimension that it splits, `COPIES` (independent
            copies along it) or `REPLICATED` (identical copies that count once). By default grid
            axis k splits dimension k.
        name: region names are ``name@worker``; a replicated block is named after its first worker.
        sizes: block lengths, by tensor dimension; balanced by default.
        bounds: global (start, stop) of blocks, by tensor dimension, for blocks that overlap or
            leave gaps.
        memory: the kind of memory of all blocks, one of `linop.spaces.region.MEMORIES`.

    Balanced means that the first ``n mod p`` blocks are one longer; with more workers than elements
    the last blocks are empty.

    Raises:
        PartitionError: axes do not fit the grid or the tensor, or blocks do not fit the tensor.
        ArgumentError: `memory` is none of `linop.spaces.region.MEMORIES`.
    """

    def __init__(
        self,
        shape: int | Sequence[int],
        partition: Partition,
        dtype: npt.DTypeLike = np.float64,
        axes: Sequence[Axis] | None = None,
        name: str = "x",
        *,
        sizes: Mapping[int, Sequence[int]] | None = None,
        bounds: Mapping[int, Bounds] | None = None,
        memory: str = "default",
    ) -> None:
        self.global_shape = naturals(shape, "shape of a tensor")
        self.partition = expect("partition", partition, Partition)
        self.name = name
        self.memory = known_memory(memory, f"tensor {name!r}")
        self.axes: tuple[Axis, ...] = self._check_axes(axes)
        for d in (*(sizes or {}), *(bounds or {})):
            if d not in range(self.ndim):
                raise PartitionError(f"no dimension {d} in a tensor of shape {self.global_shape}")
        self.bounds: tuple[Bounds, ...] = tuple(
            self._bounds(d, sizes or {}, bounds or {}) for d in range(self.ndim)
        )
        self._set_dtype(dtype)

    def _check_axes(self, axes: Sequence[Axis] | None) -> tuple[Axis, ...]:
        grid, ndim = self.partition.shape, self.ndim
        try:
            given = tuple(range(len(grid))) if axes is None else tuple(axes)
        except TypeError:
            raise ArgumentError(
                f"axes: expected one for each of {len(grid)}, given {axes!r}"
            ) from None
        if len(given) != len(grid):
            raise PartitionError(f"axes {given} for a grid of {len(grid)} axes; give one for each")
        checked: list[Axis] = []
        for k, axis in enumerate(given):
            if isinstance(axis, Role):
                checked.append(axis)
            elif isinstance(axis, int | np.integer):
                if not -ndim <= axis < ndim:
                    raise PartitionError(
                        f"grid axis {k} of {self.partition!r} splits dimension {axis}, which a "
                        f"tensor of shape {self.global_shape} does not have; give axes="
                    )
                checked.append(int(axis) % ndim)
            else:
                raise ArgumentError(
                    f"axes: expected dimensions, COPIES or REPLICATED; given {axis!r}"
                )
        split = [axis for axis in checked if isinstance(axis, int)]
        if len(set(split)) < len(split):
            raise PartitionError(f"axes {given}: two grid axes split the same tensor dimension")
        return tuple(checked)

    def _bounds(
        self, dim: int, sizes: Mapping[int, Sequence[int]], bounds: Mapping[int, Bounds]
    ) -> Bounds:
        n = self.global_shape[dim]
        parts = self.partition.shape[self.axes.index(dim)] if dim in self.axes else 1
        if dim in bounds:
            what = f"bounds of dimension {dim}"
            pairs = [naturals(pair, what, PartitionError) for pair in bounds[dim]]
            if any(len(pair) != 2 for pair in pairs):
                raise PartitionError(f"{what}: (start, stop) of each block expected; given {pairs}")
            cut = tuple((a, b) for a, b in pairs)
            if any(not 0 <= a <= b <= n for a, b in cut):
                raise PartitionError(f"blocks {cut} of dimension {dim} leave its extent {n}")
        else:
            lengths = balanced(n, parts)
            if dim in sizes:
                lengths = naturals(sizes[dim], f"sizes of dimension {dim}", PartitionError)
                if sum(lengths) != n:
                    raise PartitionError(f"blocks {lengths} of dimension {dim} do not sum to {n}")
            stops = tuple(accumulate(lengths))
            cut = tuple((b - m, b) for b, m in zip(stops, lengths, strict=True))
        if len(cut) != parts:
            raise PartitionError(f"{len(cut)} blocks of dimension {dim} for {parts} grid points")
        return cut

    @cached_property
    def regions(self) -> tuple[Region, ...]:  # type: ignore[override]
        """The blocks, row-major by their coordinates along `region_axes`."""
        # Zipped columns make half as many lists as rows, and half the garbage collection.
        columns = self.shapes[:, : self.ndim].T.tolist()
        shapes = zip(*columns, strict=True) if columns else repeat(())
        holders = zip(*self._lines.T.tolist(), strict=True)
        regions = list(map(Region.checked, self.index, shapes, holders, repeat(self.memory)))
        for number, region in self._made.items():
            regions[number] = region
        return tuple(regions)

    def at(self, number: int) -> Region:
        # Built alone until `regions` is evaluated: a worker of thousands needs a few blocks.
        if "regions" in self.__dict__:
            return self.regions[number]
        if number not in self._made:
            held = tuple(self._lines[number].tolist())
            shape = tuple(self.shapes[number, : self.ndim].tolist())
            self._made[number] = Region.checked(f"{self.name}@{held[0]}", shape, held, self.memory)
        return self._made[number]

    @cached_property
    def _made(self) -> dict[int, Region]:
        """Cache of the blocks that `at` built alone, by number; `regions` reuses the objects."""
        return {}

    @cached_property
    def index(self) -> Mapping[str, int]:
        return {f"{self.name}@{w}": k for k, w in enumerate(self._lines[:, 0].tolist())}

    @cached_property
    def region_axes(self) -> dict[int, GridAxis]:
        """The grid axes along which blocks differ (all but the replicated ones), by axis. Blocks
        are numbered row-major by their coordinates along them."""
        stride, axes = 1, {}
        for k in reversed(range(self.partition.ndim)):
            if self.axes[k] is not REPLICATED:
                axes[k] = GridAxis(self.partition.shape[k], stride)
                stride *= self.partition.shape[k]
        return axes

    @cached_property
    def _lines(self) -> npt.NDArray[np.int64]:
        """The workers that hold each block, sorted; (blocks, copies)."""
        shared = tuple(k for k, axis in enumerate(self.axes) if axis is REPLICATED)
        last = np.moveaxis(self.partition.grid, shared, tuple(range(-len(shared), 0)))
        length = math.prod(self.partition.shape[k] for k in shared)
        return np.sort(last.reshape(-1, length), axis=1)

    @cached_property
    def shapes(self) -> npt.NDArray[np.int64]:
        return self._by_block([[b - a for a, b in cuts] for cuts in self.bounds], 1)

    @cached_property
    def starts(self) -> npt.NDArray[np.int64]:
        """Global start index of each block; (blocks, max(1, ndim))."""
        return self._by_block([[a for a, _ in cuts] for cuts in self.bounds], 0)

    def _by_block(self, given: Sequence[Sequence[int]], none: int) -> npt.NDArray[np.int64]:
        """Numbers given per cut of each dimension, expanded to (blocks, max(1, ndim)); `none` fills
        the column of a 0-d tensor."""
        numbers = np.arange(len(self._lines))
        columns = []
        for d, of_cuts in enumerate(given):
            at = self.region_axes[self.axes.index(d)].of(numbers) if d in self.axes else 0 * numbers
            columns.append(np.array(of_cuts, np.int64)[at])
        return np.stack(columns or [np.full(len(numbers), none)], axis=1)

    @cached_property
    def holders(self) -> tuple[npt.NDArray[np.int64], ...]:
        blocks, each = self._lines.shape
        return self._lines.ravel(), each * np.arange(blocks), np.full(blocks, each)

    @cached_property
    def memories(self) -> npt.NDArray[np.int64]:
        return np.full(len(self._lines), MEMORIES.index(self.memory))

    def in_memory(self, memory: str) -> TensorSpace:
        bounds = dict(enumerate(self.bounds))
        return TensorSpace(
            self.global_shape,
            self.partition,
            self.dtype,
            self.axes,
            self.name,
            bounds=bounds,
            memory=memory,
        )

    @cached_property
    def workers(self) -> tuple[int, ...]:
        return tuple(sorted(self.partition.workers))

    def on(self, worker: int) -> tuple[Region, ...]:
        return (self.region(worker),) if worker in self.partition else ()

    def numbers_on(self, worker: int) -> npt.NDArray[np.int64]:
        if worker not in self.partition:
            return np.zeros(0, np.int64)
        return np.array([self._number(worker)], np.int64)

    def _number(self, worker: int) -> int:
        at = self.partition.coordinates(worker)
        return sum(at[k] * axis.stride for k, axis in self.region_axes.items())

    @cached_property
    def made_from(self) -> tuple[Any, ...]:
        """The fields that determine the regions and their order; equal tuples mean equal spaces."""
        return (
            self.global_shape,
            self.partition,
            self.dtype,
            tuple(axis.value if isinstance(axis, Role) else axis for axis in self.axes),
            self.name,
            self.bounds,
            self.memory,
        )

    @cached_property
    def digest(self) -> bytes:
        return self.digest_without(())

    def digest_without(self, uncut: Collection[int]) -> bytes:
        """The digest of this space with extent 1 in the dimensions `uncut`, of which every block
        holds the full extent."""
        shape, partition, dtype, axes, name, bounds, memory = self.made_from
        shape = tuple(1 if d in uncut else n for d, n in enumerate(shape))
        bounds = tuple(((0, 1),) if d in uncut else cuts for d, cuts in enumerate(bounds))
        workers = hashlib.sha256(np.array(partition.workers, np.int64).tobytes()).digest()
        text = repr((shape, partition.shape, workers, dtype.str, axes, name, bounds, memory))
        return hashlib.sha256(text.encode()).digest()

    def __len__(self) -> int:
        return len(self._lines)

    def ordered_as(self, other: Space) -> bool:
        alike = isinstance(other, TensorSpace) and self.made_from == other.made_from
        return alike or super().ordered_as(other)

    def __eq__(self, other: object) -> bool:
        alike = isinstance(other, TensorSpace) and self.made_from == other.made_from
        return alike or super().__eq__(other)

    __hash__ = Space.__hash__

    def worker_lines(self, grid_axes: Sequence[int]) -> list[list[int]]:
        """Groups of workers whose coordinates differ along the given grid axes only."""
        last = np.moveaxis(self.partition.grid, tuple(grid_axes), tuple(range(-len(grid_axes), 0)))
        length = math.prod(self.partition.shape[k] for k in grid_axes)
        lines: list[list[int]] = last.reshape(-1, length).tolist()
        return lines

    def region(self, worker: int) -> Region:
        """The block that a worker holds.

        Raises:
            PartitionError: the worker is not in the partition.
        """
        return self.at(self._number(worker))

    def slices(self, worker: int) -> tuple[slice, ...]:
        """Global index ranges of a worker's block, a slice per dimension.

        Raises:
            PartitionError: the worker is not in the partition.
        """
        at = self.partition.coordinates(worker)
        blocks = (at[self.axes.index(d)] if d in self.axes else 0 for d in range(self.ndim))
        return tuple(slice(*self.bounds[d][k]) for d, k in enumerate(blocks))

    def block(self, region: Region) -> tuple[slice, ...]:
        """Global index ranges of a region of this space, a slice per dimension."""
        return self.slices(region.workers[0])

    def _index(self, region: Region) -> tuple[Any, ...]:
        """NumPy index of a block in the global array; gives a view for 0-d tensors too."""
        return (*self.block(region), ...)

    def local_shape(self, worker: int) -> tuple[int, ...]:
        """The shape of a worker's block."""
        return self.region(worker).shape

    def scatter(self, array: npt.ArrayLike) -> Vector:
        """Divide a global array, of shape `global_shape`, into blocks; each is a copy.

        Raises:
            ShapeError: the array has another shape. DTypeError: its values do not fit the dtype.
        """
        if not hasattr(array, "dtype"):
            array = of_dtype(array, self.dtype, "scatter")
        array = np.asarray(plain(array, "scatter"))
        if array.dtype != self.dtype and np.can_cast(array.dtype, self.dtype, "safe"):
            array = of_dtype(array, self.dtype, "scatter")
        if array.shape != self.global_shape:
            raise ShapeError(
                f"scatter: global array of shape {array.shape} given, {self.global_shape} expected"
            )
        blocks = {r.name: array[self._index(r)].copy() for r in self.regions}
        return self.vector(blocks)

    def gather(self, vector: Vector | Mapping[str, npt.ArrayLike]) -> Array:
        """Assemble the blocks of a vector into a new global array, of shape `global_shape`.

        Raises:
            SpaceError: copies or overlapping blocks disagree (NaN equals NaN), the blocks do not
                cover the tensor, or the vector is of another space or lacks regions.
        """
        vector = vector if isinstance(vector, Vector) else self.vector(vector)
        self.same_as(vector.space, "gather")
        vector.require_all("gather")
        array = np.zeros(self.global_shape, self.dtype)
        seen = np.zeros(self.global_shape, bool)
        for region in self.regions:
            where = self._index(region)
            array[where] = vector[region.name]
            seen[where] = True
        if not seen.all():
            raise SpaceError(f"gather: the blocks of {self!r} leave out elements of the tensor")
        for region in self.regions:
            if not _same(array[self._index(region)], vector[region.name]):
                raise SpaceError(
                    f"gather: block {region.name!r} differs from another copy of its elements; "
                    f"sum_reduce the copies first, or read one block by its region"
                )
        return array

    def like(
        self, partition: Partition, axes: Sequence[Axis], bounds: Mapping[int, Bounds] | None = None
    ) -> TensorSpace:
        """The same global tensor, name and memory on another partition; balanced in dimensions
        without `bounds`."""
        return TensorSpace(
            self.global_shape,
            partition,
            self.dtype,
            axes,
            self.name,
            bounds=bounds,
            memory=self.memory,
        )

    @property
    def copied(self) -> tuple[int, ...]:
        """The grid axes of role `COPIES` with an extent above 1."""
        grid = self.partition.shape
        return tuple(k for k, axis in enumerate(self.axes) if axis is COPIES and grid[k] > 1)

    def lines(self, grid_axes: Sequence[int]) -> list[tuple[Region, ...]]:
        """Groups of blocks whose coordinates differ along the given grid axes only, each in
        row-major order. Groups that are equal, as for replicated blocks, are listed once."""
        lines = (tuple(map(self.region, line)) for line in self.worker_lines(grid_axes))
        return list(dict.fromkeys(lines))

    @property
    def ndim(self) -> int:
        """Number of dimensions of the global tensor."""
        return len(self.global_shape)

    @property
    def tiled(self) -> bool:
        """True if in each dimension the blocks, in order, cover the extent, no gap, no overlap."""
        return all(
            cuts[0][0] == 0 and cuts[-1][1] == n and all(a[1] == b[0] for a, b in pairwise(cuts))
            for cuts, n in zip(self.bounds, self.global_shape, strict=True)
        )

    @property
    def disjoint(self) -> bool:
        """True if each element of the tensor is in at most one block."""
        ordered = [sorted(cuts) for cuts in self.bounds]
        apart = all(a[1] <= b[0] for cuts in ordered for a, b in pairwise(cuts))
        return apart and not self.copied

    def __repr__(self) -> str:
        memory = "" if self.memory == "default" else f", memory={self.memory!r}"
        return (
            f"TensorSpace({self.global_shape}, {self.partition!r}, dtype={self.dtype.name}, "
            f"axes={self.axes}, name={self.name!r}{memory})"
        )


def common_parts(X: TensorSpace, Y: TensorSpace) -> list[tuple[Subset, Subset]]:
    """Intersections, in the global tensor, of each block of X with the block of Y of the same
    number: pairs of subsets of the two blocks, empty ones omitted."""
    at, of = X.starts, Y.starts
    low, high = np.maximum(at, of), np.minimum(at + X.shapes, of + Y.shapes)
    ends = ((corner - base)[:, : X.ndim].tolist() for base in (at, of) for corner in (low, high))
    rows = zip(X.regions, Y.regions, *ends, (low < high).all(axis=1), strict=True)
    return [
        (Subset(x, tuple(a), tuple(b)), Subset(y, tuple(c), tuple(d)))
        for x, y, a, b, c, d, some in rows
        if some
    ]


def _same(a: Array, b: Array) -> bool:
    unequal = a != b
    return not (unequal & ~(np.isnan(a) & np.isnan(b))).any() if unequal.any() else True
