"""The laws of the memory primitives, and one pass that applies them.

A program is a list of actions, first applied first, each on one region or pair of subsets; anything
else in it is opaque and touches everything. Actions that touch different regions commute, so a law
for neighbours holds for an action and the last one before it that touches any of its regions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby, islice
from typing import Any

from linop.primitives import Action, Add, Allocate, Clear, Deallocate
from linop.region import Subset, as_subset

Step = Any
"""An `Action`, or an opaque object (a barrier)."""


def _clear_clear(after: Clear, before: Clear) -> list[Action] | None:
    """K_b K_c = K_b where c is part of b, and the other way round."""
    if after.part.contains(before.part):
        return [after]
    return [before] if before.part.contains(after.part) else None


def _deallocate_allocate(after: Deallocate, before: Allocate) -> list[Action] | None:
    """D_b A_b = I."""
    return [] if after.parts == before.parts else None


def _allocate_deallocate(after: Allocate, before: Deallocate) -> list[Action] | None:
    """A_b D_b = K_b."""
    return [Clear(as_subset(after.parts[0]))] if after.parts == before.parts else None


def _lost(after: Action, before: Action) -> list[Action] | None:
    """D_b K_b = D_b, D_b S_{a→b} = D_b and K_b S_{a→b} = K_b: what was written is not kept."""
    return [after] if as_subset(after.parts[0]).contains(as_subset(before.parts[-1])) else None


def _of_zero(after: Action, before: Action) -> list[Action] | None:
    """K_b A_b = A_b, S_{b→a} A_b = A_b and S_{b→a} K_b = K_b: what is read is zero."""
    return [before] if as_subset(before.parts[0]).contains(as_subset(after.parts[0])) else None


Law = Callable[[Any, Any], list[Action] | None]

LAWS: dict[tuple[type[Action], type[Action]], Law] = {
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


def _copied_back(after: Action, history: Sequence[Step]) -> bool:
    """S_{b→a} K_a S_{a→b} Z_b = S_{a→b} Z_b where Z_b allocates or clears b: a copy that
    returns."""
    if type(after) is not Add:
        return False
    cleared, copied, zeroed = history
    return (
        cleared == Clear(after.target)
        and copied == after.adjoint
        and isinstance(zeroed, Allocate | Clear)
        and as_subset(zeroed.parts[0]).contains(after.source)
    )


def reduce_program(steps: Sequence[Step]) -> list[Step]:
    """The program after all laws; as short as these laws make it, and equal as an operator."""
    current = [piece for step in steps for piece in _split(step)]
    while len(shorter := _reduce_once(current)) < len(current):
        current = shorter
    joined = _joined(shorter)
    # Allocations of several regions were split, and what stands between them may keep them apart.
    return joined if len(joined) < len(steps) else list(steps)


def _reduce_once(steps: Sequence[Step]) -> list[Step]:
    done: list[Step | None] = []
    touching: dict[str, list[int]] = {}
    for step in steps:
        if not isinstance(step, Action):
            touching.clear()  # nothing looks past a barrier
            done.append(step)
            continue
        reduced: Action | None = step
        while reduced is not None:
            history = _history(done, touching, reduced)
            if len(history) == 3 and _copied_back(reduced, [done[k] for k in history]):
                done[history[0]] = None
                break
            result = _apply(reduced, done[history[0]]) if history else None
            if result is None:
                for name in _names(reduced):
                    touching.setdefault(name, []).append(len(done))
                done.append(reduced)
                break
            if result == [done[history[0]]]:
                break
            # Nothing after it touches what the result touches: it can move to the end, and meet
            # what stood before the action it replaces.
            done[history[0]] = None
            reduced = result[0] if result else None
    return [step for step in done if step is not None]


def _apply(after: Action, before: Step) -> list[Action] | None:
    law = LAWS.get((type(after), type(before)))
    return None if law is None else law(after, before)


def _history(done: Sequence[Step], touching: dict[str, list[int]], step: Action) -> list[int]:
    """Positions of the last three steps that touch a region of this one, latest first."""
    found: list[int] = []
    for name in _names(step):
        live = touching.get(name)
        if live:
            # Steps that are gone are at the end: what replaces one comes after it.
            while live and done[live[-1]] is None:
                live.pop()
            found += islice((k for k in reversed(live) if done[k] is not None), 3)
    return sorted(set(found), reverse=True)[:3] if len(found) > 1 else found


def _names(action: Action) -> set[str]:
    return {(part.region if isinstance(part, Subset) else part).name for part in action.parts}


def _split(step: Step) -> list[Step]:
    """One region an allocation, so that laws see one part at a time."""
    if isinstance(step, Allocate | Deallocate):
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
