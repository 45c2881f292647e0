"""Movements as linear combinations of boxes: passes over stages take these apart, and compose the
factors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count, pairwise
from typing import NamedTuple

import numpy as np

from linop.normal_form.boxes import Ints, row_keys
from linop.normal_form.movement import Movement
from linop.normal_form.space_tables import Block, box_of, number_of
from linop.spaces.exact import Exact
from linop.spaces.region import Region, Subset, as_subset
from linop.spaces.space import Space


class Combination(NamedTuple):
    """A linear combination of boxes, and the target boxes that receive it."""

    terms: tuple[tuple[Subset, Exact], ...]
    targets: tuple[Subset, ...]

    @property
    def blocks(self) -> list[Block]:
        """The blocks of the movement that computes it."""
        return [(target, source, c) for target in self.targets for source, c in self.terms]

    @property
    def receivers(self) -> list[tuple[int, str]]:
        """(worker, kind of memory) of every copy of the targets."""
        return [(worker, target.memory) for target in self.targets for worker in target.workers]

    def through(self, region: Region) -> tuple[list[Block], list[Block]]:
        """(blocks that compute the combination in a region, blocks that copy it to the targets)."""
        box = as_subset(region)
        return [(box, s, c) for s, c in self.terms], [(target, box, 1) for target in self.targets]


def combinations(movement: Movement) -> list[Combination]:
    """The combinations whose sum a movement is: transfers grouped by target box, and target boxes
    of equal terms together."""
    t = movement.table
    into = row_keys(t.dst, *t.at.T, *t.extent.T)
    numbers: dict[Exact, int] = {}
    coefficient = [numbers.setdefault(number, len(numbers)) for number in t.coef.tolist()]
    term = row_keys(t.src, *t.of.T, *t.extent.T, np.array(coefficient, np.int64))
    order = np.argsort(into, kind="stable")
    boxes = np.split(order, np.flatnonzero(np.diff(into[order])) + 1) if len(t) else []
    alike: dict[bytes, list[Ints]] = {}
    for rows in sorted(boxes, key=lambda rows: int(rows[0])):
        alike.setdefault(term[rows].tobytes(), []).append(rows)
    return [
        Combination(
            tuple((_source(movement, row), number_of(t.coef[row])) for row in targets[0].tolist()),
            tuple(_target(movement, int(rows[0])) for rows in targets),
        )
        for targets in alike.values()
    ]


def _source(movement: Movement, row: int) -> Subset:
    t = movement.table
    return box_of(movement.domain.numbering.at(t.src[row]), t.of[row], t.extent[row])


def _target(movement: Movement, row: int) -> Subset:
    t = movement.table
    return box_of(movement.codomain.numbering.at(t.dst[row]), t.at[row], t.extent[row])


PREFIXES = "total ", "partial sum ", "share ", "sum "
"""Beginnings of the names of regions between factors."""


def labels(movement: Movement) -> Iterator[str]:
    """Numbers for the names of regions between the factors of a movement: with marks, if one of its
    own regions might have such a name."""
    names = [r.name for space in (movement.domain, movement.codomain) for r in space]
    marks = max((1 + n.count("′") for n in names if n.startswith(PREFIXES)), default=0)
    return (f"{number}{'′' * marks}" for number in count())


def shares(one: Combination, many: int) -> list[Combination]:
    """A combination cut along the longest axis of its boxes into `many` parts of nearly equal size,
    or less if that axis is shorter."""
    shape = one.targets[0].shape
    many = min(many, max(shape, default=1))
    if many < 2:
        return [one]
    axis = int(np.argmax(shape))
    cuts = [shape[axis] * k // many for k in range(many + 1)]
    parts: list[Combination] = []
    for low, high in pairwise(cuts):
        slab = partial(_slab, axis=axis, low=low, high=high)
        terms = tuple((slab(source), coefficient) for source, coefficient in one.terms)
        parts.append(Combination(terms, tuple(map(slab, one.targets))))
    return parts


def factors(movement: Movement, stages: Sequence[Sequence[Block]]) -> tuple[Movement, ...]:
    """Movements of given blocks, first applied first. The space after each has the regions that it
    writes, and of those before it the ones that later blocks read, as they are."""
    made: list[Movement] = []
    before = movement.domain
    for k, blocks in enumerate(stages[:-1]):
        later = dict.fromkeys(source.region for stage in stages[k + 1 :] for _, source, _ in stage)
        stay = [region for region in later if region in before]
        new = dict.fromkeys(target.region for target, _, _ in blocks)
        after = Space([*stay, *new], movement.domain.dtype)
        still: list[Block] = [(as_subset(region), as_subset(region), 1) for region in stay]
        made.append(Movement.of_blocks(before, after, [*still, *blocks]))
        before = after
    return (*made, Movement.of_blocks(before, movement.codomain, stages[-1]))


def _slab(box: Subset, axis: int, low: int, high: int) -> Subset:
    """The subset of a box between two indices, relative to it, along an axis."""
    start, stop = list(box.start), list(box.stop)
    stop[axis] = start[axis] + high
    start[axis] += low
    return Subset(box.region, tuple(start), tuple(stop))
