"""Ways to change one step of a plan, or the plan as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from linop.planning.patterns import Kind
from linop.planning.plan import (
    Advance,
    Alias,
    Apply,
    Collective,
    LoweredPlan,
    Make,
    Message,
    Put,
    Receive,
    Send,
    Step,
    Sum,
    Wait,
)
from linop.spaces.region import Region, Subset


def changed_plans(plan: LoweredPlan, at: int) -> Iterator[LoweredPlan]:
    """Plans that differ from one at a step: without it, with it twice, with another, elsewhere."""
    steps = plan.steps
    step = steps[at]
    known = _known(plan)
    for others in ([], [step, step], *([one] for one in _changed(step, known))):
        yield replace(plan, steps=(*steps[:at], *others, *steps[at + 1 :]))
    for to in range(at + 1, len(steps)):
        swapped = (*steps[:at], steps[to], *steps[at + 1 : to], step, *steps[to + 1 :])
        yield replace(plan, steps=swapped)
        yield replace(plan, steps=(*steps[:at], *steps[at + 1 : to + 1], step, *steps[to + 1 :]))


def changed_ends(plan: LoweredPlan) -> Iterator[LoweredPlan]:
    """Plans that differ from one in what they are given, or give, or in their dtype or worker."""
    yield replace(plan, inputs=plan.inputs[::-1], outputs=plan.outputs[::-1])
    yield replace(plan, inputs=plan.inputs[1:])
    yield replace(plan, outputs=plan.outputs[1:])
    yield replace(plan, worker=plan.worker + 1)
    yield replace(plan, dtype=np.dtype(np.complex64))
    yield replace(plan, steps=(*plan.steps, *plan.steps[-1:]))
    yield replace(plan, steps=plan.steps[: len(plan.steps) // 2])


def _known(plan: LoweredPlan) -> list[Region]:
    """The regions that a plan has at any time."""
    new = [s.region for s in plan.steps if isinstance(s, Make)]
    new += [s.target for s in plan.steps if isinstance(s, Alias)]
    new += [r for s in plan.steps if isinstance(s, Apply) for r in s.outputs]
    return list(dict.fromkeys([*plan.inputs, *new]))


def _changed(step: Step, known: Sequence[Region]) -> Iterator[Step]:
    match step:
        case Receive():
            yield from (replace(step, size=step.size + k) for k in (-1, 1))
            yield from (replace(step, peer=step.peer + k) for k in (-1, 1))
            yield replace(step, stage=step.stage + 2)
        case Send():
            yield from _sends(step, known)
        case Make():
            yield replace(step, zeroed=not step.zeroed)
            if step.within is not None:
                yield replace(step, within=None)
                yield from (replace(step, within=other) for other in _boxes(step.within, known))
            yield from (replace(step, region=r) for r in known)
            yield replace(step, region=Region(step.region.name, (2, *step.region.shape)))
        case Alias():
            yield from (replace(step, source=r) for r in known)
            yield from (replace(step, target=r) for r in known)
        case Put():
            yield from _puts(step, known)
        case Sum():
            yield Sum(step.second, step.first)
            yield from (replace(step, first=put) for put in _puts(step.first, known))
            yield from (replace(step, second=put) for put in _puts(step.second, known))
        case Wait():
            yield from (replace(step, stage=step.stage + k) for k in (-1, 1, 2))
        case Advance():
            yield from (replace(step, stage=step.stage + k) for k in (-1, 1, 2))
            names = step.taken or ()
            yield from (replace(step, taken=one) for one in (None, (), names[1:], names[:-1]))
            yield from (replace(step, taken=(*names, region.name)) for region in known)
        case Apply(call=call):
            for name in ("inputs", "outputs"):
                for names in (getattr(call, name)[::-1], getattr(call, name)[1:]):
                    yield replace(step, call=replace(call, **{name: names}))
                for region in known:
                    new = replace(call, **{name: (region.name,)})
                    yield replace(step, call=new)
                    yield replace(step, call=new, outputs=(region,))
            yield replace(step, call=call.adjoint)
            yield replace(step, call=replace(call, map=call.map.adjoint))
            yield replace(step, outputs=step.outputs[::-1])


def _sends(step: Send, known: Sequence[Region]) -> Iterator[Step]:
    yield from (replace(step, peer=step.peer + k) for k in (-1, 1))
    yield replace(step, stage=step.stage + 2)
    yield replace(step, parts=step.parts[::-1])
    yield replace(step, parts=(*step.parts[1:], *step.parts[:1]))
    for k, part in enumerate(step.parts):
        yield replace(step, parts=(*step.parts[:k], *step.parts[k + 1 :]))
        for other in _boxes(part, known):
            yield replace(step, parts=(*step.parts[:k], other, *step.parts[k + 1 :]))
    if isinstance(step, Collective):
        yield Send(step.stage, step.peer, step.parts)
        yield replace(step, sent=step.sent[::-1])
        yield replace(step, received=step.received[::-1])
        yield from (replace(step, pattern=found) for found in _patterns(step.pattern))


def _patterns(found: Any) -> Iterator[Any]:
    yield from (replace(found, kind=kind) for kind in Kind if kind.collective)
    yield from (replace(found, root=w) for w in (None, *found.group))
    yield replace(found, group=found.group[:-1])
    yield replace(found, group=found.group[::-1])
    yield replace(found, counts=tuple(n + 1 for n in found.counts))
    yield replace(found, counts=found.counts[::-1])


def _puts(step: Put, known: Sequence[Region]) -> Iterator[Put]:
    yield replace(step, stored=not step.stored)
    yield replace(step, accumulate=not step.accumulate)
    for coefficient in (step.coefficient + 1, -step.coefficient, 0):
        yield replace(step, coefficient=coefficient)
    yield from (replace(step, target=other) for other in _boxes(step.target, known))
    source = step.source
    if isinstance(source, Subset):
        yield from (replace(step, source=other) for other in _boxes(source, known))
    else:
        size = step.target.size
        for offset in (-1, 1, -size, size, -source.offset):
            yield replace(step, source=Message(source.peer, source.offset + offset))
        yield from (replace(step, source=replace(source, peer=source.peer + k)) for k in (-1, 1))


def _boxes(part: Subset, known: Sequence[Region]) -> Iterator[Subset]:
    """Boxes beside one, one shorter, and the same of other regions."""
    for axis in range(len(part.start)):
        one = np.eye(len(part.start), dtype=int)[axis]
        for low, high in ((1, 1), (-1, -1), (0, -1)):
            start, stop = part.start + low * one, part.stop + high * one
            yield Subset(part.region, tuple(map(int, start)), tuple(map(int, stop)))
    for region in known:
        if region.ndim == part.region.ndim:
            yield Subset(region, part.start, part.stop)
