"""Spaces: direct sums of regions.

A `Space` owns the inner product: no other module defines one. Operators, backends and communicators
do not belong here.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from linop.caching import attributes, cached_property
from linop.errors import ArgumentError, RegionError, ShapeError, SpaceError, expect
from linop.spaces import showing
from linop.spaces.contents import accepted
from linop.spaces.differences import inner_text, replicas_text, side_by_side, workers_text
from linop.spaces.float_formats import native
from linop.spaces.inner_products import dot
from linop.spaces.numbering import Numbering
from linop.spaces.real_parts import parts_of
from linop.spaces.region import (
    Part,
    Region,
    Subset,
    as_subset,
    integer,
    known_memory,
    memory_mark,
)
from linop.spaces.scalars import Array, Scalar, numeric_dtype, of_dtype
from linop.spaces.vector import Vector, inners
from linop.spaces.weighted import InnerProduct, inner_product_of

Order = Literal["global", "regions"]
"""Orders of the elements of a flat vector: see `Space.flatten`."""


class Whole(NamedTuple):
    """An array that all regions of a space are parts of.

    Attributes:
        shape: of the array.
        places: the index of each region in it, in order; they are apart, and cover it.
    """

    shape: tuple[int, ...]
    places: Sequence[tuple[Any, ...]]


class Space:
    """The direct sum of regions over one dtype, with an inner product. A replicated region counts
    once.

    The order of the regions fixes the order of rows and columns in matrices and flat vectors
    (`TensorSpace` has the order of its global tensor) and nothing else: spaces with the same
    regions, dtype and inner product are equal, since a direct sum is addressed by name.

    Args:
        regions: one, or several of different names.
        dtype: of the elements.
        inner: the inner product <v, w> = v^H G w, which adjoints, norms and solvers are of. None
            for the Euclidean (complex: Hermitian) one. Positive weights, the diagonal of G: a
            number, an array of the only region's shape, a mapping of these by region name, or a
            `Vector`. Or ``linop.inner_product(G, inverse)`` of an operator. On floating dtypes.

    Raises:
        RegionError: two regions share a name, or weights of one are missing.
        DTypeError: the dtype is not numeric; or it is an integer one, and `inner` is given.
        ArgumentError: weights are not positive and finite. ShapeError: they do not fit.
        SpaceError: the operator is of other regions.

    Example:
        >>> V = linop.Space([linop.Region("a", 2), linop.Region("b", 3, workers=1)])
        >>> v = V.vector({"a": np.array([1.0, 2.0]), "b": np.ones(3)})
        >>> V.size, V.workers, v.inner(v)
        (5, (0, 1), 8.0)
    """

    def __init__(
        self,
        regions: Iterable[Region] | Region,
        dtype: npt.DTypeLike = np.float64,
        *,
        inner: Any = None,
    ) -> None:
        try:
            given = (regions,) if isinstance(regions, Region) else tuple(regions)
        except TypeError:
            raise ArgumentError(f"a Space is made of Regions; given {regions!r}") from None
        for region in given:
            if not isinstance(region, Region):
                raise ArgumentError(f"a Space is made of Regions; given {region!r}")
        self.regions: tuple[Region, ...] = given
        self.numbering = Numbering(given)
        if len(self.numbering.index) < len(given):
            names = [r.name for r in given]
            twice = sorted({n for n in names if names.count(n) > 1})
            raise RegionError(
                f"duplicate region {', '.join(map(repr, twice))} in a space: {names}"
                f"{replicas_text(given, twice)}"
            )
        self.dtype = numeric_dtype(dtype)
        self.inner_product = inner_product_of(self, inner)

    inner_product: InnerProduct | None
    """The inner product; None for the Euclidean one."""

    @property
    def workers(self) -> tuple[int, ...]:
        """Every worker that holds a region, in order."""
        return self.numbering.workers

    def on(self, worker: int) -> tuple[Region, ...]:
        """The regions that a worker holds, in the order of the space."""
        return self.numbering.on(worker)

    def in_memory(self, memory: str) -> Space:
        """The same regions, all in one kind of memory; `linop.offload` moves vectors there.

        Raises:
            ArgumentError: `memory` is none of `linop.spaces.region.MEMORIES`.
        """
        known_memory(memory, "in_memory")
        regions = (Region.checked(r.name, r.shape, r.workers, memory) for r in self.regions)
        inner = self.inner_product and self.inner_product.in_memory()
        return Space(regions, self.dtype, inner=inner)

    def with_dtype(self, dtype: npt.DTypeLike) -> Space:
        """The same regions over another dtype; with the same weights, if that is a floating one,
        but without the inner product of an operator.

        Raises:
            DTypeError: the dtype is not numeric.
        """
        inner = self.inner_product and self.inner_product.with_dtype(numeric_dtype(dtype))
        return Space(self.regions, dtype, inner=inner)

    def with_inner(self, inner: Any) -> Self:
        """The same space with another inner product; `linop.identity` maps the one to the other.

        Args:
            inner: as for the class; None for the Euclidean one.

        Raises:
            LinopError: `inner` does not fit, as for the class.
        """
        made = copy.copy(self)
        made.inner_product = inner_product_of(self, inner)
        return made

    def __getstate__(self) -> dict[str, Any]:
        """The attributes without what is derived from the inner product, or differs in another
        process."""
        derived = ("_riesz", "_hash", "digest", "euclidean", "made_from")
        return {name: own for name, own in attributes(self).items() if name not in derived}

    @cached_property
    def euclidean(self) -> Self:
        """The same space with the Euclidean inner product; itself if it has that."""
        return self if self.inner_product is None else self.with_inner(None)

    @property
    def shape_of_weights(self) -> tuple[int, ...] | None:
        """The shape that an array of weights has; None if they are given by region name."""
        return self.regions[0].shape if len(self.regions) == 1 else None

    def index_of(self, region: Region) -> tuple[Any, ...]:
        """The index of a region in such an array."""
        return (...,)

    def over_reals(self) -> Space:
        """The same vectors over the real numbers: each region as one with another dimension, of 2
        real and imaginary parts, or of 1 of a real dtype, in the same memory
        (`linop.spaces.real_parts`)."""
        count, dtype = parts_of(self.dtype)
        regions = (
            Region.checked(r.name, (*r.shape, count), r.workers, r.memory) for r in self.regions
        )
        return Space(regions, dtype)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 digest of regions, their order, dtype and inner product; the same on every
        machine."""
        own = self.inner_product and self.inner_product.digest
        said = repr((self.dtype.str, self.regions)).encode() + (own or b"")
        return hashlib.sha256(said).digest()

    @cached_property
    def offsets(self) -> Mapping[str, int]:
        """Offset, in elements, of each region in a flat vector, by name."""
        sizes = np.cumsum([0, *(region.size for region in self.regions)])
        return {r.name: int(k) for r, k in zip(self.regions, sizes, strict=False)}

    @cached_property
    def size(self) -> int:
        """Dimension of the space: the number of elements, a replicated region counted once."""
        return sum(region.size for region in self.regions)

    def __getitem__(self, name: str) -> Region:
        try:
            return self.numbering.at(self.numbering.index[name])
        except (KeyError, TypeError):
            known = ", ".join(map(repr, self.numbering.index)) or "none at all"
            raise RegionError(f"unknown region {name!r}; this space has {known}") from None

    def __contains__(self, item: object) -> bool:
        """True if the space has this region, or a region of this name."""
        if isinstance(item, Region):
            return item.name in self.numbering.index and self[item.name] == item
        return item in self.numbering.index

    def __len__(self) -> int:
        return len(self.numbering)

    def __iter__(self) -> Iterator[Region]:
        return iter(self.regions)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Space):
            return NotImplemented
        return self.has_regions_of(other) and same_inner_product(self, other)

    def has_regions_of(self, other: Space) -> bool:
        """True if the regions and dtype of another space are the same, whatever their order and the
        inner products."""
        if self.dtype != other.dtype or len(self) != len(other):
            return False
        return self.numbering == other.numbering or all(region in self for region in other.regions)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.dtype, frozenset(self.regions)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self}, dtype={self.dtype.name}{self._inner_shown})"

    @property
    def _inner_shown(self) -> str:
        """The inner product as the end of a list of arguments."""
        return "" if self.inner_product is None else f", inner={inner_text(self)}"

    def _repr_html_(self) -> str:
        return showing.space_html(self)

    def __str__(self) -> str:
        parts = [f"{r.name}{list(r.shape)}@{workers_text(r)}{memory_mark(r)}" for r in self.regions]
        return " ⊕ ".join(parts if len(parts) <= 8 else [*parts[:6], "…", parts[-1]]) or "0"

    def require(self, part: Part) -> Subset:
        """Convert a region or subset to a subset, after a check that its region is in this space.

        Raises:
            RegionError: the space has no such region, or a different one of that name.
        """
        subset = as_subset(part)
        mine = self[subset.region.name]
        if mine != subset.region:
            raise RegionError(
                f"region {mine.name!r} of this space is {mine!r}; given {subset.region!r}"
            )
        return subset

    # Vectors

    def vector(self, arrays: Mapping[str, npt.ArrayLike] | npt.ArrayLike) -> Vector:
        """The vector of given arrays, by region name; a bare array if there is one region.

        Regions may be omitted: the vector then holds this process's regions of an element of the
        space. Arrays are not copied, and must be of the space's dtype; other sequences of numbers
        are converted (`linop.spaces.scalars.of_dtype`).

        Raises:
            RegionError: unknown name. ShapeError, DTypeError: an array does not fit its region.
            ArgumentError: a bare array for several regions; or as `check`. SpaceError: a `Vector`
                of another space.
        """
        if isinstance(arrays, Vector):
            self.same_as(arrays.space, "vector")
            return arrays
        if not isinstance(arrays, Mapping):
            if len(self.regions) != 1:
                raise ArgumentError(
                    f"a bare array fits a space of one region; this one has {len(self.regions)}: "
                    f"give {self.several}"
                )
            arrays = {self.regions[0].name: arrays}
        return Vector(self, {n: self.check(self[n], array) for n, array in arrays.items()})

    @property
    def several(self) -> str:
        """Advice for errors: forms of a vector with several regions."""
        names = list(self.numbering.index)
        named = ", ".join(names if len(names) <= 8 else [*names[:6], "…", names[-1]])
        return f"a dict by region name ({named}), or the Vector X.unflatten(x) of this space X"

    def check(self, region: Region, array: npt.ArrayLike, kind: type[Any] = np.ndarray) -> Array:
        """Check that an array has the region's shape and the space's dtype, and return it.

        Args:
            kind: the array class expected; device backends pass their own.

        Raises:
            ShapeError, DTypeError: the shape or the dtype differs.
            ArgumentError: the array is in another memory (host or device), or of a subclass of
                `numpy.ndarray` (`linop.spaces.scalars.plain`), or of another package.
        """
        return accepted(region, self.dtype, array, kind)

    def zeros(self) -> Vector:
        """The zero vector, with arrays for all regions."""
        return Vector(self, {r.name: np.zeros(r.shape, self.dtype) for r in self.regions})

    def random(self, seed: int | None = None) -> Vector:
        """A random vector, determined by the seed: standard normal, or for an integer dtype whole
        numbers from -9 to 9. The dtype rounds the normal numbers, which are drawn in float64."""
        if self.dtype.kind in "iu":
            return self.integers(seed)
        return self._fill(seed, lambda rng, shape: rng.standard_normal(shape))

    def integers(self, seed: int | None = None, low: int = -9, high: int = 9) -> Vector:
        """A random vector of whole numbers from `low` to `high`, both included (an unsigned dtype
        starts at 0): sums and inner products of them are exact in floating point.

        Raises:
            ArgumentError: no number is between the two, or one is not between -2**63 and 2**63.
            DTypeError: the dtype does not hold a number that was drawn.
        """
        low, high = integer(low, "low"), integer(high, "high")
        low = max(low, 0) if self.dtype.kind == "u" else low
        if not -(2**63) <= low <= high < 2**63:
            raise ArgumentError(
                f"integers: -2**63 <= low <= high < 2**63 expected, {low} and {high} given"
            )

        def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
            if native(self.dtype) and -128 <= low and high < 128:  # which each of them holds
                return rng.integers(low, high, shape, endpoint=True)
            drawn = rng.integers(low, high, shape, endpoint=True)
            return of_dtype(drawn, self.dtype, f"whole numbers from {low} to {high}")

        return self._fill(seed, draw)

    def _fill(
        self, seed: int | None, draw: Callable[[np.random.Generator, tuple[int, ...]], Any]
    ) -> Vector:
        if seed is not None and integer(seed, "seed") < 0:
            raise ArgumentError(f"seed: a whole number from 0 expected, given {seed}")
        rng = np.random.default_rng(seed)
        arrays = {}
        for region in self.regions:
            values = np.asarray(draw(rng, region.shape))
            if self.dtype.kind == "c":
                values = values + 1j * draw(rng, region.shape)
            arrays[region.name] = np.asarray(values.astype(self.dtype))
        return Vector(self, arrays)

    def flatten(self, vector: Vector, order: Order = "global") -> Array:
        """All elements in a new 1-d array of shape (size,): the regions in order, each in C order;
        those of a `TensorSpace` in the C order of the global tensor.

        Args:
            order: "regions" for the order of the regions, whichever the space is.

        Raises:
            SpaceError: the vector is of another space, or lacks regions. ArgumentError: `order` is
                neither of the two.
        """
        self.same_as(expect("flatten", vector, Vector).space, "flatten")
        vector.require_all("flatten")
        return self._in_order(vector.arrays, self.dtype, order)

    def _in_order(self, arrays: Mapping[str, Array], dtype: npt.DTypeLike, order: Order) -> Array:
        """Arrays of all regions, in a new flat array."""
        whole = self._whole(order)
        if whole is None:
            pieces = [arrays[r.name].ravel() for r in self.regions]
            return np.concatenate(pieces) if pieces else np.zeros(0, dtype)
        array = np.empty(whole.shape, dtype)
        for region, where in zip(self.regions, whole.places, strict=True):
            array[where] = arrays[region.name]
        return array.reshape(-1)

    def unflatten(self, flat: npt.ArrayLike, order: Order = "global") -> Vector:
        """The vector with the elements of a flat array, in the order of `flatten`; a copy.

        Numbers of another dtype are converted: integers exactly, floats rounded to the nearest of
        the space's dtype (`linop.spaces.scalars.of_dtype`).

        Raises:
            ShapeError: the number of elements is not `size`.
            DTypeError: the space's dtype does not hold a number: it is an integer out of range or
                between two floats, a fraction for integers, complex for real numbers, or overflows.
            ArgumentError: `order` is neither "global" nor "regions".
        """
        checked_order(order)
        flat = of_dtype(flat, self.dtype, "flat vector")
        if flat.size != self.size:
            raise ShapeError(f"flat vector of size {flat.size} given, {self.size} expected")
        return Vector(self, self._out_of_order(flat.reshape(-1), order))

    def _out_of_order(self, flat: Array, order: Order) -> dict[str, Array]:
        """The arrays of all regions in a flat one."""
        whole = self._whole(order)
        if whole is not None:
            array = flat.reshape(whole.shape)
            pieces = [array[where].copy() for where in whole.places]
        else:
            pieces = np.split(flat, list(self.offsets.values())[1:]) if self.regions else []
        return {r.name: p.reshape(r.shape) for r, p in zip(self.regions, pieces, strict=True)}

    def _whole(self, order: Order) -> Whole | None:
        """The array that flat vectors of this order are; None if that is region after region."""
        return self.whole if checked_order(order) == "global" else None

    @property
    def whole(self) -> Whole | None:
        """The array whose C order is that of flat vectors; None if they are region after region."""
        return None

    @property
    def wholes(self) -> tuple[Whole | None, ...]:
        """`whole`, of each part of a direct sum: equal for spaces with the same regions, in the
        same order, if flat vectors are the same."""
        return (self.whole,)

    def positions(self, other: Space) -> npt.NDArray[np.int64]:
        """For each element of a flat vector, its position in the order of regions of a space that
        equals this one."""
        firsts = other.offsets
        numbers = {
            r.name: firsts[r.name] + np.arange(r.size).reshape(r.shape) for r in self.regions
        }
        return self._in_order(numbers, np.int64, "global")

    def same_as(self, other: Space, what: str) -> None:
        """Check that another space equals this one.

        Raises:
            SpaceError: the spaces differ; the message lists the differences side by side.
        """
        if self != expect(what, other, Space):
            raise SpaceError(f"{what}: the spaces differ\n{side_by_side(self, other)}")

    # The inner product

    def partial_inners(self, v: Vector, w: Vector) -> dict[int, Scalar]:
        """The summands of <v, w> over the regions that v and w both hold, by worker. A replicated
        region counts for its first worker."""
        partial: dict[int, Scalar] = {}
        weighed = w.arrays if self.inner_product is None else self.inner_product.weighed(w)
        for region in self.regions:
            if region.name in v and region.name in weighed:
                worker = region.workers[0]
                product = dot(v[region.name], weighed[region.name])
                partial[worker] = partial.get(worker, 0) + product
        return partial

    def inner(self, v: Vector, w: Vector) -> Scalar:
        """<v, w>, conjugate-linear in v (paper, equation 2), summed in the order of workers:
        bitwise equal on every backend. Collective for vectors made by a backend; if it is that of
        an operator, this compiles the operator, once, and runs it.

        Raises:
            ArgumentError: v or w is not a vector. SpaceError: v or w is of another space, or lacks
                regions. BackendError: workers ask for products of different vectors. Of vectors
                made by a backend on every worker.
        """
        return inners([(v, w)], space=self)[0]


def checked_order(order: Order) -> Order:
    """An order of flat vectors.

    Raises:
        ArgumentError: it is neither "global" nor "regions".
    """
    if order not in ("global", "regions"):
        raise ArgumentError(f'order: "global" or "regions" expected, given {order!r}')
    return order


def same_inner_product(left: Space, right: Space) -> bool:
    """True if two spaces of the same regions have the same inner product."""
    one, other = left.inner_product, right.inner_product
    if one is other:
        return True
    return one is not None and other is not None and one.agrees(left, right)
