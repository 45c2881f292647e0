"""Algebraic laws of the memory primitives (paper, section 2), and the rewrite that applies them.

A product is a list of factors, the first applied first. A factor is an `Action` on a region or a
pair of subsets, or an opaque object, which no law moves an action across. Actions on different
regions commute, so a law for two neighbours also holds for an action and the last one before it
that shares a region with it. A law is one row of `LAWS`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from heapq import merge
from itertools import groupby
from typing import Any

from linop.normal_form.primitives import Action, Add, Allocate, Clear, Deallocate
from linop.spaces.region import Part, Subset, as_subset

Factor = Any
"""An `Action`, or an opaque object (a barrier)."""


def _clear_clear(after: Clear, before: Clear) -> list[Action] | None:
    """K_b K_c = K_b and K_c K_b = K_b if b contains c."""
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
    """D_b K_b = D_b, D_b S_{a→b} = D_b and K_b S_{a→b} = K_b: a dead write is dropped."""
    return [after] if _holds(after.parts[0], before.parts[-1]) else None


def _of_zero(after: Action, before: Action) -> list[Action] | None:
    """K_b A_b = A_b, S_{b→a} A_b = A_b and S_{b→a} K_b = K_b: clearing or adding zeros is
    dropped."""
    return [before] if _holds(before.parts[0], after.parts[0]) else None


def _holds(whole: Part, part: Part) -> bool:
    """True if `whole` contains every element of `part`."""
    if whole is part:
        return True
    if type(whole) is Subset:
        return whole.contains(part if type(part) is Subset else as_subset(part))
    # A whole region: mostly the same object.
    region = part.region if type(part) is Subset else part
    return region is whole or as_subset(whole).contains(as_subset(part))


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
"""By the classes of the later and the earlier of two actions, the law for their product: it returns
the shorter product, or None if it does not apply."""

_ACTIONS = frozenset({Add, Allocate, Clear, Deallocate})
"""The four classes of actions: asking for theirs, an abstract one, takes three times as long."""


def _copied_back(after: Add, history: Iterator[Factor]) -> bool:
    """True if the law S_{b→a} K_a S_{a→b} Z_b = S_{a→b} Z_b applies, where Z_b allocates or clears
    b: a copy from a to b and back to a.

    Args:
        after: the action S_{b→a}.
        history: the factors before it that share a region with it, latest first, K_a included.
    """
    _, copied, zeroed = (next(history, None) for _ in range(3))
    return (
        copied == after.adjoint
        and isinstance(zeroed, Allocate | Clear)
        and _holds(zeroed.parts[0], after.source)
    )


def reduced_by_laws(factors: Sequence[Factor]) -> list[Factor]:
    """An equal product, after all laws, applied until none shortens it. If none applies, a copy of
    `factors`."""
    current = list(_split(factors))
    exposed = True
    while exposed:
        current, exposed = _reduce_once(current)
    joined = _joined(current)
    # Allocations of several regions were split; if other factors are between them, they stay split.
    return joined if len(joined) < len(factors) else list(factors)


def _reduce_once(factors: Sequence[Factor]) -> tuple[list[Factor], bool]:
    """One sweep: each factor against the last one before it that shares a region with it.

    Returns:
        The product, and True if a factor was removed between two others to which a law may now
        apply, so that another sweep is needed.
    """
    done: list[Factor | None] = []
    touching: defaultdict[str, list[int]] = defaultdict(list)
    exposed = False
    for factor in factors:
        if type(factor) not in _ACTIONS:
            touching.clear()  # no law applies across a barrier
            done.append(factor)
            continue
        reduced: Action | None = factor
        while reduced is not None:
            shared = [touching[name] for name in reduced.names]
            last = _last(done, shared)
            before: Any = done[last] if last >= 0 else None
            if type(reduced) is Add and type(before) is Clear and before.part == reduced.target:
                if _copied_back(reduced, _history(done, shared)):
                    done[last] = None
                    break
            law = LAWS.get((type(reduced), type(before)))
            result = None if law is None else law(reduced, before)
            if result is None:
                for live in shared:
                    live.append(len(done))
                done.append(reduced)
                break
            if result and result[0] is before:
                break
            # No later factor shares a region with the result, so it commutes to the end, and is
            # reduced against the factors before the action that it replaces.
            done[last] = None
            exposed = exposed or any(touching[name][-1] > last for name in before.names)
            reduced = result[0] if result else None
    return [factor for factor in done if factor is not None], exposed


def _last(done: Sequence[Factor], shared: Sequence[list[int]]) -> int:
    """The largest index of a factor in `done` that is in one of the lists; -1 if there is none."""
    last = -1
    for live in shared:
        # Removed factors are at the end: the replacement of one is appended after it.
        while live and done[live[-1]] is None:
            live.pop()
        if live and live[-1] > last:
            last = live[-1]
    return last


def _history(done: Sequence[Factor], shared: Sequence[list[int]]) -> Iterator[Factor]:
    """The factors in `done` that are in one of these lists, latest first."""
    every = merge(*map(reversed, shared), reverse=True)
    return (done[k] for k, _ in groupby(every) if done[k] is not None)


def _split(factors: Sequence[Factor]) -> Iterator[Factor]:
    """Allocations and deallocations as one per region, since laws compare single regions."""
    for factor in factors:
        kind = type(factor)
        if kind is Allocate or kind is Deallocate:
            yield from (kind((region,)) for region in factor.regions)
        else:
            yield factor


def _joined(factors: Sequence[Factor]) -> list[Factor]:
    """Runs of consecutive allocations, or of deallocations, merged into one action each."""
    joined: list[Factor] = []
    for kind, group in groupby(factors, type):
        if kind in (Allocate, Deallocate):
            joined.append(kind(tuple(region for factor in group for region in factor.regions)))
        else:
            joined += group
    return joined
