"""The laws of the memory primitives, and one pass that applies them.

A program is a list of actions, first applied first, each on one region or pair of subsets; anything
else in it is opaque and touches everything. Actions that touch different regions commute, so a law
for neighbours holds for an action and the last one before it that touches any of its regions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from heapq import merge
from itertools import groupby
from typing import Any

from linop.normal_form.primitives import Action, Add, Allocate, Clear, Deallocate
from linop.spaces.region import Part, Subset, as_subset

Step = Any
"""An `Action`, or an opaque object (a barrier)."""


def _clear_clear(after: Clear, before: Clear) -> list[Action] | None:
    """K_b K_c = K_b where c is part of b, and the other way round."""
    if before.part.contains(after.part):
        return [before]
    return [after] if after.part.contains(before.part) else None


def _deallocate_allocate(after: Deallocate, before: Allocate) -> list[Action] | None:
    """D_b A_b = I."""
    return [] if after.parts == before.parts else None


def _allocate_deallocate(after: Allocate, before: Deallocate) -> list[Action] | None:
    """A_b D_b = K_b."""
    return [Clear(as_subset(after.parts[0]))] if after.parts == before.parts else None


def _lost(after: Action, before: Action) -> list[Action] | None:
    """D_b K_b = D_b, D_b S_{a→b} = D_b and K_b S_{a→b} = K_b: what was written is not kept."""
    return [after] if _holds(after.parts[0], before.parts[-1]) else None


def _of_zero(after: Action, before: Action) -> list[Action] | None:
    """K_b A_b = A_b, S_{b→a} A_b = A_b and S_{b→a} K_b = K_b: what is read is zero."""
    return [before] if _holds(before.parts[0], after.parts[0]) else None


def _holds(whole: Part, part: Part) -> bool:
    """True if every element of a part is in another one."""
    if whole is part or (type(part) is Subset and part.region is whole):
        return True
    return as_subset(whole).contains(as_subset(part))


Law = Callable[[Any, Any], list[Action] | None]

LAWS: dict[tuple[type[Any], type[Any]], Law] = {
    (Clear, Clear): _clear_clear,
    (Deallocate, Allocate): _deallocate_allocate,
    (Allocate, Deallocate): _allocate_deallocate,
    (Deallocate, Clear): _lost,
    (Deallocate, Add): _lost,
    (Clear, Add): _lost,
    (Clear, Allocate): _of_zero,
    (Add, Allocate): _of_zero,
    (Add, Clear): _of_zero,
}
"""The product of two neighbours, by the kinds of the later and the earlier; None: they stay."""


def _copied_back(after: Add, history: Iterator[Step]) -> bool:
    """S_{b→a} K_a S_{a→b} Z_b = S_{a→b} Z_b where Z_b allocates or clears b: a copy that returns.

    Args:
        history: the steps that touch a or b, latest first: from K_a on.
    """
    _, copied, zeroed = (next(history, None) for _ in range(3))
    return (
        copied == after.adjoint
        and isinstance(zeroed, Allocate | Clear)
        and _holds(zeroed.parts[0], after.source)
    )


def reduce_program(steps: Sequence[Step]) -> list[Step]:
    """The program after all laws; as short as these laws make it, and equal as an operator."""
    current = [piece for step in steps for piece in _split(step)]
    exposed = True
    while exposed:
        current, exposed = _reduce_once(current)
    joined = _joined(current)
    # Allocations of several regions were split, and what stands between them may keep them apart.
    return joined if len(joined) < len(steps) else list(steps)


def _reduce_once(steps: Sequence[Step]) -> tuple[list[Step], bool]:
    """The program after a law for each step and the last one before it that touches its regions;
    and whether a step went that stood between two others, which now may have a law."""
    done: list[Step | None] = []
    touching: defaultdict[str, list[int]] = defaultdict(list)
    exposed = False
    for step in steps:
        if not isinstance(step, Action):
            touching.clear()  # nothing looks past a barrier
            done.append(step)
            continue
        reduced: Action | None = step
        while reduced is not None:
            last = _last(done, touching, reduced)
            before: Any = done[last] if last >= 0 else None
            if type(reduced) is Add and before == Clear(reduced.target):
                if _copied_back(reduced, _history(done, touching, reduced)):
                    done[last] = None
                    break
            law = LAWS.get((type(reduced), type(before)))
            result = None if law is None else law(reduced, before)
            if result is None:
                for name in reduced.names:
                    touching[name].append(len(done))
                done.append(reduced)
                break
            if result and result[0] is before:
                break
            # Nothing after it touches what the result touches: it can move to the end, and meet
            # what stood before the action it replaces.
            done[last] = None
            exposed = exposed or any(touching[name][-1] > last for name in before.names)
            reduced = result[0] if result else None
    return [step for step in done if step is not None], exposed


def _last(done: Sequence[Step], touching: dict[str, list[int]], step: Action) -> int:
    """The position of the last step that touches a region of this one; -1 if none does."""
    last = -1
    for name in step.names:
        live = touching.get(name)
        if live:
            # Steps that are gone are at the end: what replaces one comes after it.
            while live and done[live[-1]] is None:
                live.pop()
            if live and live[-1] > last:
                last = live[-1]
    return last


def _history(done: Sequence[Step], touching: dict[str, list[int]], step: Action) -> Iterator[Step]:
    """The steps that touch a region of this one, latest first."""
    every = merge(*(reversed(touching.get(name, ())) for name in step.names), reverse=True)
    return (done[k] for k, _ in groupby(every) if done[k] is not None)


def _split(step: Step) -> list[Step]:
    """One region an allocation, so that laws see one part at a time."""
    if type(step) in (Allocate, Deallocate):
        return [type(step)((region,)) for region in step.regions]
    return [step]


def _joined(steps: Sequence[Step]) -> list[Step]:
    """Neighbouring allocations, and neighbouring deallocations, as one again."""
    joined: list[Step] = []
    for kind, run in groupby(steps, type):
        if kind in (Allocate, Deallocate):
            joined.append(kind(tuple(region for step in run for region in step.regions)))
        else:
            joined += run
    return joined
