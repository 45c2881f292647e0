"""Stages M_k L_k ··· L_1 M_0 of the values that remain of a program.

Every value is computed in the first stage in which it can be, and kept, as regions of the spaces
between the stages, until its last use; stages that do not read it do not list it. A region whose
name another value has at that time is renamed. A sum whose terms become known one after another is
accumulated, so that they are not all kept until the last is known. Which values remain is decided
by `linop.normal_form.values`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from linop.normal_form.boxes import Ints
from linop.normal_form.maps import Call, Layer
from linop.normal_form.merging import Merged
from linop.normal_form.movement import Movement
from linop.normal_form.stages import Stages
from linop.normal_form.table_algebra import EMPTY, BlockTable, SumTable
from linop.normal_form.transfer_table import GivenTable, IdentityTable, TransferTable
from linop.normal_form.values import SOURCE, SOURCES, Terms, Values, remaining
from linop.spaces.region import Region
from linop.spaces.space import Space


def stages_of_values(values: Values, order: Sequence[int]) -> Stages:
    """The stages that compute TARGET of SOURCE.

    Args:
        order: the numbers of all values, each after those that it is computed from.
    """
    return _Schedule(values, remaining(values, order)).stages()


@dataclass(frozen=True)
class Held:
    """A value as regions of the spaces between stages.

    Attributes:
        renamed: the names of its regions there, by their own, where these differ.
        own, number: the names that were renamed together, and the number in their suffix.
    """

    regions: tuple[Region, ...]
    renamed: Mapping[str, str]
    own: frozenset[str]
    number: int


class _Schedule:
    """The values that remain, by the stage that computes them and the last that reads them."""

    def __init__(self, values: Values, terms: Mapping[int, Terms]) -> None:
        self.values, self.terms = values, dict(terms)
        self.results = {a: (b, layer) for b, (a, layer) in values.layers.items()}
        self.last: dict[int, int] = {}
        self.new: list[list[int]] = []
        self._assign_stages()
        self.held: dict[int, Held] = {}
        self.names: set[str] = set()
        self.free: dict[frozenset[str], list[int]] = {}

    def _assign_stages(self) -> None:
        ready = {SOURCE: 0}  # the first movement that can read a value
        for value in list(self.terms):
            if value in self.values.layers:
                ready[value] = ready[self.values.layers[value][0]]
                continue
            for total in (*self._partial_sums(value, ready), value):
                self._assign_stage(total, ready)

    def _assign_stage(self, value: int, ready: dict[int, int]) -> None:
        terms = self.terms[value]
        stage = max((ready[source] for source in terms), default=0)
        for source in terms:
            self.last[source] = max(stage, self.last.get(source, 0))
        ready[value] = stage + 1
        self.new += [[] for _ in range(stage + 1 - len(self.new))]
        self.new[stage].append(value)

    def _partial_sums(self, value: int, ready: Mapping[int, int]) -> Iterator[int]:
        """New values for the terms of a sum that are known before the last is, if these are many:
        each is the one before and some more terms."""
        terms = dict(self.terms[value])
        by_stage: dict[int, list[int]] = {}
        for source in terms:
            by_stage.setdefault(ready[source], []).append(source)
        early = sorted(by_stage)[:-1]
        space = self.values.spaces[value]
        total: dict[int, Merged] = {}
        for stage in early:
            total |= {source: terms.pop(source) for source in by_stage[stage]}
            if len(total) > SOURCES:
                part = self.values.new(space)
                self.terms[part] = total
                yield part
                total = {part: Merged.of(Movement.between(space, space))}
        self.terms[value] = total | terms

    def stages(self) -> Stages:
        self._hold(SOURCE)
        movements: list[Movement] = []
        layers: list[Layer] = []
        for stage, new in enumerate(self.new):
            read = list(dict.fromkeys(source for value in new for source in self.terms[value]))
            if stage == 0 and SOURCE not in read:
                read.append(SOURCE)
            kept = [value for value in read if self.last.get(value, -1) > stage]
            self._release(value for value in read if self.last.get(value, -1) <= stage)
            for value in new:
                self._hold(value)
            ends = self._space(read), self._space([*kept, *new])
            movements.append(self._movement(*ends, kept, new))
            layers.append(self._layer(new))
        return Stages(tuple(movements), tuple(layers[:-1]))

    def _release(self, values: Iterable[int]) -> None:
        """Free the names of values that are not read any more."""
        for value in values:
            held = self.held[value]
            self.names.difference_update(region.name for region in held.regions)
            heappush(self.free[held.own], held.number)

    def _hold(self, value: int) -> None:
        """Give the regions of a value, and those of a layer applied to it, names: their own, with
        the least number that makes them differ from those of all other values."""
        numbers = (value, *(self.results[value][:1] if value in self.results else ()))
        spaces = [self.values.spaces[k] for k in numbers]
        own = frozenset(region.name for space in spaces for region in space.regions)
        number, suffix = self._number(own)
        renamed = {name: name + suffix for name in own} if suffix else {}
        self.names.update(name + suffix for name in own)
        for k, space in zip(numbers, spaces, strict=True):
            regions = tuple(_renamed(r, renamed) for r in space.regions)
            self.held[k] = Held(regions, renamed, own, number)

    def _number(self, own: frozenset[str]) -> tuple[int, str]:
        """The least number of a suffix with which some names are free, and this suffix."""
        free = self.free.setdefault(own, [0])
        taken: list[int] = []
        while True:
            number = heappop(free)
            if not free:
                free.append(number + 1)
            suffix = f"⟨{number}⟩" if number else ""
            if self.names.isdisjoint(name + suffix for name in own):
                break
            taken.append(number)  # by values that have some of the names
        for other in taken:
            heappush(free, other)
        return number, suffix

    def _space(self, live: Sequence[int]) -> Space:
        if len(live) == 1 and not self.held[live[0]].renamed:
            return self.values.spaces[live[0]]
        regions = (region for value in live for region in self.held[value].regions)
        return Space(regions, self.values.spaces[SOURCE].dtype)

    def _layer(self, new: Sequence[int]) -> Layer:
        """The calls of the layer after a stage, which are applied to values that are new there."""
        calls: list[Call] = []
        for value in new:
            result, layer = self.results.get(value, (value, ()))
            names = self.held[value].renamed
            calls += [call.renamed(names) for call in layer]
            self.names.difference_update(region.name for region in self.held[value].regions)
            self.names.update(region.name for region in self.held[result].regions)
        return tuple(calls)

    def _movement(
        self, before: Space, after: Space, kept: Sequence[int], new: Sequence[int]
    ) -> Movement:
        blocks = [(k, v, term.movement) for v in new for k, term in self.terms[v].items()]
        if not kept and len(blocks) == 1 and (found := _same_ends(blocks[0][2], before, after)):
            return found
        ends = after.numbering.index, before.numbering.index
        tables = [self._block(m, k, v, ends) for k, v, m in blocks]
        still = [region.name for value in kept for region in self.held[value].regions]
        if still:
            dst, src = (np.array([index[name] for name in still], np.int64) for index in ends)
            same = IdentityTable(before.numbering.shapes[src])
            tables.append(BlockTable([same], [dst], [src], (len(after), len(before))))
        return Movement(before, after, _added(tables))

    def _block(
        self, movement: Movement, source: int, target: int, ends: tuple[Mapping[str, int], ...]
    ) -> TransferTable:
        dst, src = (
            _numbers(space, self.held[value].renamed, index)
            for space, value, index in zip(
                (movement.codomain, movement.domain), (target, source), ends, strict=True
            )
        )
        sizes = len(ends[0]), len(ends[1])
        return BlockTable([movement.transfers], [dst], [src], sizes)


def _same_ends(movement: Movement, before: Space, after: Space) -> Movement | None:
    same = movement.domain.numbering == before.numbering
    return movement if same and movement.codomain.numbering == after.numbering else None


def _added(tables: Sequence[TransferTable]) -> TransferTable:
    if not tables:
        return GivenTable(EMPTY, canonical=True)
    return tables[0] if len(tables) == 1 else SumTable(tables)


def _numbers(space: Space, renamed: Mapping[str, str], index: Mapping[str, int]) -> Ints:
    names = (region.name for region in space.regions)
    return np.array([index[renamed.get(name, name)] for name in names], np.int64)


def _renamed(region: Region, names: Mapping[str, str]) -> Region:
    if region.name not in names:
        return region
    return Region.checked(names[region.name], region.shape, region.workers, region.memory)
