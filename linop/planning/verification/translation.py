"""Translation validation: the transfers of all workers' plans, composed back into stages, are the
operator's.

A stage of plans is a movement from the regions before it to one region for each copy that a worker
makes. It is compared with the stage's movement, every row of it once for each holder of its target;
both in canonical form, so the comparison is exact. Then all copies of a region are equal after a
stage if they were before it, and by induction the plans are the operator.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from linop.normal_form.boxes import expand
from linop.normal_form.columns import representable
from linop.normal_form.maps import Layer
from linop.normal_form.movement import Block, Movement, Transfer
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
from linop.spaces.region import Region, Subset, as_subset
from linop.spaces.space import Space


class Wanted(NamedTuple):
    """One stage of an operator: a movement; or a layer, whose movement is of the regions that pass
    through."""

    number: int
    movement: Movement
    calls: Mapping[int, Layer] = {}
    """Of a layer, by worker."""


def wanted(stages: Stages) -> list[Wanted]:
    """The stages that the plans of an operator go through, as lowering numbers them."""
    found = []
    for k, movement in enumerate(stages.movements):
        found.append(Wanted(2 * k, movement))
        if k < len(stages.layers) and stages.layers[k]:
            layer, after = stages.layers[k], stages.movements[k + 1].domain
            same = _passing(movement.codomain, after, layer)
            found.append(Wanted(2 * k + 1, same, stages.placed[k]))
    return found


def _passing(before: Space, after: Space, layer: Layer) -> Movement:
    made = {name for call in layer for name in call.outputs}
    regions = [region for region in after if region.name not in made]
    same = ((as_subset(r), as_subset(before[r.name]), 1) for r in regions)
    return Movement.of_blocks(before, after, same)


def same_as_operator(stages: Stages, plans: Read) -> None:
    """Check that plans compute an operator.

    Args:
        stages: of the operator, as lowered.
        plans: the stages of the plans of all workers, which fit together.

    Raises:
        PlanError: they do not; the subclass says in what they differ.
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


@dataclass(frozen=True)
class Piece:
    """One transfer of a plan: a part of a worker's region to a part of a region of another one, or
    of its own; and the step that writes it."""

    target: Subset
    source: Subset
    step: Alias | Put
    at: int


class _Stage:
    """One stage of all workers' plans, and of the operator."""

    def __init__(self, wanted: Wanted, plans: Sequence[PlanStage]) -> None:
        self.wanted = wanted
        self.plans = {plan.worker: plan for plan in plans}

    def check(self) -> None:
        movement = self.wanted.movement
        for worker, plan in self.plans.items():
            where = f"worker {worker} after stage {plan.number}"
            _same_regions(where, movement.codomain, worker, plan.after)
            self._check_calls(plan)
        pieces = {worker: list(self._pieces(plan)) for worker, plan in self.plans.items()}
        self._check_transfers(pieces)
        for worker, own in pieces.items():
            self._check_sums(self.plans[worker], own)

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
        for at, step in plan.steps:
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
        """Incoming data of a peer, or of a group: parts in order, and where the first begins."""
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
        """One region for each holder of each region, in the order of `Space.holders`."""
        regions = self.wanted.movement.codomain.regions
        return Space(
            (_copy(region, worker) for region in regions for worker in region.workers),
            self.wanted.movement.codomain.dtype,
        )

    def _check_transfers(self, pieces: Mapping[int, Sequence[Piece]]) -> None:
        movement = self.wanted.movement
        table, (_, first, many) = movement.table, movement.codomain.holders
        row, k = expand(many[table.dst])
        coef = representable(table.coef, movement.domain.dtype)  # as plans have them
        spread = replace(table, coef=coef).take(row)
        spread = replace(spread, dst=first[table.dst[row]] + k)
        expected = Movement(movement.domain, self._copies, spread)
        blocks = (_block(p, worker) for worker, own in pieces.items() for p in own)
        given = Movement.of_blocks(movement.domain, self._copies, blocks)
        if given != expected:
            self._differ(expected, given, pieces)

    def _differ(
        self, expected: Movement, given: Movement, pieces: Mapping[int, Sequence[Piece]]
    ) -> None:
        """Say where the first difference is."""
        box = next(iter(given - expected)).target
        (worker,) = box.workers
        name = box.region.name.partition(" ")[2]
        region = next(r for r in self.plans[worker].after.values() if r.name == name)
        target = Subset(region, box.start, box.stop)
        plan = self.plans[worker]
        steps = {p.at: p for p in pieces[worker] if p.target.overlaps(target)}
        by = "; ".join(f"step {at} ({p.step})" for at, p in steps.items()) or "no step"
        raise WrongTransferError(
            f"worker {worker}, stage {plan.number}, {target}: {_into(expected, box)} expected, "
            f"{_into(given, box)} given, by {by}"
        )

    # Sums

    def _check_sums(self, plan: PlanStage, pieces: Sequence[Piece]) -> None:
        """Check the order of the terms of sums; of two terms, it makes no difference."""
        by_region: dict[str, list[Piece]] = {}
        for piece in pieces:
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
        """The order of terms: by the worker that counts the source, then as in the movement."""
        source = piece.source
        number = self.wanted.movement.domain.index[source.region.name]
        return source.workers[0], number, piece.target.start, source.start


class _Arrivals:
    """Parts that come in one message, or that a collective adds up, by where they begin."""

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
        """The parts that a put reads, each with the box that it goes to.

        Raises:
            MisreadError: it reads parts of parts, or puts them in another shape.
        """
        assert isinstance(put.source, Message)
        begin, size = put.source.offset, put.target.size
        first, last = (bisect_left(self.starts, at) for at in (begin, begin + size))
        covered = 0
        for start, part in zip(self.starts[first:last], self.parts[first:last], strict=True):
            box = _run(put.target, start - begin, part)
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


def _run(target: Subset, position: int, part: Subset) -> Subset | None:
    """The box that is the elements of a target from a position on, if it has the shape of a part
    that is put there; None if it has not."""
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
    """The parts of a contribution that are between two of its elements.

    Raises:
        MisreadError: a part is on both sides of one.
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


def _copy(region: Region, worker: int) -> Region:
    return Region.checked(f"{worker} {region.name}", region.shape, (worker,), region.memory)


def _block(piece: Piece, worker: int) -> Block:
    target = piece.target
    copy = Subset(_copy(target.region, worker), target.start, target.stop)
    coefficient = piece.step.coefficient if isinstance(piece.step, Put) else 1
    return copy, piece.source, coefficient


def _into(movement: Movement, box: Subset) -> str:
    """The transfers into a box, in words."""
    found: list[Transfer] = [t for t in movement if t.target.overlaps(box)]
    return " + ".join(_term(t) for t in found) or "0"


def _term(transfer: Transfer) -> str:
    scale = "" if transfer.coefficient == 1 else f"{transfer.coefficient} · "
    return f"{scale}{transfer.source}"
