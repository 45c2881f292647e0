"""Tensor spaces: global tensors divided into blocks over a partition of workers."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from linop.caching import cached_property
from linop.errors import ShapeError, SpaceError, expect
from linop.spaces import showing
from linop.spaces.decomposition import COPIES, Axis, Bounds, checked_axes, checked_bounds
from linop.spaces.numbering import BlockNumbering
from linop.spaces.partition import Partition
from linop.spaces.real_parts import parts_of
from linop.spaces.region import Region, known_memory, naturals
from linop.spaces.scalars import Array, array_of, numeric_dtype, of_dtype
from linop.spaces.space import Space, Whole
from linop.spaces.vector import Vector
from linop.spaces.weighted import InnerProduct, inner_product_of
from linop.svg import Picture


class TensorSpace(Space):
    """A space that holds a global tensor in blocks, one per worker of a partition.

    Args:
        shape: the global shape.
        partition: the grid of workers, or its shape, as for `Partition`.
        dtype: of the elements.
        axes: for each grid axis, the tensor dimension that it splits, `COPIES` (independent
            copies along it) or `REPLICATED` (identical copies that count once). By default grid
            axis k splits dimension k.
        name: region names are ``name@worker``; a replicated block is named after its first worker.
        sizes: block lengths, by tensor dimension; balanced by default.
        bounds: global (start, stop) of blocks, by tensor dimension, for blocks that overlap or
            leave gaps.
        memory: the kind of memory of all blocks, one of `linop.spaces.region.MEMORIES`.
        inner: the inner product, as for `Space`; an array of weights is of the global shape, and
            holds for the same tensor in other blocks, too, as those of
            ``linop.repartition(X, partition)``. Codomains of collectives are Euclidean where
            elements are in several blocks (copies, halos); and where `inner` is weights by region,
            a vector, or an operator's inner product, which are of these blocks alone.

    Balanced means that the first ``n mod p`` blocks are one longer; with more workers than elements
    the last blocks are empty.

    Raises:
        PartitionError: axes do not fit the grid or the tensor, or blocks do not fit the tensor.
        ArgumentError: `memory` is none of `linop.spaces.region.MEMORIES`; or as `Space`.

    Example:
        >>> X = linop.TensorSpace((5, 4), linop.Partition((2, 1)))
        >>> X.local_shape(0), X.slices(1)
        ((3, 4), (slice(3, 5, None), slice(0, 4, None)))
        >>> x = np.arange(20.0).reshape(5, 4)
        >>> bool((X.gather(X.scatter(x)) == x).all())
        True
        >>> copies = linop.TensorSpace((4,), linop.Partition(2), axes=[linop.COPIES])
        >>> copies.size, copies.local_shape(1)
        (8, (4,))
    """

    def __init__(
        self,
        shape: int | Sequence[int],
        partition: Partition | int | Sequence[int],
        dtype: npt.DTypeLike = np.float64,
        axes: Sequence[Axis] | None = None,
        name: str = "x",
        *,
        sizes: Mapping[int, Sequence[int]] | None = None,
        bounds: Mapping[int, Bounds] | None = None,
        memory: str = "default",
        inner: Any = None,
    ) -> None:
        self.global_shape = naturals(shape, "shape of a tensor")
        if isinstance(partition, int | np.integer | list | tuple):
            partition = Partition(partition)
        self.partition = expect("partition", partition, Partition)
        self.name = name
        self.memory = known_memory(memory, f"tensor {name!r}")
        self.axes = checked_axes(axes, self.partition, self.global_shape)
        grid = dict(zip(self.axes, self.partition.shape, strict=True))
        counts = [grid.get(d, 1) for d in range(self.ndim)]
        self.bounds = checked_bounds(self.global_shape, counts, sizes or {}, bounds or {})
        self.numbering: BlockNumbering = BlockNumbering(
            self.partition, self.axes, self.bounds, name, self.memory
        )
        self.dtype = numeric_dtype(dtype)
        self.inner_product = inner_product_of(self, inner)

    @cached_property
    def regions(self) -> tuple[Region, ...]:  # type: ignore[override]
        """The blocks, row-major by their coordinates along `BlockNumbering.region_axes`."""
        return self.numbering.regions

    def in_memory(self, memory: str) -> TensorSpace:
        return self._with(self.dtype, memory, self.inner_product and self.inner_product.in_memory())

    def with_dtype(self, dtype: npt.DTypeLike) -> TensorSpace:
        inner = self.inner_product and self.inner_product.with_dtype(numeric_dtype(dtype))
        return self._with(dtype, self.memory, inner)

    def _with(self, dtype: npt.DTypeLike, memory: str, inner: InnerProduct | None) -> TensorSpace:
        """The same blocks of another dtype or in another kind of memory."""
        return TensorSpace(
            self.global_shape,
            self.partition,
            dtype,
            self.axes,
            self.name,
            bounds=dict(enumerate(self.bounds)),
            memory=memory,
            inner=inner,
        )

    def over_reals(self) -> TensorSpace:
        count, dtype = parts_of(self.dtype)
        return TensorSpace(
            (*self.global_shape, count),
            self.partition,
            dtype,
            self.axes,
            self.name,
            bounds=dict(enumerate(self.bounds)),
            memory=self.memory,
        )

    @cached_property
    def made_from(self) -> tuple[Any, ...]:
        """The fields that determine the space; equal tuples mean equal spaces."""
        own = self.inner_product and self.inner_product.digest
        return self.global_shape, self.dtype, *self.numbering.made_from, own

    @cached_property
    def digest(self) -> bytes:
        return self.digest_without(())

    def digest_without(self, uncut: Collection[int]) -> bytes:
        """The digest of this space with extent 1 in the dimensions `uncut`, of which every block
        holds the full extent."""
        shape, dtype, partition, axes, bounds, name, memory, own = self.made_from
        shape = tuple(1 if d in uncut else n for d, n in enumerate(shape))
        bounds = tuple(((0, 1),) if d in uncut else cuts for d, cuts in enumerate(bounds))
        workers = hashlib.sha256(np.array(partition.workers, np.int64).tobytes()).digest()
        text = repr((shape, partition.shape, workers, dtype.str, axes, name, bounds, memory))
        return hashlib.sha256(text.encode() + (own or b"")).digest()

    def region(self, worker: int) -> Region:
        """The block that a worker holds.

        Raises:
            PartitionError: the worker is not in the partition.
        """
        return self.numbering.at(self.numbering.number(worker))

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

    @property
    def shape_of_weights(self) -> tuple[int, ...]:
        return self.global_shape

    def index_of(self, region: Region) -> tuple[Any, ...]:
        """NumPy index of a block in the global array; gives a view for 0-d tensors too."""
        return (*self.block(region), ...)

    def local_shape(self, worker: int) -> tuple[int, ...]:
        """The shape of a worker's block."""
        return self.region(worker).shape

    @cached_property
    def whole(self) -> Whole | None:
        """The global tensor, after a dimension for each grid axis of independent copies, without
        elements that no block holds; None if blocks overlap, for then flat vectors are block after
        block."""
        cuts = [_side_by_side(bounds) for bounds in self.bounds]
        if any(starts is None for starts in cuts):
            return None
        copies = [k for k, axis in enumerate(self.axes) if axis == COPIES]
        sizes = [sum(stop - start for start, stop in bounds) for bounds in self.bounds]
        shape = (*(self.partition.shape[k] for k in copies), *sizes)
        places = []
        for region in self.regions:
            at = self.partition.coordinates(region.workers[0])
            blocks = (at[self.axes.index(d)] if d in self.axes else 0 for d in range(self.ndim))
            starts = (cuts[d][k] for d, k in enumerate(blocks))  # type: ignore[index]
            index = (slice(s, s + n) for s, n in zip(starts, region.shape, strict=True))
            places.append((*(at[k] for k in copies), *index, ...))
        return Whole(shape, places)

    @property
    def several(self) -> str:
        return f"X.scatter(x), which divides a global array of this space X, or {super().several}"

    def check(self, region: Region, array: npt.ArrayLike, kind: type[Any] = np.ndarray) -> Array:
        try:
            return super().check(region, array, kind)
        except ShapeError as error:
            if getattr(array, "shape", None) != self.global_shape:
                raise
            raise ShapeError(
                f"{error}; X.scatter(x) divides a global array of this space X"
            ) from None

    def scatter(self, array: npt.ArrayLike) -> Vector:
        """Divide a global array, of shape `global_shape`, into blocks; each is a copy.

        Arrays of dtypes that the space's contains, and sequences of numbers, are converted: whole
        numbers exactly, those of sequences that are fractions rounded to the nearest of the dtype.

        Raises:
            ShapeError: the array has another shape. DTypeError: its values do not fit the dtype.
            ArgumentError: an array that does not convert to NumPy's, as one on a device.

        Example:
            >>> X = linop.TensorSpace((5,), linop.Partition(2))
            >>> v = X.scatter(np.arange(5.0))
            >>> [v[region.name].tolist() for region in X.regions]
            [[0.0, 1.0, 2.0], [3.0, 4.0]]
        """
        if not hasattr(array, "dtype"):
            array = of_dtype(array, self.dtype, "scatter")
        array = array_of(array, "scatter")
        if array.dtype != self.dtype and np.can_cast(array.dtype, self.dtype, "safe"):
            array = of_dtype(array, self.dtype, "scatter")
        if array.shape != self.global_shape:
            raise ShapeError(
                f"scatter: global array of shape {array.shape} given, {self.global_shape} expected"
            )
        blocks = {r.name: array[self.index_of(r)].copy() for r in self.regions}
        return self.vector(blocks)

    def gather(self, vector: Vector | Mapping[str, npt.ArrayLike]) -> Array:
        """Assemble the blocks of a vector into a new global array, of shape `global_shape`.

        Raises:
            SpaceError: copies or overlapping blocks disagree (NaN equals NaN), the blocks do not
                cover the tensor, or the vector is of another space or lacks regions.

        Example:
            >>> X = linop.TensorSpace((5,), linop.Partition(2))
            >>> A = linop.stencil(X, {0: 2.0})
            >>> X.gather(A(X.scatter(np.arange(5.0)))).tolist()
            [0.0, 2.0, 4.0, 6.0, 8.0]
        """
        vector = vector if isinstance(vector, Vector) else self.vector(vector)
        self.same_as(vector.space, "gather")
        vector.require_all("gather")
        array = np.zeros(self.global_shape, self.dtype)
        seen = np.zeros(self.global_shape, bool)
        for region in self.regions:
            where = self.index_of(region)
            array[where] = vector[region.name]
            seen[where] = True
        if not seen.all():
            raise SpaceError(f"gather: the blocks of {self!r} leave out elements of the tensor")
        for region in self.regions:
            if not _same(array[self.index_of(region)], vector[region.name]):
                raise SpaceError(
                    f"gather: block {region.name!r} differs from another copy of its elements; "
                    f"sum_reduce the copies first, or read one block by its region"
                )
        return array

    def like(
        self, partition: Partition, axes: Sequence[Axis], bounds: Mapping[int, Bounds] | None = None
    ) -> TensorSpace:
        """The same global tensor, name and memory on another partition; balanced in dimensions
        without `bounds`. It has the weights of the global tensor, if no element is in several
        blocks; else it is Euclidean.

        Example:
            >>> X = linop.TensorSpace((6, 4), linop.Partition((3, 1)))
            >>> X.like(linop.Partition(2), axes=[1]).local_shape(0)
            (6, 2)
        """
        made = TensorSpace(
            self.global_shape,
            partition,
            self.dtype,
            axes,
            self.name,
            bounds=bounds,
            memory=self.memory,
        )
        inner = self.inner_of_other_blocks
        return made.with_inner(inner) if inner is not None and made._holds_each_once else made

    @property
    def _holds_each_once(self) -> bool:
        """True if no element of the tensor is in several blocks, or in several copies of one."""
        grid = zip(self.axes, self.partition.shape, strict=True)
        several = any(axis is COPIES and extent > 1 for axis, extent in grid)
        return not several and None not in map(_side_by_side, self.bounds)

    @property
    def inner_of_other_blocks(self) -> InnerProduct | None:
        """The inner product of the same tensor in other blocks: weights that were given as a number
        or for the global tensor; else None."""
        return self.inner_product and self.inner_product.of_other_blocks()

    @property
    def ndim(self) -> int:
        """Number of dimensions of the global tensor."""
        return len(self.global_shape)

    def draw(self) -> Picture:
        """The picture of the tensor in its blocks, each with its workers: in one, two or three
        dimensions, those that are cut first. Of more than 8 blocks along one a few are drawn."""
        from linop.spaces.pictures import blocks_picture

        return blocks_picture(self)

    def _repr_html_(self) -> str:
        return showing.tensor_html(self)

    def __repr__(self) -> str:
        memory = "" if self.memory == "default" else f", memory={self.memory!r}"
        return (
            f"TensorSpace({self.global_shape}, {self.partition!r}, dtype={self.dtype.name}, "
            f"axes={self.axes}, name={self.name!r}{memory}{self._inner_shown})"
        )


def _side_by_side(bounds: Bounds) -> list[int] | None:
    """The positions at which blocks of a dimension begin if indices that no block holds are left
    out; None if some overlap."""
    starts, end, length = [0] * len(bounds), 0, 0
    for k in sorted(range(len(bounds)), key=lambda k: bounds[k]):
        start, stop = bounds[k]
        if start < min(end, stop):
            return None
        starts[k], end, length = length, max(end, stop), length + stop - start
    return starts


def _same(a: Array, b: Array) -> bool:
    unequal = a != b
    return not (unequal & ~(np.isnan(a) & np.isnan(b))).any() if unequal.any() else True
