"""Check of the elements that a stage writes, by arithmetic on boxes.

Every element of a new region is either set exactly once, before any accumulation into it, or
allocated as zero. The cost depends on the number of boxes, not of elements.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from linop.normal_form.boxes import Ints, Table, canonical, join
from linop.normal_form.columns import ones
from linop.planning.plan import Make, Put
from linop.planning.verification.plan_errors import TwoWritersError, UnwrittenError
from linop.planning.verification.plan_stages import PlanStage

Named = tuple[PlanStage, int, Put]
"""(stage, position in the plan, put)."""


def check_writes(stages: Sequence[PlanStage]) -> None:
    """Check the writes of all workers in one stage.

    Raises:
        TwoWritersError: an element is set after it was set or accumulated into.
        UnwrittenError: an element is never set, or accumulated into before it is set.
    """
    made = [(stage, at, make) for stage in stages for at, make in stage.of(Make)]
    if not made:
        return
    number = {(stage.worker, make.region.name): k for k, (stage, _, make) in enumerate(made)}
    puts = [(stage, at, put) for stage in stages for at, put in stage.of(Put) if put.target.size]
    boxes = _Boxes.of(puts, number, max(make.region.ndim for *_, make in made))
    accumulate = np.array([put.accumulate for *_, put in puts], bool)
    sets, adds = boxes.take(np.flatnonzero(~accumulate)), boxes.take(np.flatnonzero(accumulate))
    _apart(sets, puts)
    zeroed = np.array([make.zeroed for *_, make in made], bool)
    _added(sets, adds, puts, zeroed)
    volume = np.zeros(len(made), np.int64)
    np.add.at(volume, sets.region, sets.volume)
    sizes = np.array([make.region.size for *_, make in made], np.int64)
    for k in np.flatnonzero(~zeroed & (volume < sizes))[:1]:
        stage, at, make = made[k]
        raise UnwrittenError(
            f"{stage.where(at)}: {sizes[k] - volume[k]} of {sizes[k]} elements of "
            f"{make.region.name!r} were never set"
        )


class _Boxes:
    """Boxes written by puts, aligned by row: number of the put, of the region, start, extent."""

    def __init__(self, put: Ints, region: Ints, start: Ints, extent: Ints) -> None:
        self.put, self.region, self.start, self.extent = put, region, start, extent
        self.volume = extent.prod(axis=1)

    @staticmethod
    def of(puts: Sequence[Named], number: dict[tuple[int, str], int], ndim: int) -> _Boxes:
        ndim = max(ndim, 1)
        region = [number[stage.worker, put.target.region.name] for stage, _, put in puts]
        start = [(*p.target.start, *(0,) * (ndim - len(p.target.start))) for *_, p in puts]
        extent = [(*p.target.shape, *(1,) * (ndim - len(p.target.shape))) for *_, p in puts]
        return _Boxes(
            np.arange(len(puts)),
            np.array(region, np.int64),
            np.array(start, np.int64).reshape(-1, ndim),
            np.array(extent, np.int64).reshape(-1, ndim),
        )

    def take(self, rows: Ints) -> _Boxes:
        return _Boxes(self.put[rows], self.region[rows], self.start[rows], self.extent[rows])

    def table(self, dst: Ints, src: Ints) -> Table:
        return Table(dst, src, self.start, self.start, self.extent, ones(len(self.put)))


def _meetings(left: _Boxes, right: _Boxes) -> tuple[Ints, Ints, Ints]:
    """(left put, right put, common elements) of all pairs of boxes that overlap."""
    pairs = join(left.table(left.put, left.region), right.table(right.region, right.put))
    return pairs.dst, pairs.src, pairs.extent.prod(axis=1)


def _apart(sets: _Boxes, puts: Sequence[Named]) -> None:
    """Check that boxes are disjoint: their union has as many elements as all boxes together."""
    joined = canonical(sets.table(sets.region, np.zeros_like(sets.region)))
    if int(joined.extent.prod(axis=1).sum()) == int(sets.volume.sum()):
        return
    first, second, _ = _meetings(sets, sets)
    late = np.flatnonzero(first < second)[0]
    _written_before(puts, first[late], second[late])


def _added(sets: _Boxes, adds: _Boxes, puts: Sequence[Named], zeroed: np.ndarray) -> None:
    """Check that the elements accumulated into were set before, or are zeros, and not set later."""
    added, other, volume = _meetings(adds, sets)
    later = other > added
    covered = np.zeros(len(puts), np.int64)
    np.add.at(covered, added[~later], volume[~later])
    short = ~zeroed[adds.region] & (covered[adds.put] < adds.volume)
    for k in adds.put[short][:1]:
        stage, at, _ = puts[k]
        raise UnwrittenError(f"{stage.where(at)}: adds to elements that were never set before")
    for k in np.flatnonzero(later)[:1]:
        _written_before(puts, added[k], other[k])


def _written_before(puts: Sequence[Named], first: int, second: int) -> None:
    stage, at, _ = puts[second]
    raise TwoWritersError(
        f"{stage.where(at)}: some of its elements were written before, by step {puts[first][1]} "
        f"({puts[first][2]})"
    )
