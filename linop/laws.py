"""The laws of the memory primitives, and one pass that applies them.

A program is a list of actions, first applied first, each on one region or pair of subsets; anything
else in it is opaque and touches everything. Actions that touch different regions commute, so a law
for neighbours holds for an action and the last one before it that touches any of its regions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from linop.primitives import Action, Add, Allocate, Clear, Deallocate
from linop.region import Subset, as_subset

Step = Any
"""An `Action`, or an opaque object (a barrier)."""


def _clear_clear(after: Action, before: Action) -> list[Action] | None:
    """K_b K_c = K_b where c is part of b, and the other way round."""
    if isinstance(after, Clear) and isinstance(before, Clear):
        if after.part.contains(before.part):
            return [after]
        if before.part.contains(after.part):
            return [before]
    return None


def _deallocate_allocate(after: Action, before: Action) -> list[Action] | None:
    """D_b A_b = I."""
    both = isinstance(after, Deallocate) and isinstance(before, Allocate)
    return [] if both and after.parts == before.parts else None


def _allocate_deallocate(after: Action, before: Action) -> list[Action] | None:
    """A_b D_b = K_b."""
    both = isinstance(after, Allocate) and isinstance(before, Deallocate)
    return [Clear(as_subset(after.parts[0]))] if both and after.parts == before.parts else None


def _lost(after: Action, before: Action) -> list[Action] | None:
    """D_b K_b = D_b, D_b S_{a→b} = D_b and K_b S_{a→b} = K_b: what was written is not kept."""
    written = _target(before)
    erased = _erased(after)
    return [after] if written and erased and erased.contains(written) else None


def _of_zero(after: Action, before: Action) -> list[Action] | None:
    """K_b A_b = A_b, S_{b→a} A_b = A_b and S_{b→a} K_b = K_b: what is read is zero."""
    zeroed = as_subset(before.parts[0]) if isinstance(before, Allocate | Clear) else None
    read = after.parts[0] if isinstance(after, Add | Clear) else None
    return [before] if zeroed and read and zeroed.contains(as_subset(read)) else None


LAWS: tuple[Callable[[Action, Action], list[Action] | None], ...] = (
    _clear_clear,
    _deallocate_allocate,
    _allocate_deallocate,
    _lost,
    _of_zero,
)


def _copied_back(after: Action, history: Sequence[Step]) -> bool:
    """S_{b→a} K_a S_{a→b} Z_b = S_{a→b} Z_b where Z_b allocates or clears b: a copy that
    returns."""
    if not isinstance(after, Add) or len(history) < 3:
        return False
    cleared, copied, zeroed = history[:3]
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
            if _copied_back(reduced, [done[k] for k in history]):
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
    if not isinstance(before, Action):
        return None
    results = (law(after, before) for law in LAWS)
    return next((r for r in results if r is not None), None)


def _history(done: Sequence[Step], touching: dict[str, list[int]], step: Action) -> list[int]:
    """Positions of the last three steps that touch a region of this one, latest first."""
    found: set[int] = set()
    for name in _names(step):
        live = (k for k in reversed(touching.get(name, ())) if done[k] is not None)
        found.update(islice(live, 3))
    return sorted(found, reverse=True)[:3]


def _names(action: Action) -> set[str]:
    return {as_subset(part).region.name for part in action.parts}


def _target(action: Action) -> Subset | None:
    return as_subset(action.parts[-1]) if isinstance(action, Add | Clear) else None


def _erased(action: Action) -> Subset | None:
    return as_subset(action.parts[0]) if isinstance(action, Deallocate | Clear) else None


def _split(step: Step) -> list[Step]:
    """One region an allocation, so that laws see one part at a time."""
    if isinstance(step, Allocate | Deallocate):
        return [type(step)((region,)) for region in step.regions]
    return [step]


def _joined(steps: Sequence[Step]) -> list[Step]:
    """Neighbouring allocations, and neighbouring deallocations, as one again."""
    joined: list[Step] = []
    for step in steps:
        last = joined[-1] if joined else None
        if isinstance(step, Allocate | Deallocate) and isinstance(last, type(step)):
            joined[-1] = type(step)((*last.regions, *step.regions))
        else:
            joined.append(step)
    return joined
