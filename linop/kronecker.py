"""Rows that are the Kronecker product of one-dimensional relations.

Regions that stand on a grid are numbered by their coordinates in row-major order. Where each
coordinate of the destination depends on one coordinate of the source, and the boxes of each tensor
dimension on these two, a relation of thousands of regions is the product of a few small ones; the
rows of some regions are made from them in time proportional to their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from linop.boxes import Ints, Table, canonical, expand
from linop.rows import Rows, digest_of


@dataclass(frozen=True)
class GridAxis:
    """One axis of a grid of regions, as it counts in the row-major number of a region."""

    extent: int
    stride: int

    def of(self, numbers: Ints) -> Ints:
        """The coordinates of regions along this axis."""
        return numbers // self.stride % self.extent


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
        self.parts = sorted(factors, key=lambda f: -f.src.stride if f.src.extent > 1 else 0)
        self.ndim = ndim
        self.sizes = sizes

    def _all(self) -> Table:
        return self.into(np.arange(self.sizes[0]))

    @cached_property
    def table(self) -> Table:
        return self._all()

    def into(self, dst: Ints) -> Table:
        # Boxes of a factor are not empty; with one for each pair of regions this is canonical.
        rows = self._into(dst)
        return rows if all(part.single for part in self.parts) else canonical(rows)

    def _into(self, dst: Ints) -> Table:
        return self._rows(dst, outgoing=False)

    def _out_of(self, src: Ints) -> Table:
        return self._rows(src, outgoing=True)

    def out_of(self, src: Ints) -> Table:
        return canonical(self._out_of(src))

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
        return Table(dst, src, at, of, extent, np.ones(n))

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
    def digest(self) -> bytes:
        pieces: list[bytes] = []
        for part in self.parts:
            t = part.rows
            shape = repr((part.dst, part.src, part.dim))
            pieces.append(digest_of(shape, t.dst, t.src, t.at, t.of, t.extent))
        return digest_of("kronecker", repr((self.ndim, self.sizes)), *pieces)
