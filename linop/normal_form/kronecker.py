"""Rows that are the Kronecker product of one-dimensional relations.

Regions that stand on a grid are numbered by their coordinates in row-major order. Where each
coordinate of the destination depends on one coordinate of the source, and the boxes of each tensor
dimension on these two, a relation of thousands of regions is the product of a few small ones; the
rows of some regions are made from them in time proportional to their number.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from linop.normal_form.boxes import Ints, Table, canonical, expand
from linop.normal_form.columns import ones
from linop.normal_form.rows import Rows, digest_of, swap
from linop.spaces.partition import GridAxis

SHORT = 256
"""Rows up to which all are made when some are asked for: a halo exchange over 6 × 6 workers."""


NO_AXIS = GridAxis(1, 1)
"""For a relation with one side only: the only coordinate is 0."""


@dataclass(frozen=True, eq=False)
class Factor:
    """A relation of one axis of the destinations' grid with one of the sources'.

    `table` has coordinates for regions, and the boxes of tensor dimension `dim`; or no box, where
    it is about no dimension.
    """

    table: Table
    dst: GridAxis
    src: GridAxis
    dim: int | None = None

    @cached_property
    def rows(self) -> Table:
        """In the order of destination, then source."""
        return canonical(self.table)

    @cached_property
    def single(self) -> bool:
        """Whether there is at most one row for each pair of coordinates."""
        pairs = np.stack([self.rows.dst, self.rows.src])
        return not bool((pairs[:, 1:] == pairs[:, :-1]).all(axis=0).any())

    @cached_property
    def trivial(self) -> bool:
        """True if it says nothing: it relates the only coordinates of two axes."""
        return (self.dst.extent, self.src.extent, self.dim) == (1, 1, None) and len(self.rows) == 1

    @cached_property
    def uncut(self) -> bool:
        """True if it is all of a dimension that nobody cuts, or its beginning."""
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
        """For the regions wanted: the first and the number of their rows, in a list of rows."""
        axis, keys = (self.src, self.rows.src) if outgoing else (self.dst, self.rows.dst)
        listed = self.by_source if outgoing else np.arange(len(keys))
        at = axis.of(wanted)
        first = np.searchsorted(keys[listed], at, "left")
        return first, np.searchsorted(keys[listed], at, "right") - first, listed


class Kronecker(Rows):
    """The product of relations, one of every axis and tensor dimension; coefficients are 1.

    Args:
        factors: every axis of both grids in one of them, every dimension too.
        ndim: columns of boxes: tensor dimensions, or 1 for none.
        sizes: regions in all, (destinations, sources).
    """

    def __init__(self, factors: Sequence[Factor], ndim: int, sizes: tuple[int, int]) -> None:
        # The slowest source axis first: then rows come sorted by destination and source.
        slowest = sorted(factors, key=lambda f: -f.src.stride if f.src.extent > 1 else 0)
        self.parts = [part for part in slowest if not part.trivial]
        self.ndim = ndim
        self.sizes = sizes

    def _all(self) -> Table:
        return self.table

    @cached_property
    def table(self) -> Table:
        return self._canonical(self._into(np.arange(self.sizes[0])))

    @cached_property
    def short(self) -> bool:
        return prod(len(part.rows.dst) for part in self.parts) <= SHORT

    def into(self, dst: Ints) -> Table:
        return super().into(dst) if self.short else self._canonical(self._into(dst))

    def _canonical(self, rows: Table) -> Table:
        # Boxes of a factor are not empty; with one for each pair of regions this is canonical.
        return rows if all(part.single for part in self.parts) else canonical(rows)

    def _into(self, dst: Ints) -> Table:
        return self._rows(dst, outgoing=False)

    def _out_of(self, src: Ints) -> Table:
        return self._rows(src, outgoing=True)

    def _rows(self, wanted: Ints, outgoing: bool) -> Table:
        matches = [part.matches(wanted, outgoing) for part in self.parts]
        counts = np.ones(len(wanted), np.int64)
        for _, count, _ in matches:
            counts = counts * count
        which, within = expand(counts)
        n = len(which)
        dst, src = np.zeros(n, np.int64), np.zeros(n, np.int64)
        at, of = np.zeros((n, self.ndim), np.int64), np.zeros((n, self.ndim), np.int64)
        extent = np.ones((n, self.ndim), np.int64)
        for part, (first, count, listed) in reversed(list(zip(self.parts, matches, strict=True))):
            many = count[which]
            row = listed[first[which] + within % many]
            within = within // many
            dst += part.rows.dst[row] * part.dst.stride
            src += part.rows.src[row] * part.src.stride
            if part.dim is not None:
                at[:, part.dim] = part.rows.at[row, 0]
                of[:, part.dim] = part.rows.of[row, 0]
                extent[:, part.dim] = part.rows.extent[row, 0]
        return Table(dst, src, at, of, extent, ones(n))

    def counts_into(self, regions: int) -> Ints:
        return self._counts(regions, outgoing=False)

    def counts_out_of(self, regions: int) -> Ints:
        return self._counts(regions, outgoing=True)

    def _counts(self, regions: int, outgoing: bool) -> Ints:
        counts = np.ones(regions, np.int64)
        for part in self.parts:
            counts *= part.matches(np.arange(regions), outgoing)[1]
        return counts

    @cached_property
    def uncut(self) -> Mapping[int, int]:
        return {
            part.dim: int(part.rows.extent[0, 0])
            for part in self.parts
            if part.dim is not None and part.uncut
        }

    def without(self, uncut: Collection[int]) -> Rows:
        # A dimension in no factor has boxes from 0 to 1.
        return Kronecker([p for p in self.parts if p.dim not in uncut], self.ndim, self.sizes)

    @cached_property
    def digest(self) -> bytes:
        return digest_of(
            "kronecker", repr((self.ndim, self.sizes)), *sorted(part.digest for part in self.parts)
        )

    def adjoint(self) -> Rows:
        """The product of the relations' converses."""
        converses = [Factor(swap(p.table), p.src, p.dst, p.dim) for p in self.parts]
        return Kronecker(converses, self.ndim, self.sizes[::-1])
