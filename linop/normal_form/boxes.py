"""Whole-array arithmetic on tables of transfers between boxes: product, canonical form.

A row of a `Table` reads a box of a source region, scales it and adds it to a box of a destination
region. Regions are given by number; boxes of fewer dimensions than the table are padded with extent
1. No function loops over rows in Python: a halo exchange of 512 workers has tens of thousands.
Spaces and workers do not belong here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from linop.normal_form.columns import Column, kinds, products, sums

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Table:
    """n transfers between boxes of d dimensions; all arrays are aligned by row."""

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
    coef: Column
    """(n,) coefficient, exact (`linop.normal_form.columns`)."""

    def __post_init__(self) -> None:
        if self.coef.dtype not in (np.int64, object):
            raise TypeError(f"coefficients are exact; given a column of dtype {self.coef.dtype}")

    def __len__(self) -> int:
        return len(self.dst)

    @property
    def ndim(self) -> int:
        return int(self.at.shape[1])

    def take(self, rows: Any) -> Table:
        """The rows that an index array or a mask selects."""
        return Table(
            self.dst[rows],
            self.src[rows],
            self.at[rows],
            self.of[rows],
            self.extent[rows],
            self.coef[rows],
        )

    def merge_adjacent(self, axis: int, new: npt.NDArray[np.bool_]) -> tuple[Table, Ints]:
        """Merge runs of adjacent boxes along an axis, in a table sorted by start along it.

        Args:
            new: (n - 1,) mask: True if row k + 1 must not be merged with row k.

        Returns:
            the merged table, and for each of its rows the first row of its run.
        """
        start = self.at[:, axis]
        stop = start + self.extent[:, axis]
        first = np.flatnonzero(np.append(True, new | (stop[:-1] != start[1:])))
        last = np.append(first[1:], len(self)) - 1
        runs = self.take(first)
        runs.extent[:, axis] = stop[last] - start[first]
        return runs, first

    def of_ndim(self, ndim: int) -> Table:
        """The same table in `ndim` dimensions: padded with extent 1, or with padding removed."""
        more = ndim - self.ndim
        if not more:
            return self
        if more < 0:
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


def same_rows(one: Table, other: Table) -> bool:
    """True if two tables are equal row by row; for canonical tables: the same operator."""
    if len(one) != len(other):
        return False
    ndim = max(one.ndim, other.ndim)
    one, other = one.of_ndim(ndim), other.of_ndim(ndim)
    columns = (f.name for f in fields(Table))
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in columns)


def concatenate(*tables: Table) -> Table:
    """The rows of all tables, in order; not canonical."""
    ndim = max(t.ndim for t in tables)
    wide = [t.of_ndim(ndim) for t in tables]
    return Table(*(np.concatenate([getattr(t, f.name) for t in wide]) for f in fields(Table)))


def join(left: Table, right: Table) -> Table:
    """The table of the product left ∘ right: a row for each pair of rows whose boxes intersect in
    the middle space, restricted to the intersection. Not canonical: rows may overlap."""
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
        products(left.coef[i], right.coef[j]),
    )


def pairs(left: Table, right: Table) -> int:
    """Upper bound on the number of rows of ``join(left, right)``."""
    if not len(left) or not len(right):
        return 0
    return int(_candidate_ranges(left, right)[1].sum())


def _candidates(left: Table, right: Table) -> tuple[Ints, Ints]:
    """Pairs (left row, right row) whose boxes may intersect in the middle space."""
    first, count, order = _candidate_ranges(left, right)
    rows, within = expand(count)
    return rows, order[first[rows] + within]


def _candidate_ranges(left: Table, right: Table) -> tuple[Ints, Ints, Ints]:
    """Candidate right rows of each left row: first, count, and the order that these index.

    Candidates share the middle region, pruned by the first dimension: with the right rows sorted by
    start, only those that start inside the left box, or before it by less than the longest right
    box of that region.
    """
    regions = int(max(left.src.max(), right.dst.max())) + 1
    longest = np.zeros(regions, np.int64)
    np.maximum.at(longest, right.dst, right.extent[:, 0])
    span = int((left.of + left.extent).max()) + int((right.at + right.extent).max()) + 1
    key = _apart(right.dst, span) + right.at[:, 0]
    order = np.argsort(key, kind="stable")
    key = key[order]
    start = left.of[:, 0]
    base = _apart(left.src, span)
    first = np.searchsorted(key, base + np.maximum(start - longest[left.src] + 1, 0), "left")
    last = np.searchsorted(key, base + start + left.extent[:, 0], "left")
    return first, np.maximum(last - first, 0), order


def _apart(groups: Ints, span: int) -> Ints:
    """The first of `span` numbers of each row's group; as Python's integers, slowly, where int64
    would overflow."""
    long = (int(groups.max(initial=0)) + 1) * span >= 2**63
    return groups.astype(object if long else np.int64, copy=False) * span


FEW = 256
"""Largest number of boxes that are compared pairwise, by n×n arrays."""


def each_meets(low: Ints, high: Ints) -> npt.NDArray[np.bool_]:
    """(n, n) mask of the pairs of n boxes, given by (n, d) corners, that intersect."""
    meet = np.ones((len(low), len(low)), bool)
    for a, b in zip(low.T, high.T, strict=True):
        meet &= np.maximum.outer(a, a) < np.minimum.outer(b, b)
    return meet


def canonical(table: Table) -> Table:
    """The canonical table of the same operator: per (destination, source, offset) the boxes do not
    overlap, have non-zero coefficients, and are merged into maximal runs, last dimension first.
    Rows are sorted by destination, source and box.

    Two tables describe the same operator exactly if their canonical forms are equal.
    """
    counts = (table.coef != 0) & (table.extent > 0).all(axis=1)
    if not counts.all():
        table = table.take(counts)
    if len(table) < 2:
        return table
    group = row_keys(table.dst, table.src, *(table.at - table.of).T)
    order = np.argsort(group, kind="stable")
    same = group[order[1:]] == group[order[:-1]]
    if same.any():
        several = np.append(same, False) | np.append(False, same)
        numbers = np.append(0, np.cumsum(~same))
        merged = _summed(table.take(order[several]), numbers[several])
        table = concatenate(table.take(order[~several]), merged)
    order = np.argsort(row_keys(table.dst, table.src, *table.at.T, *table.of.T), kind="stable")
    return table.take(order)


def _summed(table: Table, group: Ints) -> Table:
    """Disjoint, merged boxes with summed coefficients, of a table sorted by group."""
    vary = [axis for axis in range(table.ndim) if not _aligned(table, group, axis)]
    if len(vary) == 1:
        # Often nothing overlaps: the chunks of a ring all-reduce, to be merged into one box.
        (axis,) = vary
        order = np.argsort(row_keys(group, table.at[:, axis]), kind="stable")
        ordered, new = table.take(order), _changes(group[order])
        start = ordered.at[:, axis]
        stop = start + ordered.extent[:, axis]
        if (new | (stop[:-1] <= start[1:])).all():
            return ordered.merge_adjacent(axis, new | (ordered.coef[1:] != ordered.coef[:-1]))[0]
    return _merge(*_sum_cells(*_refine(table, group, vary)))


def _refine(table: Table, group: Ints, axes: Sequence[int]) -> tuple[Table, Ints]:
    """Cut every box along the faces of all boxes of its group, so that boxes are equal or disjoint.

    Args:
        axes: the axes along which boxes of a group differ.
    """
    for axis in axes:
        start = table.at[:, axis]
        stop = start + table.extent[:, axis]
        span = int(stop.max()) + 1
        base = _apart(group, span)
        cuts = np.sort(np.concatenate([base + start, base + stop]))
        cuts = cuts[np.append(True, _changes(cuts))]
        first = np.searchsorted(cuts, base + start)
        rows, within = expand(np.searchsorted(cuts, base + stop) - first)
        cell = first[rows] + within
        shift = (cuts[cell] - base[rows] - start[rows]).astype(np.int64, copy=False)
        table, group = table.take(rows), group[rows]
        table.at[:, axis] += shift
        table.of[:, axis] += shift
        table.extent[:, axis] = cuts[cell + 1] - cuts[cell]
    return table, group


def _aligned(table: Table, group: Ints, axis: int) -> bool:
    """True if the boxes of each group have the same bounds along an axis, so that none is cut; rows
    are sorted by group."""
    bounds = table.at[:, axis], table.extent[:, axis]
    return not (~_changes(group) & (_changes(bounds[0]) | _changes(bounds[1]))).any()


def _changes(column: Ints) -> npt.NDArray[np.bool_]:
    """(n - 1,) mask of the entries, from the second on, that differ from the one before."""
    changes: npt.NDArray[np.bool_] = column[1:] != column[:-1]
    return changes


def _sum_cells(table: Table, group: Ints) -> tuple[Table, Ints]:
    """Sum the coefficients of equal boxes of a group; drop the boxes whose sum is zero."""
    key = row_keys(group, *table.at.T)
    order = np.argsort(key, kind="stable")
    first = np.flatnonzero(np.append(True, _changes(key[order])))
    coef = sums(table.coef[order], first)
    table, group = table.take(order[first]), group[order[first]]
    keep = coef != 0
    summed = Table(table.dst, table.src, table.at, table.of, table.extent, coef)
    return summed.take(keep), group[keep]


def _merge(table: Table, group: Ints) -> Table:
    """Merge adjacent boxes of equal coefficient and cross-section, last axis first."""
    kind = kinds(table.coef)
    for axis in reversed(range(table.ndim)):
        if len(table) < 2:
            break
        others = [k for k in range(table.ndim) if k != axis]
        cross = row_keys(group, kind, *table.at[:, others].T, *table.extent[:, others].T)
        cross = np.unique(cross, return_inverse=True)[1].reshape(-1)
        order = np.argsort(row_keys(cross, table.at[:, axis]), kind="stable")
        table, new = table.take(order), _changes(cross[order])
        table, first = table.merge_adjacent(axis, new)
        group, kind = group[order[first]], kind[order[first]]
    return table


def expand(count: Ints) -> tuple[Ints, Ints]:
    """For counts (2, 0, 3): rows (0, 0, 2, 2, 2) and positions within (0, 1, 0, 1, 2)."""
    rows = np.repeat(np.arange(len(count)), count)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(count) - count, count)
    return rows, within


def totals(at: Ints, values: Ints, n: int) -> Ints:
    """(n,) sums of the values at each index, none negative. `numpy.bincount` sums floats, which are
    exact up to 2**53."""
    if values.sum(dtype=float) < 2**53:
        return np.bincount(at, values, n).astype(np.int64)
    summed = np.zeros(n, np.int64)
    np.add.at(summed, at, values)
    return summed


def row_keys(*columns: Ints) -> Ints:
    """One integer key per row that sorts as the columns do lexicographically; equal keys mean equal
    rows. Keys, then columns, are replaced by ranks before the ranges' product overflows int64."""
    n = len(columns[0])
    key, size = np.zeros(n, np.int64), 1
    if not n:
        return key
    every = np.concatenate(columns).reshape(-1, n)
    ends = every.min(axis=1).tolist(), every.max(axis=1).tolist()
    for column, low, high in zip(every, *ends, strict=True):
        if low == high:
            continue
        span = high - low + 1
        if size * span > 2**62:
            key, size = _ranks(key)
        if size * span > 2**62:
            column, span = _ranks(column)
            low = 0
        key = key * span + (column - low)
        size *= span
    return key


def _ranks(column: Ints) -> tuple[Ints, int]:
    """The rank of every entry among the distinct ones, and how many these are."""
    distinct, rank = np.unique(column, return_inverse=True)
    return rank.reshape(-1), len(distinct)
