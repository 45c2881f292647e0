"""Direct sums of spaces that remember their parts, and names that differ between spaces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from linop.errors import ArgumentError, SpaceError, expect
from linop.spaces.region import Region
from linop.spaces.scalars import Array
from linop.spaces.space import Order, Space, Whole
from linop.spaces.tensor import TensorSpace
from linop.spaces.vector import Vector
from linop.spaces.weighted import joined


class DirectSumSpace(Space):
    """The direct sum of spaces: the regions of all, and the spaces themselves as `parts`, so that
    global arrays of tensor spaces are scattered and gathered part by part, and flat vectors are
    those of the parts, one after another. Its inner product is the sum of
    theirs. It equals a `Space` of the same regions.

    Args:
        parts: spaces of one dtype, without common names of regions; the parts of direct sums among
            them are parts of this one.

    Raises:
        SpaceError: dtypes differ. RegionError: two spaces share the name of a region.

    Example:
        >>> X = linop.TensorSpace((4,), linop.Partition(2), name="x")
        >>> Y = linop.TensorSpace((2,), linop.Partition(2), name="y")
        >>> D = linop.direct_sum(linop.identity(X), linop.identity(Y))
        >>> v = D.domain.scatter(np.arange(4.0), np.array([7.0, 8.0]))
        >>> [array.tolist() for array in D.domain.gather(v)]
        [[0.0, 1.0, 2.0, 3.0], [7.0, 8.0]]
        >>> D.domain.parts == (X, Y)
        True
    """

    def __init__(self, parts: Sequence[Space]) -> None:
        if len({space.dtype for space in parts}) > 1:
            raise SpaceError(f"a direct sum keeps the dtype; given {[s.dtype.name for s in parts]}")
        nested = (p.parts if isinstance(p, DirectSumSpace) else (p,) for p in parts)
        self.parts: tuple[Space, ...] = tuple(part for some in nested for part in some)
        super().__init__((r for space in parts for r in space.regions), parts[0].dtype)
        self.inner_product = joined(self.parts)

    def in_memory(self, memory: str) -> DirectSumSpace:
        return DirectSumSpace([part.in_memory(memory) for part in self.parts])

    def with_dtype(self, dtype: npt.DTypeLike) -> DirectSumSpace:
        return DirectSumSpace([part.with_dtype(dtype) for part in self.parts])

    def over_reals(self) -> DirectSumSpace:
        return DirectSumSpace([part.over_reals() for part in self.parts])

    def with_inner(self, inner: Any) -> DirectSumSpace:
        if self.inner_product is not None:
            return DirectSumSpace([part.euclidean for part in self.parts]).with_inner(inner)
        return super().with_inner(inner)

    @property
    def wholes(self) -> tuple[Whole | None, ...]:
        return tuple(part.whole for part in self.parts)

    def _in_order(self, arrays: Mapping[str, Array], dtype: npt.DTypeLike, order: Order) -> Array:
        return np.concatenate([part._in_order(arrays, dtype, order) for part in self.parts])

    def _out_of_order(self, flat: Array, order: Order) -> dict[str, Array]:
        ends = np.cumsum([part.size for part in self.parts])[:-1]
        pieces = zip(self.parts, np.split(flat, ends), strict=True)
        return {n: a for part, own in pieces for n, a in part._out_of_order(own, order).items()}

    def join(self, *vectors: Vector) -> Vector:
        """The vector of given parts, without messages or copies; on each worker of a program of the
        parts that it holds. A part may be of regions with other names, as operators' blocks have.

        Raises:
            ArgumentError: not one vector for each part. SpaceError: one is of a space with other
                regions, apart from names, or of another dtype.
        """
        if len(vectors) != len(self.parts):
            raise ArgumentError(f"join: {len(self.parts)} parts, {len(vectors)} vectors given")
        arrays: dict[str, Array] = {}
        for k, (part, vector) in enumerate(zip(self.parts, vectors, strict=True)):
            space = expect("join", vector, Vector).space
            if _nameless(part) != _nameless(space):
                part.same_as(space, f"join, part {k}")
            names = zip(part.regions, space.regions, strict=True)
            arrays |= {mine.name: vector[r.name] for mine, r in names if r.name in vector}
        first, *others = (vector.shared for vector in vectors)
        return Vector(self, arrays, first and first.derived("join", *others))

    def split(self, vector: Vector) -> tuple[Vector, ...]:
        """The parts of a vector, each in its own space, without messages or copies.

        Raises:
            ArgumentError: it is no `Vector`. SpaceError: it is of another space.
        """
        self.same_as(expect("split", vector, Vector).space, "split")
        found = []
        for k, part in enumerate(self.parts):
            arrays = {r.name: vector[r.name] for r in part.regions if r.name in vector}
            found.append(Vector(part, arrays, vector.shared and vector.shared.derived(f"part {k}")))
        return tuple(found)

    def scatter(self, *arrays: Any) -> Vector:
        """The vector of one argument for each part: the global array of a `TensorSpace`
        (`TensorSpace.scatter`), and what `Space.vector` takes for another space.

        Raises:
            ArgumentError: not one argument for each part; or as the parts raise.
        """
        if len(arrays) != len(self.parts):
            raise ArgumentError(f"scatter: {len(self.parts)} parts, {len(arrays)} arrays given")
        vectors = [
            part.scatter(array) if isinstance(part, TensorSpace) else part.vector(array)
            for part, array in zip(self.parts, arrays, strict=True)
        ]
        return Vector(self, {n: a for v in vectors for n, a in v.arrays.items()})

    def gather(self, vector: Vector) -> tuple[Any, ...]:
        """For each part, the global array of a `TensorSpace` (`TensorSpace.gather`), and the
        `Vector` of another space.

        Raises:
            SpaceError: the vector is of another space, or lacks regions; or as the parts raise.
        """
        self.same_as(vector.space, "gather")
        vector.require_all("gather")
        found: list[Any] = []
        for part in self.parts:
            own = Vector(part, {r.name: vector[r.name] for r in part.regions})
            found.append(part.gather(own) if isinstance(part, TensorSpace) else own)
        return tuple(found)


def _nameless(space: Space) -> tuple[Any, ...]:
    return space.dtype, [(r.shape, r.workers, r.memory) for r in space.regions]


def joined_space(spaces: Sequence[Space]) -> Space:
    """The direct sum of spaces; of one, itself.

    Raises:
        SpaceError: dtypes differ. RegionError: two spaces share the name of a region.
    """
    return spaces[0] if len(spaces) == 1 else DirectSumSpace(spaces)


def distinct(spaces: Sequence[Space]) -> list[Space]:
    """The spaces, with regions renamed whose name is in several of them: ``x`` of the third space,
    say, as ``x2``; a tensor space stays one."""
    counts = Counter(region.name for space in spaces for region in space)
    taken = set(counts)
    return [_renamed(space, k, counts, taken) for k, space in enumerate(spaces)]


def _renamed(space: Space, k: int, counts: Counter[str], taken: set[str]) -> Space:
    if all(counts[region.name] == 1 for region in space):
        return space
    if isinstance(space, TensorSpace):
        mark = str(k)
        while not taken.isdisjoint((made := _tensor(space, space.name + mark)).numbering.index):
            mark += "'"
        taken.update(made.numbering.index)
        return made
    regions = [_distinct(r, k, taken) if counts[r.name] > 1 else r for r in space]
    names = {old.name: new.name for old, new in zip(space.regions, regions, strict=True)}
    inner = space.inner_product and space.inner_product.renamed(names)
    return Space(regions, space.dtype, inner=inner)


def _tensor(X: TensorSpace, name: str) -> TensorSpace:
    """A tensor space of another name."""
    bounds = dict(enumerate(X.bounds))
    made = TensorSpace(
        X.global_shape, X.partition, X.dtype, X.axes, name, bounds=bounds, memory=X.memory
    )
    names = dict(zip(X.numbering.index, made.numbering.index, strict=True))
    return made.with_inner(X.inner_product and X.inner_product.renamed(names))


def _distinct(region: Region, k: int, taken: set[str]) -> Region:
    name = f"{region.name}{k}"
    while name in taken:
        name += "'"
    taken.add(name)
    return Region(name, region.shape, region.workers, region.memory)
