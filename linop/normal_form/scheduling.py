"""Stages M_k L_k ··· L_1 M_0 of the values that remain of a program.

Every value is computed in the first stage in which it can be, and kept, as regions of the spaces
between the stages, until its last use; a region whose name another value has at that time is
renamed. A sum whose terms become known one after another is accumulated, so that they are not all
kept until the last is known. Which values remain is decided by `linop.normal_form.values`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

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
    """A value as regions of the spaces between stages."""

    regions: tuple[Region, ...]
    renamed: Mapping[str, str]
    """The names of its regions there, by their own, where these differ."""


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
        live, before = [SOURCE], self.values.spaces[SOURCE]
        self._hold(SOURCE)
        movements: list[Movement] = []
        layers: list[Layer] = []
        for stage, new in enumerate(self.new):
            kept = self._still(live, stage)
            for value in new:
                self._hold(value)
            here = [*kept, *new]
            after = self._space(here)
            movements.append(self._movement(before, after, kept, new))
            live, layer = self._through_layer(here, new)
            before = self._space(live) if layer else after
            layers.append(layer)
        return Stages(tuple(movements), tuple(layers[:-1]))

    def _still(self, live: Iterable[int], stage: int) -> list[int]:
        """The values that are read after a stage; the names of the others are free."""
        kept = [value for value in live if self.last.get(value, -1) > stage]
        for value in live:
            if self.last.get(value, -1) <= stage:
                self.names.difference_update(region.name for region in self.held[value].regions)
        return kept

    def _hold(self, value: int) -> None:
        """Give the regions of a value, and those of a layer applied to it, names."""
        spaces = [self.values.spaces[value]]
        if value in self.results:
            spaces.append(self.values.spaces[self.results[value][0]])
        own = {region.name for space in spaces for region in space.regions}
        number, suffix = 0, ""
        while not self.names.isdisjoint(name + suffix for name in own):
            number, suffix = number + 1, f"⟨{number}⟩"
        renamed = {name: name + suffix for name in own} if suffix else {}
        self.names.update(name + suffix for name in own)
        numbers = (value, *(self.results[value][:1] if value in self.results else ()))
        for k, space in zip(numbers, spaces, strict=True):
            self.held[k] = Held(tuple(_renamed(r, renamed) for r in space.regions), renamed)

    def _space(self, live: Sequence[int]) -> Space:
        if len(live) == 1 and not self.held[live[0]].renamed:
            return self.values.spaces[live[0]]
        regions = (region for value in live for region in self.held[value].regions)
        return Space(regions, self.values.spaces[SOURCE].dtype)

    def _through_layer(self, here: Sequence[int], new: Sequence[int]) -> tuple[list[int], Layer]:
        """The values after the layer that follows a stage, and its calls."""
        calls: list[Call] = []
        live: list[int] = []
        for value in here:
            result, layer = self.results.get(value, (value, ()))
            live.append(result)
            names = self.held[value].renamed
            calls += [call.renamed(names) for call in layer]
            gone = {r.name for r in self.held[value].regions}
            self.names -= gone if result != value else set()
            self.names |= {r.name for r in self.held[result].regions}
        return live, tuple(calls)

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
