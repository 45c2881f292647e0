"""Whole-array arithmetic on tables of transfers between boxes.

A row of a `Table` reads a box of a source region, scales it and adds it to a box of a destination
region. Regions are numbers here; boxes of fewer dimensions than the table are padded with extent 1.
Nothing loops over rows in Python: a table of a 512-worker halo exchange has tens of thousands.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Table:
    """n transfers in d dimensions; all arrays are aligned by row."""

    dst: Ints
    """(n,) number of the destination region."""
    src: Ints
    """(n,) number of the source region."""
    at: Ints
    """(n, d) start of the destination box."""
    of: Ints
    """(n, d) start of the source box."""
    extent: Ints
    """(n, d) extent of both boxes."""
    coef: npt.NDArray[Any]
    """(n,) coefficient: float64, or complex128 if any is complex."""

    def __len__(self) -> int:
        return len(self.dst)

    @property
    def ndim(self) -> int:
        return int(self.at.shape[1])

    def take(self, rows: Any) -> Table:
        """The rows that an index array or a mask selects."""
        return Table(*(getattr(self, f.name)[rows] for f in fields(self)))

    def of_ndim(self, ndim: int) -> Table:
        """The same table in so many dimensions; those that go are padding."""
        more = ndim - self.ndim
        if more <= 0:
            at, of, extent = (box[:, :ndim] for box in (self.at, self.of, self.extent))
            return Table(self.dst, self.src, at, of, extent, self.coef)
        zeros = np.zeros((len(self), more), np.int64)
        return Table(
            self.dst,
            self.src,
            np.hstack([self.at, zeros]),
            np.hstack([self.of, zeros]),
            np.hstack([self.extent, zeros + 1]),
            self.coef,
        )


def concatenate(*tables: Table) -> Table:
    """All rows of all tables."""
    ndim = max(t.ndim for t in tables)
    wide = [t.of_ndim(ndim) for t in tables]
    return Table(*(np.concatenate([getattr(t, f.name) for t in wide]) for f in fields(Table)))


def join(left: Table, right: Table) -> Table:
    """The rows of the product left ∘ right: every pair whose boxes meet in the middle, cut to where
    they do. Not canonical: rows may overlap."""
    ndim = max(left.ndim, right.ndim)
    left, right = left.of_ndim(ndim), right.of_ndim(ndim)
    if not len(left) or not len(right):
        return left.take(slice(0, 0))
    i, j = _candidates(left, right)
    low = np.maximum(left.of[i], right.at[j])
    extent = np.minimum(left.of[i] + left.extent[i], right.at[j] + right.extent[j]) - low
    meet = (extent > 0).all(axis=1)
    i, j, low, extent = i[meet], j[meet], low[meet], extent[meet]
    return Table(
        left.dst[i],
        right.src[j],
        left.at[i] + low - left.of[i],
        right.of[j] + low - right.at[j],
        extent,
        left.coef[i] * right.coef[j],
    )


def _candidates(left: Table, right: Table) -> tuple[Ints, Ints]:
    """Pairs of rows that share the middle region, pruned by the first dimension: with the right
    rows sorted by start, only those count that start inside the left box or less than the longest
    right box of that region before it."""
    regions = int(max(left.src.max(), right.dst.max())) + 1
    longest = np.zeros(regions, np.int64)
    np.maximum.at(longest, right.dst, right.extent[:, 0])
    span = int((left.of + left.extent).max() + (right.at + right.extent).max()) + 1
    key = right.dst * span + right.at[:, 0]
    order = np.argsort(key, kind="stable")
    key = key[order]
    start = left.of[:, 0]
    base = left.src * span
    first = np.searchsorted(key, base + np.maximum(start - longest[left.src] + 1, 0), "left")
    last = np.searchsorted(key, base + start + left.extent[:, 0], "left")
    rows, within = expand(np.maximum(last - first, 0))
    return rows, order[first[rows] + within]


def canonical(table: Table) -> Table:
    """The unique table of the same operator: per (destination, source, offset) the boxes do not
    overlap, have non-zero coefficients, and are merged into maximal runs, last dimension first.

    Two tables describe the same operator exactly if their canonical forms are equal.
    """
    table = table.take((table.coef != 0) & (table.extent > 0).all(axis=1))
    if not len(table):
        return table
    group = row_keys(table.dst, table.src, *(table.at - table.of).T)
    _, group, count = np.unique(group, return_inverse=True, return_counts=True)
    several = count[group] > 1
    if several.any():
        merged = _merge(*_sum_cells(*_refine(table.take(several), group[several])))
        table = concatenate(table.take(~several), merged)
    order = np.argsort(row_keys(table.dst, table.src, *table.at.T, *table.of.T), kind="stable")
    return table.take(order)


def _refine(table: Table, group: Ints) -> tuple[Table, Ints]:
    """Cut every box along the faces of all boxes of its group, so that boxes are equal or apart."""
    for axis in range(table.ndim):
        start = table.at[:, axis]
        stop = start + table.extent[:, axis]
        if _aligned(group, start, stop):
            continue
        span = int(stop.max()) + 1
        cuts = np.sort(np.concatenate([group * span + start, group * span + stop]))
        cuts = cuts[np.concatenate([[True], cuts[1:] != cuts[:-1]])]
        first = np.searchsorted(cuts, group * span + start)
        rows, within = expand(np.searchsorted(cuts, group * span + stop) - first)
        cell = first[rows] + within
        shift = cuts[cell] - group[rows] * span - start[rows]
        table, group = table.take(rows), group[rows]
        table.at[:, axis] += shift
        table.of[:, axis] += shift
        table.extent[:, axis] = cuts[cell + 1] - cuts[cell]
    return table, group


def _aligned(group: Ints, start: Ints, stop: Ints) -> bool:
    """Whether all boxes of each group have the same bounds along an axis (nothing to cut)."""
    order = np.argsort(group, kind="stable")
    g, a, b = group[order], start[order], stop[order]
    same = g[1:] == g[:-1]
    return not (same & ((a[1:] != a[:-1]) | (b[1:] != b[:-1]))).any()


def _sum_cells(table: Table, group: Ints) -> tuple[Table, Ints]:
    """Sum the coefficients of equal boxes, in the order of the rows; drop those that cancel."""
    key = row_keys(group, *table.at.T)
    order = np.argsort(key, kind="stable")
    key = key[order]
    first = np.flatnonzero(np.concatenate([[True], key[1:] != key[:-1]]))
    coef = np.add.reduceat(table.coef[order], first)
    table, group = table.take(order[first]), group[order[first]]
    keep = coef != 0
    summed = Table(table.dst, table.src, table.at, table.of, table.extent, coef)
    return summed.take(keep), group[keep]


def _merge(table: Table, group: Ints) -> Table:
    """Join neighbouring boxes of equal coefficient and cross-section, last axis first."""
    kind = np.unique(table.coef, return_inverse=True)[1].reshape(-1)
    for axis in reversed(range(table.ndim)):
        if len(table) < 2:
            break
        others = [k for k in range(table.ndim) if k != axis]
        cross = row_keys(group, kind, *table.at[:, others].T, *table.extent[:, others].T)
        cross = np.unique(cross, return_inverse=True)[1].reshape(-1)
        order = np.argsort(row_keys(cross, table.at[:, axis]), kind="stable")
        table, group, kind, cross = table.take(order), group[order], kind[order], cross[order]
        start = table.at[:, axis]
        stop = start + table.extent[:, axis]
        begins = np.concatenate([[True], (cross[1:] != cross[:-1]) | (stop[:-1] != start[1:])])
        first = np.flatnonzero(begins)
        last = np.append(first[1:], len(table)) - 1
        length = stop[last] - start[first]
        table, group, kind = table.take(first), group[first], kind[first]
        table.extent[:, axis] = length
    return table


def expand(count: Ints) -> tuple[Ints, Ints]:
    """For counts (2, 0, 3): rows (0, 0, 2, 2, 2) and positions within (0, 1, 0, 1, 2)."""
    rows = np.repeat(np.arange(len(count)), count)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(count) - count, count)
    return rows, within


def row_keys(*columns: Ints) -> Ints:
    """One integer a row that sorts as the columns do lexicographically. Ranks stand in for values
    before the product of the ranges would overflow."""
    key = np.zeros(len(columns[0]), np.int64)
    size = 1
    for column in columns:
        low = int(column.min()) if len(column) else 0
        span = int(column.max()) - low + 1 if len(column) else 1
        if span == 1:
            continue
        if size * span > 2**62:
            key = np.unique(key, return_inverse=True)[1].reshape(-1)
            size = int(key.max()) + 1
        key = key * span + (column - low)
        size *= span
    return key
