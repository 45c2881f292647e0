"""Cache of plans that serves operators which differ in the extents of uncut dimensions only.

A movement whose blocks all hold the full extent of a tensor dimension, in domain and codomain, is
M = M' ⊗ I: the batch of a halo exchange, the channels of a sum. Its steps are those of M' with
another extent, and message sizes are multiplied by it. So one lowering serves all batch sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import NamedTuple

from linop.normal_form.stages import Stages
from linop.normal_form.transfer_table import digest_of
from linop.planning.lowering import lower
from linop.planning.patterns import Pattern
from linop.planning.placement import Placement
from linop.planning.plan import Alias, LoweredPlan, Make, Message, Put, Receive, Send, Step
from linop.planning.stage_passes import prepared
from linop.spaces.region import Region, Subset
from linop.spaces.tensor import TensorSpace

_CACHE_SIZE = 1024
"""Largest number of cached plans."""


class _Cached(NamedTuple):
    plan: LoweredPlan
    uncut: Mapping[int, int]


class Plans:
    """Cache of one worker's plans; operators that differ in uncut extents only are lowered once.

    Args:
        placement: of the workers; by default on one machine.
    """

    def __init__(self, worker: int, placement: Placement | None = None) -> None:
        self._worker = worker
        self._placement = placement
        self._known: dict[bytes, _Cached] = {}

    def of(self, stages: Stages) -> LoweredPlan:
        """The worker's plan, equal to that of `linop.planning.lowering.lower`.

        Raises:
            BackendError: a local map spans several workers.
        """
        uncut = uncut_in(stages, self._placement)
        if not uncut:
            return lower(stages, self._worker, self._placement)
        essence = _essence(stages, uncut)
        known = self._known.get(essence)
        if known is not None and known.uncut == uncut:
            return known.plan
        if known is not None:
            return stretched(known.plan, stages, known.uncut, uncut)
        if len(self._known) == _CACHE_SIZE:
            self._known.clear()
        plan = lower(stages, self._worker, self._placement)
        self._known[essence] = _Cached(plan, uncut)
        return plan


def uncut_in(stages: Stages, placement: Placement | None = None) -> Mapping[int, int]:
    """Extents, by dimension, of the uncut tensor dimensions: all regions, and both boxes of all
    transfers, have the full extent. Empty if there are several movements, or if passes change
    the stages, since the choice of shares of sums depends on sizes."""
    (movement, *more), spaces = stages.movements, (stages.domain, stages.codomain)
    if more or not all(isinstance(space, TensorSpace) for space in spaces):
        return {}
    whole = {
        d: n
        for d, n in movement.transfers.uncut.items()
        if all((space.numbering.shapes[:, d] == n).all() for space in spaces)
    }
    return whole if whole and prepared(stages, placement) is stages else {}


def _essence(stages: Stages, uncut: Mapping[int, int]) -> bytes:
    """Cache key: equal for stages that differ in the extents of the dimensions `uncut` only."""
    domain, codomain = stages.domain, stages.codomain
    assert isinstance(domain, TensorSpace)
    assert isinstance(codomain, TensorSpace)
    rows = stages.movements[0].transfers.without(uncut)
    sides = domain.digest_without(uncut), codomain.digest_without(uncut)
    return digest_of(repr(sorted(uncut)), *sides, rows.digest)


def stretched(
    plan: LoweredPlan, stages: Stages, before: Mapping[int, int], after: Mapping[int, int]
) -> LoweredPlan:
    """The plan of stages, from a plan of stages that differ in uncut extents only.

    Args:
        plan: of stages whose uncut extents, by dimension, are `before`.
        stages: the stages to plan, whose uncut extents are `after`.
    """
    inputs, outputs = stages.domain.on(plan.worker), stages.codomain.on(plan.worker)
    sources = {region.name: region for region in inputs}
    targets = {region.name: region for region in outputs}
    more, less = prod(after.values()), prod(before.values())

    def size(elements: int) -> int:
        return elements // less * more

    def box(part: Subset, regions: Mapping[str, Region]) -> Subset:
        stop = tuple(after.get(d, n) for d, n in enumerate(part.stop))
        return Subset(regions[part.region.name], part.start, stop)

    def step_of(step: Step) -> Step:
        match step:
            case Receive():
                return Receive(step.stage, step.peer, size(step.size))
            case Send():
                parts = tuple(box(part, sources) for part in step.parts)
                return Send(step.stage, step.peer, parts)
            case Make():
                return Make(targets[step.region.name], step.zeroed)
            case Alias():
                return Alias(sources[step.source.name], targets[step.target.name])
            case Put():
                source: Subset | Message
                if isinstance(step.source, Message):
                    source = Message(step.source.peer, size(step.source.offset))
                else:
                    source = box(step.source, sources)
                return Put(box(step.target, targets), source, step.coefficient, step.accumulate)
            case _:
                return step

    def pattern_of(pattern: Pattern) -> Pattern:
        return replace(pattern, counts=tuple(map(size, pattern.counts)))

    steps, patterns = map(step_of, plan.steps), map(pattern_of, plan.patterns)
    return LoweredPlan(plan.worker, plan.dtype, inputs, outputs, tuple(steps), tuple(patterns))
