"""Plans of one operator at many sizes: what nobody cuts is an extent of a plan and nothing else.

A movement that has all of a tensor dimension in every block, before and after, is M = M' ⊗ I: the
batch of a halo exchange, the channels of a sum. Its steps are those of M', with another extent; the
elements of its messages are multiplied. So one plan serves all batch sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import NamedTuple

from linop.normal_form.rows import digest_of
from linop.normal_form.stages import Stages
from linop.planning.lowering import lower
from linop.planning.passes import prepared
from linop.planning.patterns import Pattern
from linop.planning.plan import Alias, Make, Message, Plan, Put, Receive, Send, Step
from linop.spaces.region import Region, Subset
from linop.spaces.tensor import TensorSpace

_MOST = 1024
"""Plans that are kept."""


class _Known(NamedTuple):
    plan: Plan
    uncut: Mapping[int, int]


class Plans:
    """The plans of a worker. Those of operators that differ in extents that nobody cuts are lowered
    once."""

    def __init__(self, worker: int) -> None:
        self._worker = worker
        self._known: dict[bytes, _Known] = {}

    def of(self, stages: Stages) -> Plan:
        """The worker's plan: the one that `linop.planning.lowering.lower` makes.

        Raises:
            BackendError: a local map spans several workers.
        """
        uncut = uncut_in(stages)
        if not uncut:
            return lower(stages, self._worker)
        essence = _essence(stages, uncut)
        known = self._known.get(essence)
        if known is not None and known.uncut == uncut:
            return known.plan
        if known is not None:
            return stretched(known.plan, stages, known.uncut, uncut)
        if len(self._known) == _MOST:
            self._known.clear()
        plan = lower(stages, self._worker)
        self._known[essence] = _Known(plan, uncut)
        return plan


def uncut_in(stages: Stages) -> Mapping[int, int]:
    """The tensor dimensions that every region has the whole of, on both sides of all transfers, and
    their extents. None where there is more than one movement: where to cut a sum into shares
    depends on sizes."""
    (movement, *more), spaces = stages.movements, (stages.domain, stages.codomain)
    if more or not all(isinstance(space, TensorSpace) for space in spaces):
        return {}
    whole = {
        d: n
        for d, n in movement.rows.uncut.items()
        if all((space.shapes[:, d] == n).all() for space in spaces)
    }
    return whole if whole and prepared(stages) is stages else {}


def _essence(stages: Stages, uncut: Mapping[int, int]) -> bytes:
    """A key that tells plans apart that are not the same but for extents that nobody cuts."""
    domain, codomain = stages.domain, stages.codomain
    assert isinstance(domain, TensorSpace)
    assert isinstance(codomain, TensorSpace)
    rows = stages.movements[0].rows.without(uncut)
    sides = domain.digest_without(uncut), codomain.digest_without(uncut)
    return digest_of(repr(sorted(uncut)), *sides, rows.digest)


def stretched(
    plan: Plan, stages: Stages, before: Mapping[int, int], after: Mapping[int, int]
) -> Plan:
    """A plan of stages, made of one of stages that have other extents in dimensions that nobody
    cuts.

    Args:
        plan: of stages whose extents are `before`, by dimension.
        stages: those whose extents are `after`.
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
    return Plan(plan.worker, plan.dtype, inputs, outputs, tuple(steps), tuple(patterns))
