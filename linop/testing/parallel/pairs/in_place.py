"""Collectives in place outside of every function with a backward of its own: autograd does not see
them, and passes the gradient on unchanged. So each is a pair, of the collective and the identity,
which is right between some spaces and wrong between others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from linop.testing.parallel.recording.records import (
    FORWARD,
    Call,
    Collective,
    Lifted,
    Moved,
    Record,
)
from linop.testing.parallel.twins.locations import Locations


class Outside(NamedTuple):
    """A collective outside of functions on all of its ranks, as a function would be: by rank its
    call, and what its forward and its backward do to elements."""

    calls: dict[int, Call]
    there: dict[int, Lifted]
    back: dict[int, Lifted]


def in_place(locations: Locations) -> Iterator[Outside]:
    """Sums of a program's forward pass whose tensors have gradients, and are known by their values
    before and after."""
    keyed: dict[tuple[Any, ...], dict[int, Collective]] = {}
    for record in locations.ranks.values():
        seen: Counter[tuple[str, str]] = Counter()
        for one in record.collectives:
            if one.name != "all_reduce" or one.reduction != "sum" or one.phase != FORWARD:
                continue
            if one.inside < 0 and one.backward_of < 0 and one.line and one.value is not None:
                seen[one.name, one.line] += 1
                keyed.setdefault((one.name, one.line, seen[one.name, one.line]), {})[
                    record.rank
                ] = one
    for parts in keyed.values():
        if all(set(one.ranks) <= set(parts) for one in parts.values()):
            found = {rank: _read(locations, rank, parts) for rank in sorted(parts)}
            known = {rank: one for rank, one in found.items() if one is not None}
            if len(known) == len(found):
                sides = (dict(zip(known, each, strict=True)) for each in zip(*known.values(),
                         strict=True))  # fmt: skip
                yield Outside(*sides)


def _read(
    locations: Locations, rank: int, parts: dict[int, Collective]
) -> tuple[Call, Lifted, Lifted] | None:
    """A collective on one rank; None if its tensor is not found, or has no gradient."""
    about, record = parts[rank], locations.ranks[rank]
    values = [parts[other].value for other in about.ranks]
    if about.value is None or any(one is None or one.size != about.value.size for one in values):
        return None
    before = with_value(record, about.value, 0.0, 0)
    total = np.sum(np.array(values), axis=0)
    # All of these values: where some have no gradient, one of them may be what is reduced.
    if not before or not all(record.tensors[k].differentiable for k in before):
        return None
    after = with_value(record, total, locations.values.least, before[-1] + 1)
    if not after or not record.tensors[after[0]].differentiable:
        return None
    n = about.value.size
    numbers, fresh = np.arange(1, n + 1), np.arange(n + 1, 2 * n + 1)
    call = Call(-1, about.name, "", "", about.line, about.text, [before[-1]], [after[0]])
    there = Lifted(-1, False, [numbers], [fresh], [Moved(about.number, [numbers], [fresh])])
    return call, there, Lifted(-1, True, [numbers], [numbers])


def with_value(record: Record, value: np.ndarray, least: float, first: int) -> list[int]:
    """The tensors of a value, up to an error, from a number on."""
    return [
        one.number
        for one in record.tensors[first:]
        if one.value is not None
        and one.value.size == value.size
        and one.value.dtype.kind in "fc"
        and bool((np.abs(one.value.ravel() - value) <= least).all())
    ]
