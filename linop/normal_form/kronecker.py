"""Transfer tables that are Kronecker products of one-dimensional relations.

Regions on a grid are numbered row-major by their coordinates. If each destination coordinate
depends on one source coordinate, and the boxes of each tensor dimension on these two, a relation of
thousands of regions is the product of a few small tables; the rows of given regions are computed
from these in time proportional to the number of rows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from linop.caching import cached_property
from linop.normal_form.boxes import Ints, Table, canonical, expand
from linop.normal_form.columns import ones
from linop.normal_form.transfer_table import SHORT, TransferTable, digest_of, swap
from linop.spaces.partition import GridAxis

NO_AXIS = GridAxis(1, 1)
"""Grid axis of extent 1, for a relation with an axis on one side only."""


@dataclass(frozen=True, eq=False)
class Relation:
    """A relation between one axis of the destinations' grid and one of the sources'.

    `table` has 1-d boxes, and coordinates along the two axes for region numbers. The boxes are
    those of tensor dimension `dim`; if that is None, they are of one element and unused.
    """

    table: Table
    dst: GridAxis
    src: GridAxis
    dim: int | None = None

    @cached_property
    def rows(self) -> Table:
        """The canonical table, sorted by destination, then source."""
        return canonical(self.table)

    @cached_property
    def single(self) -> bool:
        """True if there is at most one row for each pair of coordinates."""
        pairs = np.stack([self.rows.dst, self.rows.src])
        return not bool((pairs[:, 1:] == pairs[:, :-1]).all(axis=0).any())

    @cached_property
    def trivial(self) -> bool:
        """True if it is a neutral factor: 1 × 1, without tensor dimension."""
        return (self.dst.extent, self.src.extent, self.dim) == (1, 1, None) and len(self.rows) == 1

    @cached_property
    def uncut(self) -> bool:
        """True if it is one box, from index 0 to index 0, of a dimension that is not split."""
        t = self.rows
        alone = (self.dst.extent, self.src.extent, len(t)) == (1, 1, 1)
        return alone and self.dim is not None and not (t.at.any() or t.of.any())

    @cached_property
    def digest(self) -> bytes:
        axes = [(a.extent, a.stride) if a.extent > 1 else None for a in (self.dst, self.src)]
        t, shape = self.rows, repr((axes, self.dim))
        return digest_of(shape, t.dst, t.src, t.at, t.of, t.extent)

    @cached_property
    def by_source(self) -> Ints:
        return np.argsort(self.rows.src, kind="stable")

    def matches(self, wanted: Ints, outgoing: bool) -> tuple[Ints, Ints, Ints]:
        """The rows of given regions: first, count, and the order of rows that these index.

        Args:
            wanted: region numbers, of sources if `outgoing`, else of destinations.
        """
        axis, keys = (self.src, self.rows.src) if outgoing else (self.dst, self.rows.dst)
        listed = self.by_source if outgoing else np.arange(len(keys))
        at = axis.of(wanted)
        first = np.searchsorted(keys[listed], at, "left")
        return first, np.searchsorted(keys[listed], at, "right") - first, listed


class Kronecker(TransferTable):
    """The Kronecker product of relations; all coefficients are 1.

    Args:
        relations: every axis of both grids, and every tensor dimension, is in exactly one of them.
        ndim: columns of the boxes: number of tensor dimensions, at least 1.
        sizes: numbers of regions, (destinations, sources).
    """

    def __init__(self, relations: Sequence[Relation], ndim: int, sizes: tuple[int, int]) -> None:
        # The slowest source axis first: the rows are then sorted by destination and source.
        slowest = sorted(relations, key=lambda f: -f.src.stride if f.src.extent > 1 else 0)
        self.relations = [relation for relation in slowest if not relation.trivial]
        self.ndim = ndim
        self.sizes = sizes

    def _all(self) -> Table:
        return self.table

    @cached_property
    def table(self) -> Table:
        return self._canonical(self._into(np.arange(self.sizes[0])))

    @cached_property
    def short(self) -> bool:
        return prod(len(relation.rows.dst) for relation in self.relations) <= SHORT

    def into(self, dst: Ints) -> Table:
        return super().into(dst) if self.short else self._canonical(self._into(dst))

    def _canonical(self, rows: Table) -> Table:
        # A factor has no empty boxes; with one box for each pair of regions this is canonical.
        return rows if all(relation.single for relation in self.relations) else canonical(rows)

    def _into(self, dst: Ints) -> Table:
        return self._rows(dst, outgoing=False)

    def _out_of(self, src: Ints) -> Table:
        return self._rows(src, outgoing=True)

    def _rows(self, wanted: Ints, outgoing: bool) -> Table:
        matches = [relation.matches(wanted, outgoing) for relation in self.relations]
        counts = np.ones(len(wanted), np.int64)
        for _, count, _ in matches:
            counts = counts * count
        which, within = expand(counts)
        n = len(which)
        dst, src = np.zeros(n, np.int64), np.zeros(n, np.int64)
        at, of = np.zeros((n, self.ndim), np.int64), np.zeros((n, self.ndim), np.int64)
        extent = np.ones((n, self.ndim), np.int64)
        for relation, (first, count, listed) in reversed(
            list(zip(self.relations, matches, strict=True))
        ):
            many = count[which]
            row = listed[first[which] + within % many]
            within = within // many
            dst += relation.rows.dst[row] * relation.dst.stride
            src += relation.rows.src[row] * relation.src.stride
            if relation.dim is not None:
                at[:, relation.dim] = relation.rows.at[row, 0]
                of[:, relation.dim] = relation.rows.of[row, 0]
                extent[:, relation.dim] = relation.rows.extent[row, 0]
        return Table(dst, src, at, of, extent, ones(n))

    def counts_into(self, regions: int) -> Ints:
        return self._counts(regions, outgoing=False)

    def counts_out_of(self, regions: int) -> Ints:
        return self._counts(regions, outgoing=True)

    def _counts(self, regions: int, outgoing: bool) -> Ints:
        counts = np.ones(regions, np.int64)
        for relation in self.relations:
            counts *= relation.matches(np.arange(regions), outgoing)[1]
        return counts

    @cached_property
    def uncut(self) -> Mapping[int, int]:
        return {
            relation.dim: int(relation.rows.extent[0, 0])
            for relation in self.relations
            if relation.dim is not None and relation.uncut
        }

    def without(self, uncut: Collection[int]) -> TransferTable:
        # A dimension in no factor has boxes of start 0 and extent 1.
        return Kronecker([r for r in self.relations if r.dim not in uncut], self.ndim, self.sizes)

    @cached_property
    def digest(self) -> bytes:
        return digest_of(
            "kronecker",
            repr((self.ndim, self.sizes)),
            *sorted(relation.digest for relation in self.relations),
        )

    def adjoint(self) -> TransferTable:
        """The product of the adjoint relations."""
        converses = [Relation(swap(r.table), r.src, r.dst, r.dim) for r in self.relations]
        return Kronecker(converses, self.ndim, self.sizes[::-1])
