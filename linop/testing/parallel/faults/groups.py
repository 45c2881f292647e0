"""Sums of forward passes over the wrong ranks: over others than those that have the rest of what is
summed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations

import numpy as np

from linop.testing.parallel.faults.context import Context
from linop.testing.parallel.faults.words import at
from linop.testing.parallel.findings import Finding, groups_text
from linop.testing.parallel.recording.records import FORWARD, Call, Collective, Record
from linop.testing.parallel.twins.relations import Groups, Kind


def over_other_ranks(
    context: Context, call: Call, parameters: tuple[str, ...], origin: str
) -> Finding | None:
    """The fault of a result that differs since sums over a dimension, of which each rank has a
    part, are summed over ranks that have another part of the other dimensions.

    Args:
        call: the twin's, the first whose result no rank has.
        parameters: names of those with other gradients than the twin's.
        origin: the result in words.
    """
    for number in call.inputs:
        parts = _parts(context, number)
        if context.twin.tensors[number].parameter or len(parts) != len(context.ranks):
            continue
        for moved, ran in _sums(context, call.module):
            wanted = [_wanted(parts, shape, ran) for shape in moved.sent]
            if len(set(wanted)) == 1 and (groups := wanted[0]):
                over, right = (groups_text(each, context.names) for each in (ran, groups))
                return Finding(
                    Kind.WRONG_RANKS,
                    f"over {over}, instead of {right}",
                    parameters,
                    at(moved, call.module),
                    f"all-reduce over {right}",
                    f"Each rank sums over its part of a dimension, and {right} have "
                    f"the other parts; the all-reduce runs over {over}, which have other elements "
                    f"of the other dimensions.",
                    origin,
                )
    return None


def _parts(context: Context, number: int) -> dict[int, tuple[tuple[int, ...], ...]]:
    """By rank, the indices along each dimension of a tensor of the twin's that the rank has, if
    that is a block that is cut somewhere."""
    value = context.twin.tensors[number].value
    found: dict[int, tuple[tuple[int, ...], ...]] = {}
    for one in context.locations.all:
        if one.twin != number or value is None:
            continue
        for rank, chosen in one.selections.items():
            if chosen.ndim != value.ndim:
                continue
            along = np.unravel_index(chosen, value.shape)
            found.setdefault(rank, tuple(tuple(np.unique(each).tolist()) for each in along))
    return found


def _sums(context: Context, module: str) -> Iterator[tuple[Collective, Groups]]:
    """Sums of a module's forward pass that all ranks take part in, and the groups that they are
    over."""
    lines = {c.line for r in context.ranks.values() for c in r.calls
             if c.module == module and c.phase == FORWARD}  # fmt: skip
    seen: dict[str, dict[int, list[Collective]]] = {}
    for rank, record in context.ranks.items():
        for one in record.collectives:
            if one.name == "all_reduce" and one.reduction == "sum" and one.phase == FORWARD:
                line, text = _called_at(record, one)
                if line in lines and one.backward_of < 0:
                    placed = replace(one, line=line, text=text)
                    seen.setdefault(line, {}).setdefault(rank, []).append(placed)
    for each in seen.values():
        if len(each) == len(context.ranks):
            for together in zip(*each.values(), strict=False):
                groups = tuple(sorted({tuple(sorted(c.ranks)) for c in together}))
                if sorted(r for group in groups for r in group) == sorted(context.ranks):
                    yield together[0], groups


def _called_at(record: Record, moved: Collective) -> tuple[str, str]:
    """The line of a collective, or of the function that it is in, and its text."""
    found: Collective | Call = moved
    while found.inside >= 0:
        found = record.calls[found.inside]
    return found.line, found.text


def _wanted(
    parts: Mapping[int, tuple[tuple[int, ...], ...]], shape: tuple[int, ...], ran: Groups
) -> Groups:
    """The groups over which a sum of this shape has to run, if it does not run over these; nothing
    if it does, or if that is ambiguous."""
    first = next(iter(parts.values()))
    whole = tuple(len(each) for each in first)
    found: set[Groups] = set()
    for count in range(1, len(whole) + 1):
        for summed in combinations(range(len(whole)), count):
            kept = [d for d in range(len(whole)) if d not in summed]
            ones = tuple(1 if d in summed else n for d, n in enumerate(whole))
            if shape not in (ones, tuple(whole[d] for d in kept)):
                continue
            alike: dict[tuple[tuple[int, ...], ...], list[int]] = {}
            for rank, each in parts.items():
                alike.setdefault(tuple(each[d] for d in kept), []).append(rank)
            found.add(tuple(sorted(tuple(sorted(group)) for group in alike.values())))
    if len(found) != 1 or ran in found:
        return ()
    (groups,) = found
    return groups if any(len(group) > 1 for group in groups) else ()
