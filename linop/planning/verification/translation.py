"""Translation validation: proof that all workers' plans compute the operator, stage by stage.

The steps of all workers in a stage are reassembled into a movement whose codomain has one region
for each holder of each region. It is compared with the operator's movement, every transfer repeated
for each holder of its target; both in canonical form, so the comparison is exact. Hence all copies
of a replicated region are equal after a stage if they were before it, and by induction the plans
compute the operator. The order of sums is checked here too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from linop.caching import cached_property
from linop.normal_form.boxes import expand
from linop.normal_form.columns import representable
from linop.normal_form.maps import Layer
from linop.normal_form.movement import Movement, Transfer
from linop.normal_form.space_tables import table_of
from linop.normal_form.stages import Stages
from linop.planning.lowering import summation
from linop.planning.plan import GROUP, Alias, Apply, Message, Put
from linop.planning.verification.correspondence import Read, collective_of, terms
from linop.planning.verification.plan_errors import (
    MisreadError,
    StageError,
    SumOrderError,
    WrongCallError,
    WrongRegionError,
    WrongTransferError,
)
from linop.planning.verification.plan_stages import PlanStage
from linop.spaces.exact import Exact, exact
from linop.spaces.region import Region, Subset, as_subset
from linop.spaces.space import Space


class Wanted(NamedTuple):
    """An expected stage: a movement; or a layer, between the spaces of what it takes and makes."""

    number: int
    movement: Movement
    calls: Mapping[int, Layer] = {}
    """The calls of a layer, by worker; empty for a movement."""


def wanted(stages: Stages) -> list[Wanted]:
    """The stages expected of an operator's plans, numbered as by lowering."""
    found = []
    given = {region.name: region for region in stages.domain}
    for k, movement in enumerate(stages.movements):
        found.append(Wanted(2 * k, movement))
        given |= {region.name: region for region in movement.codomain}
        if k < len(stages.layers) and stages.layers[k]:
            layer = stages.layers[k]
            before = [given[name] for call in layer for name in call.inputs]
            after = [stages.result(k, name) for call in layer for name in call.outputs]
            given |= {region.name: region for region in after}
            taken, made = (Space(regions, stages.domain.dtype) for regions in (before, after))
            nothing = Movement.of_blocks(taken, made, ())
            found.append(Wanted(2 * k + 1, nothing, stages.calls_by_worker[k]))
    return found


def same_as_operator(stages: Stages, plans: Read) -> None:
    """Check that the plans of all workers compute an operator.

    Args:
        stages: the operator's, after all passes.
        plans: the stages of the plans of all workers, whose messages match
            (`linop.planning.verification.correspondence`).

    Raises:
        StageError, WrongRegionError, WrongCallError, WrongTransferError, MisreadError,
            SumOrderError.
    """
    every = wanted(stages)
    numbers = [stage.number for stage in every]
    for worker, own in plans.items():
        found = [stage.number for stage in own]
        if found != numbers:
            raise StageError(f"worker {worker}: stages {found}, and {numbers} expected")
        _same_regions(f"worker {worker} before stage 0", stages.domain, worker, own[0].before)
    for k, stage in enumerate(every):
        _Stage(stage, [own[k] for own in plans.values()]).check()


def _same_regions(where: str, space: Space, worker: int, found: Mapping[str, Region]) -> None:
    regions = {region.name: region for region in space.on(worker)}
    for name in [*regions, *found]:
        if regions.get(name) != found.get(name):
            given, expected = found.get(name), regions.get(name)
            raise WrongRegionError(f"{where}: {name!r} is {given!r}, {expected!r} expected")


class Piece(NamedTuple):
    """One transfer of a plan, between subsets of regions of the same or of two workers, and the
    step that writes it, with its position."""

    target: Subset
    source: Subset
    step: Alias | Put
    at: int


