"""Intersections of the blocks of two tensor spaces: the data movement of nearly every collective.

"Each block of Y receives its intersections with the linked blocks of X" is a Kronecker product of
one-dimensional relations: in each tensor dimension, the intersections of the cuts of X with those
of Y; along each grid axis of copies, pairs of linked coordinates. The pairs of blocks are not
enumerated until their transfers are requested.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from linop.normal_form.boxes import Ints, Table, join
from linop.normal_form.columns import ones
from linop.normal_form.kronecker import NO_AXIS, Kronecker, Relation
from linop.normal_form.movement import Movement
from linop.spaces.decomposition import REPLICATED, Bounds
from linop.spaces.partition import GridAxis
from linop.spaces.tensor import TensorSpace

Pairs = tuple[tuple[int, ...], ...]
"""(source coordinate, target coordinate) of each pair."""


class Link(NamedTuple):
    """Restriction of a matching: blocks are related only if their coordinates along two grid axes,
    one of each space, are one of the given pairs.

    Both axes split the same dimension, or neither splits any. A link of a replicated axis is
    ignored, since blocks have no coordinate along it.
    """

    source_axis: int
    target_axis: int
    pairs: Sequence[tuple[int, int]]
    """(coordinate of the source, coordinate of the target)."""


class Segment(NamedTuple):
    """An index map of one dimension: target index `at` + k reads source index `of` + k, for k from
    0 to `length` - 1."""

    at: int
    of: int
    length: int


def matching(
    X: TensorSpace,
    Y: TensorSpace,
    links: Sequence[Link] = (),
    segments: Mapping[int, Sequence[Segment]] | None = None,
) -> Movement:
    """The movement X -> Y in which each block of Y receives its intersections with all linked
    blocks of X, summed if several hold the same element; coefficients are 1.

    Args:
        links: restrictions of the pairs of blocks; all pairs without.
        segments: index maps by tensor dimension; the identity by default. Indices of Y in no
            segment are zero.
    """
    linked = {
        (link.source_axis, link.target_axis): tuple(map(tuple, link.pairs))
        for link in links
        if link.source_axis in X.numbering.region_axes
        and link.target_axis in Y.numbering.region_axes
    }
    relations: list[Relation] = []
    sources, targets = dict(X.numbering.region_axes), dict(Y.numbering.region_axes)

    def axes(a: int | None, b: int | None) -> tuple[GridAxis, GridAxis]:
        dst = NO_AXIS if b is None else targets.pop(b)
        return dst, NO_AXIS if a is None else sources.pop(a)

    for d in range(X.ndim):
        a, b = (space.axes.index(d) if d in space.axes else None for space in (X, Y))
        pairs = None if a is None or b is None else linked.pop((a, b), None)
        between = (segments or {}).get(d)
        cut = X.bounds[d], Y.bounds[d], pairs, None if between is None else tuple(between)
        relations.append(_relation(d, *axes(a, b), *cut))
    for (a, b), pairs in linked.items():
        of, to = np.array(pairs, np.int64).reshape(-1, 2).T
        relations.append(Relation(_coordinates(to, of), *axes(a, b)))
    for a in list(sources):
        every = np.arange(sources[a].extent)
        relations.append(Relation(_coordinates(0 * every, every), *axes(a, None)))
    for b in list(targets):
        every = np.arange(targets[b].extent)
        relations.append(Relation(_coordinates(every, 0 * every), *axes(None, b)))
    sizes = len(Y.numbering.holders[1]), len(X.numbering.holders[1])
    return Movement(X, Y, Kronecker(relations, max(1, X.ndim), sizes))


@lru_cache(maxsize=256)
def _relation(
    dim: int, dst: GridAxis, src: GridAxis, source: Bounds, target: Bounds, *how: Any
) -> Relation:
    """The factor of a tensor dimension; cached, since operators of a network share most of them."""
    return Relation(_cuts_that_meet(source, target, *how), dst, src, dim)


def _cuts_that_meet(
    source: Bounds, target: Bounds, pairs: Pairs | None, segments: Sequence[Segment] | None
) -> Table:
    """The 1-d intersections of source and target cuts of one dimension, as a composition: embed the
    source cuts in the global dimension, read it by segments, restrict it to the target cuts. With
    `pairs` of linked cuts, each pair has a line to itself."""
    if pairs is None and segments is None and len(source) == len(target) == 1:
        ((a, b),), ((c, d),) = source, target  # one cut each, as for a batch: most dimensions
        low = max(a, c)
        return _boxes(*([k] * (min(b, d) > low) for k in (low - c, low - a, min(b, d) - low)))
    if pairs is None:
        s, t = np.arange(len(source)), np.arange(len(target))
        line = np.zeros(len(s), np.int64), np.zeros(len(t), np.int64)
    else:
        s, t = np.array(pairs, np.int64).reshape(-1, 2).T
        line = np.arange(len(s)), np.arange(len(t))
    low, high = np.array(source, np.int64).reshape(-1, 2)[s].T[:, :, None]
    put = Table(line[0], s, low, 0 * low, high - low, ones(len(s)))
    low, high = np.array(target, np.int64).reshape(-1, 2)[t].T[:, :, None]
    take = Table(t, line[1], 0 * low, low, high - low, ones(len(t)))
    if segments is None:
        return join(take, put)
    lines = np.unique(np.concatenate(line))
    at, of, length = np.tile(np.array(segments, np.int64).reshape(-1, 3), (len(lines), 1)).T
    line_of = np.repeat(lines, len(segments))
    read = Table(line_of, line_of, at[:, None], of[:, None], length[:, None], ones(len(line_of)))
    return join(take, join(read, put))


def _boxes(at: list[int], of: list[int], extent: list[int]) -> Table:
    """The table of 1-d boxes from region 0 to region 0."""
    only = np.zeros(len(at), np.int64)
    boxes = np.array([at, of, extent], np.int64)[:, :, None]
    return Table(only, only, boxes[0], boxes[1], boxes[2], ones(len(at)))


def _coordinates(dst: Ints, src: Ints) -> Table:
    """The table of a relation of coordinates without tensor dimension: boxes of one element."""
    zeros = np.zeros((len(dst), 1), np.int64)
    return Table(dst, src, zeros, zeros, zeros + 1, ones(len(dst)))


def same(count: int, source_axis: int, target_axis: int) -> Link:
    """The link of equal coordinates, from 0 to `count` - 1."""
    return Link(source_axis, target_axis, [(k, k) for k in range(count)])


def along(X: TensorSpace, grid_axes: Sequence[int]) -> list[Link]:
    """Links for two spaces on one grid: of blocks whose coordinates differ along `grid_axes`
    only."""
    grid = X.partition.shape
    return [same(grid[k], k, k) for k in range(len(grid)) if k not in grid_axes]


def separate_copies(X: TensorSpace) -> list[Link]:
    """Links for two spaces on one grid: each copy with the same copy only."""
    split = [k for k, axis in enumerate(X.axes) if isinstance(axis, int) or axis is REPLICATED]
    return along(X, split)
