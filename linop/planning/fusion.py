"""Passes over one worker's plan that save passes over its memory; they change no message.

`added_inside` adds to an argument where it is, if that may be overwritten. `sums_fused` forms a sum
of two terms in one pass, within the memory in which messages arrive. `stored_in_results` forms a
sum where the next stage would copy it to. `applied_inside` saves local maps the pages of a new
result. Their conditions are those of the memory of one worker, so workers need not agree on them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from linop.planning.collective_selection import offset_of
from linop.planning.plan import Alias, Apply, LoweredPlan, Make, Put, Send, Step, Sum, puts_of
from linop.spaces.region import Region, Subset, as_subset


def added_inside(plan: LoweredPlan) -> LoweredPlan:
    """Let a region that is an argument with something added to it take the argument's memory, if a
    run may overwrite that (`LoweredPlan.scratch`), and nothing else reads the argument."""
    if not plan.scratch:
        return plan
    stage, *others = plan.stages or [()]
    given = {region.name: region for region in plan.inputs if region.name in plan.scratch}
    inside = {name for name, region in given.items() if _added_alone(stage, region)}
    steps: list[Step] = []
    for step in stage:
        if isinstance(step, Make) and step.region.name in inside:
            step = replace(step, inside=True)
        elif isinstance(step, Put) and step.keeps and step.target.region.name in inside:
            step = replace(step, stored=True)
        steps.append(step)
    return replace(plan, steps=(*steps, *(step for other in others for step in other)))


def _added_alone(stage: Sequence[Step], region: Region) -> bool:
    """True if a stage makes an argument's region anew of the whole argument, as it is, and of what
    it adds to it, and reads the argument for nothing else."""
    name, read = region.name, [source for step in stage for source in _read(step)]
    makes = [step for step in stage if isinstance(step, Make) and step.region.name == name]
    puts = [put for put in puts_of(stage) if put.target.region.name == name]
    if [make.region for make in makes] != [region] or makes[0].zeroed or not puts:
        return False
    first, *added = puts
    whole = first.keeps and first.target.whole
    return whole and all(put.accumulate for put in added) and read.count(name) == 1


def _read(step: Step) -> list[str]:
    """Names of the regions before a stage that a step reads."""
    match step:
        case Alias():
            return [step.source.name]
        case Send():
            return [part.region.name for part in step.parts]
        case Apply():
            return list(step.call.inputs)
        case Put() | Sum():
            sources = (put.source for put in puts_of([step]))
            return [source.region.name for source in sources if isinstance(source, Subset)]
    return []


def overwritten(plan: LoweredPlan) -> frozenset[str]:
    """Names of the arguments that a run of a plan overwrites, after all passes."""
    makes = (step for step in plan.steps if isinstance(step, Make))
    return frozenset(make.region.name for make in makes if make.inside)


def sums_fused(plan: LoweredPlan) -> LoweredPlan:
    """Join each put that sets a subset with the accumulation into it that follows, if that covers
    the same subset and no other."""
    steps: list[Step] = []
    for stage in plan.stages:
        first = {id(second): put for put, second in _pairs(puts_of(stage))}
        joined = {id(put) for put in first.values()}
        for step in stage:
            if id(step) in first and isinstance(step, Put):
                steps.append(Sum(first[id(step)], step))
            elif id(step) not in joined:
                steps.append(step)
    return replace(plan, steps=tuple(steps))


def _pairs(puts: Sequence[Put]) -> Iterator[tuple[Put, Put]]:
    adding: dict[str, list[Put]] = {}
    for put in puts:
        if put.accumulate:
            adding.setdefault(put.target.region.name, []).append(put)
    for put in puts:
        over = (o for o in adding.get(put.target.region.name, ()) if o.target.overlaps(put.target))
        second = next(over, None)
        if put.is_copy and second is not None and second.is_addition:
            if second.target == put.target:
                yield put, second


def stored_in_results(plan: LoweredPlan, small: int) -> LoweredPlan:
    """Make a region that the next stage copies, as a whole and as it is, into a contiguous subset
    of a result, within that subset, if it is a sum.

    Args:
        small: bytes of results up to which the plan is returned unchanged, since such results are
            allocated in every run (`linop.backends.engine.execution.layout`).
    """
    results = _results(plan)
    size = sum(region.size for made in results for region in made.values()) * plan.dtype.itemsize
    if size <= small:
        return plan
    stages = [list(stage) for stage in plan.stages]
    for k, (stage, after) in enumerate(pairwise(stages)):
        within = _within(stage, after, results[k], results[k + 1])
        for at, step in enumerate(stage):
            if isinstance(step, Make) and step.region.name in within:
                stage[at] = replace(step, within=within[step.region.name].target)
        stored = {id(put) for put in within.values()}
        for at, step in enumerate(after):
            if isinstance(step, Put) and id(step) in stored:
                after[at] = replace(step, stored=True)
    return replace(plan, steps=tuple(step for stage in stages for step in stage))


def _within(
    stage: Sequence[Step],
    after: Sequence[Step],
    own: Mapping[str, Region],
    results: Mapping[str, Region],
) -> dict[str, Put]:
    """Copies of sums of a stage into results in the next one, by the name of the sum's region.

    Args:
        own, results: the regions made in each of the stages that are results.
    """
    sums = {
        s.first.target.region.name for s in stage if isinstance(s, Sum) and s.first.target.whole
    }
    sums -= own.keys()
    sums -= {step.source.name for step in after if isinstance(step, Alias)}
    zeroed = {s.region.name for s in after if isinstance(s, Make) and s.zeroed}
    added = [put.target for put in puts_of(after) if put.accumulate]
    found: dict[str, Put] = {}
    for put in after:
        if not isinstance(put, Put) or not put.is_copy or not isinstance(put.source, Subset):
            continue
        name, target = put.source.region.name, put.target
        if name not in sums or name in found or not put.source.whole:
            continue
        if target.region.name not in results.keys() - zeroed or offset_of(target) is None:
            continue
        if not any(target.overlaps(other) for other in added):
            found[name] = put
    return found


def _results(plan: LoweredPlan) -> list[dict[str, Region]]:
    """For each stage the regions made in it, by name, whose arrays are results of the plan."""
    wanted = {region.name for region in plan.outputs}
    found: list[dict[str, Region]] = []
    for stage in reversed(plan.stages):
        made = {step.region.name: step.region for step in stage if isinstance(step, Make)}
        found.insert(0, {name: region for name, region in made.items() if name in wanted})
        kept = {s.target.name: s.source.name for s in stage if isinstance(s, Alias)}
        own = {r.name for s in stage if isinstance(s, Apply) for r in s.outputs} | made.keys()
        wanted = {kept.get(name, name) for name in wanted - own}
    return found


def applied_inside(plan: LoweredPlan) -> LoweredPlan:
    """Apply local maps that can overwrite their argument to an array that the stage before made,
    and that nobody else reads. An array that it kept is copied there for that: 134 MB took 25 ms,
    the pages of a new result 35 ms."""
    stages = [list(stage) for stage in plan.stages]
    for stage, after in pairwise(stages):
        for at, step in enumerate(after):
            if isinstance(step, Apply) and step.call.map.inside is not None:
                (region,), (name,) = step.outputs, step.call.inputs
                after[at] = replace(step, inside=_own(stage, name, region.memory))
    return replace(plan, steps=tuple(step for stage in stages for step in stage))


def _own(stage: list[Step], name: str, memory: str) -> bool:
    """True if a stage makes an array; one that it keeps is made a copy."""
    for at, step in enumerate(stage):
        if isinstance(step, Make) and step.region.name == name:
            return step.region.memory == memory
        if isinstance(step, Alias) and step.target.name == name and step.target.memory == memory:
            copied = Put(as_subset(step.target), as_subset(step.source), 1, accumulate=False)
            stage[at : at + 1] = [Make(step.target, zeroed=False), copied]
            return True
    return False