class _Stage:
    """Comparison of one stage of all workers' plans with that of the operator."""

    def __init__(self, wanted: Wanted, plans: Sequence[PlanStage]) -> None:
        self.wanted = wanted
        self.plans = {plan.worker: plan for plan in plans}

    def check(self) -> None:
        movement = self.wanted.movement
        for worker, plan in self.plans.items():
            where = f"worker {worker}, stage {plan.number}"
            _same_regions(f"{where}, takes", movement.domain, worker, plan.before)
            _same_regions(f"{where}, makes", movement.codomain, worker, plan.after)
            self._check_calls(plan)
        self._check_transfers()
        for plan in self.plans.values():
            self._check_sums(plan)

    # Local maps

    def _check_calls(self, plan: PlanStage) -> None:
        given = [step.call for _, step in plan.of(Apply)]
        own = list(self.wanted.calls.get(plan.worker, ()))
        for call in given:
            if call not in own:
                raise WrongCallError(
                    f"worker {plan.worker}, stage {plan.number}: applies {call.map.symbol} to "
                    f"{call.inputs}, and the operator does not"
                )
            own.remove(call)
        for call in own:
            raise WrongCallError(
                f"worker {plan.worker}, stage {plan.number}: does not apply {call.map.symbol} to "
                f"{call.inputs}"
            )

    # Transfers

    def _pieces(self, plan: PlanStage) -> Iterator[Piece]:
        """The transfers into a worker's new regions, in the order of its steps."""
        arrivals: dict[int, _Arrivals] = {}
        for at, step in zip(plan.places, plan.steps, strict=True):
            match step:
                case Alias():
                    yield Piece(as_subset(step.target), as_subset(step.source), step, at)
                case Put(source=Message(peer=peer)) if step.target.size:
                    if peer not in arrivals:
                        arrivals[peer] = _Arrivals(self._arriving(plan, peer))
                    for target, source in arrivals[peer].into(step, plan, at):
                        yield Piece(target, source, step, at)
                case Put() if step.target.size:
                    yield Piece(step.target, step.source, step, at)  # type: ignore[arg-type]

    def _arriving(self, plan: PlanStage, peer: int) -> Iterator[tuple[int, Sequence[Subset]]]:
        """(offset, subsets in order) of the data received from a peer, or from each of a group."""
        if peer != GROUP:
            yield 0, self.plans[peer].sent[plan.worker]
            return
        mine = collective_of(plan)
        assert mine is not None
        members = {w: collective_of(self.plans[w]) for w in mine.pattern.group}
        begun = {w: theirs for w, theirs in members.items() if theirs is not None}
        for sender, low, high, start in terms(mine.pattern, begun, plan.worker):
            yield start, _between(begun[sender].parts, low, high, self.plans[sender])

    @cached_property
    def _copies(self) -> Space:
        """The codomain with one region per holder of each region, in `Numbering.holders` order."""
        codomain = self.wanted.movement.codomain
        copies = (
            Region.checked(f"{w} {r.name}", r.shape, (w,), r.memory)
            for r in codomain.regions
            for w in r.workers
        )
        return Space(copies, codomain.dtype)

    def _check_transfers(self) -> None:
        movement = self.wanted.movement
        table, (_, first, many) = movement.table, movement.codomain.numbering.holders
        row, k = expand(many[table.dst])
        coef = representable(table.coef, movement.domain.dtype)  # rounded, as in plans
        spread = replace(table, coef=coef).take(row)
        spread = replace(spread, dst=first[table.dst[row]] + k)
        expected = Movement(movement.domain, self._copies, spread)
        copies = ((r.name, w) for r in movement.codomain.regions for w in r.workers)
        number = {copy: k for k, copy in enumerate(copies)}
        # Columns instead of an object per piece, which the garbage collector would visit.
        dst: list[int] = []
        targets: list[Subset] = []
        sources: list[Subset] = []
        factors: list[Exact] = []
        for worker, plan in self.plans.items():
            for target, source, step, _ in self._pieces(plan):
                dst.append(number[target.region.name, worker])
                targets.append(target)
                sources.append(source)
                factors.append(exact(step.coefficient) if isinstance(step, Put) else 1)
        written = table_of(movement.domain, self._copies, dst, targets, sources, factors)
        given = Movement(movement.domain, self._copies, written)
        if given != expected:
            self._differ(expected, given)

    def _differ(self, expected: Movement, given: Movement) -> None:
        """Raise WrongTransferError with the first box that differs, and the steps that write it."""
        box = next(iter(given - expected)).target
        (worker,) = box.workers
        name = box.region.name.partition(" ")[2]
        region = next(r for r in self.plans[worker].after.values() if r.name == name)
        target = Subset(region, box.start, box.stop)
        plan = self.plans[worker]
        steps = {p.at: p for p in self._pieces(plan) if p.target.overlaps(target)}
        by = "; ".join(f"step {at} ({p.step})" for at, p in steps.items()) or "no step"
        raise WrongTransferError(
            f"worker {worker}, stage {plan.number}, {target}: {_into(expected, box)} expected, "
            f"{_into(given, box)} given, by {by}"
        )

    # Sums

    def _check_sums(self, plan: PlanStage) -> None:
        """Check the order of the terms of sums; two terms commute, so they need no check."""
        if sum(put.accumulate for _, put in plan.of(Put)) < 2:
            return
        by_region: dict[str, list[Piece]] = {}
        for piece in self._pieces(plan):
            source = getattr(piece.step, "source", None)
            if not (isinstance(source, Message) and source.peer == GROUP):
                by_region.setdefault(piece.target.region.name, []).append(piece)
        for own in by_region.values():
            given = [p for p in own if isinstance(p.step, Put) and p.step.accumulate]
            if len(given) < 2:
                continue
            terms = sorted(own, key=self._rank)
            at, extent = (
                np.array([getattr(p.target, end) for p in terms], np.int64).reshape(len(terms), -1)
                for end in ("start", "shape")
            )
            order, sums = summation(at, extent)
            for mine, theirs in zip(given, (terms[k] for k in order if sums[k]), strict=False):
                if (mine.target, mine.source) != (theirs.target, theirs.source):
                    raise SumOrderError(
                        f"{plan.where(mine.at)}: {mine.source} is added to {mine.target}, and "
                        f"{theirs.source} to {theirs.target} is the next in the order of workers"
                    )

    def _rank(self, piece: Piece) -> tuple[Any, ...]:
        """Sort key of terms: first holder of the source, then row order of the movement."""
        source = piece.source
        number = self.wanted.movement.domain.numbering.index[source.region.name]
        return source.workers[0], number, piece.target.start, source.start


class _Arrivals:
    """The subsets received in one message, or summed by one collective, sorted by offset."""

    def __init__(self, terms: Iterator[tuple[int, Sequence[Subset]]]) -> None:
        found: list[tuple[int, Subset]] = []
        for start, parts in terms:
            for part in parts:
                if part.size:
                    found.append((start, part))
                start += part.size
        found.sort(key=lambda one: one[0])
        self.starts = [start for start, _ in found]
        self.parts = [part for _, part in found]

    def into(self, put: Put, plan: PlanStage, at: int) -> Iterator[tuple[Subset, Subset]]:
        """(target box, source subset) of each subset that a put reads.

        Raises:
            MisreadError: the put reads a fraction of a subset, or in another shape.
        """
        assert isinstance(put.source, Message)
        begin, size = put.source.offset, put.target.size
        first, last = (bisect_left(self.starts, at) for at in (begin, begin + size))
        covered = 0
        for start, part in zip(self.starts[first:last], self.parts[first:last], strict=True):
            box = _box_at(put.target, start - begin, part)
            if box is None:
                raise MisreadError(
                    f"{plan.where(at)}: {part} comes at {start}, and is read as other boxes"
                )
            covered += part.size
            yield box, part
        if covered % size or not covered:
            raise MisreadError(
                f"{plan.where(at)}: parts begin at {self.starts}; one or several are read, whole"
            )


def _box_at(target: Subset, position: int, part: Subset) -> Subset | None:
    """The box, of the shape of `part`, that the elements of a target from `position` on fill in C
    order; None if they do not form such a box."""
    if position == 0 and part.shape == target.shape:
        return target
    shape, extent = _padded(target.shape, part.shape), _padded(part.shape, target.shape)
    at = np.unravel_index(position, shape)
    stop = [int(a) + n for a, n in zip(at, extent, strict=True)]
    ones = next((k for k, n in enumerate(extent) if n != 1), len(extent))
    if extent[ones + 1 :] != shape[ones + 1 :] or any(
        b > n for b, n in zip(stop, shape, strict=True)
    ):
        return None
    start = tuple(a + int(b) for a, b in zip(target.start, at, strict=False))
    ends = tuple(a + b for a, b in zip(target.start, stop, strict=False))
    return Subset(target.region, start, ends)


def _padded(shape: tuple[int, ...], like: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape, *(1,) * (len(like) - len(shape)))


def _between(parts: Sequence[Subset], low: int, high: int, plan: PlanStage) -> list[Subset]:
    """The subsets of a contribution between elements `low` and `high`.

    Raises:
        MisreadError: a subset extends across one of the two.
    """
    found, start = [], 0
    for part in parts:
        stop = start + part.size
        if low <= start and stop <= high:
            found.append(part)
        elif start < high and low < stop:
            raise MisreadError(
                f"worker {plan.worker}, stage {plan.number}: {part} goes in part to one member of "
                f"a group, in part to another"
            )
        start = stop
    return found


def _into(movement: Movement, box: Subset) -> str:
    """Text of the transfers into a box, for error messages."""
    found: list[Transfer] = [t for t in movement if t.target.overlaps(box)]
    return " + ".join(_term(t) for t in found) or "0"


def _term(transfer: Transfer) -> str:
    scale = "" if transfer.coefficient == 1 else f"{transfer.coefficient} · "
    return f"{scale}{transfer.source}"
