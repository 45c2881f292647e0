"""Selection of collectives, and the rewriting of plans that use them; no MPI calls.

A stage recognised as a collective (`linop.planning.patterns`) can run as one call of a
message-passing library instead of point-to-point messages. `collected` rewrites a plan for that:
the other members of the group become one peer, `GROUP`, to which a worker sends its contribution
and from which it receives its result. The choice depends only on data that all workers share, so
all members of a group make the same choice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import ceil, log2
from typing import Any

import numpy as np

from linop.planning import network
from linop.planning.network import Network
from linop.planning.patterns import Kind, Pattern
from linop.planning.plan import (
    GROUP,
    Advance,
    Collective,
    LoweredPlan,
    Message,
    Put,
    Receive,
    Send,
    Step,
    Wait,
)
from linop.spaces.region import Subset, as_subset

LEAST = 4
"""Smallest group for which a collective is considered faster than point-to-point messages."""
LARGE = 2**31 - 1
"""Largest count of an MPI 3 call, in bytes; larger messages need a derived datatype."""
SUMMED = "ilqILQfdFD"
"""Character codes of the dtypes whose MPI sums equal NumPy's. Open MPI's 8-bit and 16-bit sums
saturate instead of wrapping around."""


@dataclass(frozen=True)
class Choice:
    """A user's settings for collectives; must be the same on all workers."""

    use: bool | None = None
    """True or False: use them always or never; None: where they are predicted to be faster."""
    any_order: bool = False
    """True if sums may be formed in any order, so that results may differ in the last bits."""

    def of(self, found: Pattern, dtype: np.dtype[Any]) -> tuple[bool, str]:
        """(True if a stage runs as a collective, the reason in words)."""
        if self.use is False:
            return False, "switched off"
        if not found.aligned:
            return False, "its messages have their parts in different orders"
        if max(found.counts, default=0) * len(found.group) * dtype.itemsize > LARGE:
            return False, f"MPI counts up to {LARGE} bytes"
        if found.kind.sums:
            if found.coefficient != 1:
                return False, "what it adds is scaled"
            if dtype.char not in SUMMED or not dtype.isnative:
                return False, f"MPI does not add {dtype}"
            if not (dtype.kind in "iu" or len(found.group) == 2 or self.any_order):
                return False, "sums have a fixed order"
        if self.use:
            return True, "asked for"
        if len(found.group) < LEAST:
            return False, f"fewer than {LEAST} workers"
        in_messages, in_one_call = seconds(found, dtype.itemsize, network.ASSUMED)
        said = (
            f"predicted {in_one_call * 1e6:.3g} µs together, {in_messages * 1e6:.3g} µs in messages"
        )
        return in_one_call < in_messages, said


def seconds(found: Pattern, itemsize: int, links: Network) -> tuple[float, float]:
    """Predicted times, in seconds, of a collective: (as point-to-point messages between all pairs,
    as one library call). The library is assumed to use trees, or a scatter and a gather for large
    messages; the two times of an all-to-all are equal.

    Source: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
    MPICH" (2005), table of costs.

    Args:
        itemsize: bytes per element.
    """
    P = len(found.group)
    others, rounds = P - 1, ceil(log2(P))
    latency = links.latency
    per_byte = links.per_byte + (links.per_byte_added if found.kind.sums else 0)
    n = max(found.counts) * itemsize
    total = sum(found.counts) * itemsize if len(found.counts) > 1 else P * n
    in_messages = others * (latency + per_byte * n)
    match found.kind:
        case Kind.BROADCAST | Kind.REDUCE | Kind.ALL_REDUCE:
            steps = rounds + (others if found.kind is Kind.BROADCAST else rounds)
            large = steps * latency + (per_byte + links.per_byte) * n * others / P
            return in_messages, min(rounds * (latency + per_byte * n), large)
        case Kind.ALL_GATHER | Kind.REDUCE_SCATTER:
            return in_messages, rounds * latency + per_byte * total * others / P
        case _:
            pairs = others * latency + per_byte * n
            return pairs, pairs


def chosen(plan: LoweredPlan, choice: Choice) -> dict[int, tuple[Pattern, bool, str]]:
    """The collectives of a plan by stage: (pattern, True if run as one call, reason)."""
    found = {2 * k: one for k, one in enumerate(plan.patterns) if one.kind.collective}
    return {stage: (one, *choice.of(one, plan.dtype)) for stage, one in found.items()}


def collected(plan: LoweredPlan, stages: Mapping[int, Pattern]) -> LoweredPlan:
    """The plan with the given stages, by number, rewritten as collectives."""
    steps: list[Step] = []
    stage: list[Step] = []
    for step in plan.steps:
        stage.append(step)
        if isinstance(step, Advance):
            found = stages.get(step.stage)
            steps += stage if found is None else _CollectiveStage(plan, found, stage).steps()
            stage = []
    return replace(plan, steps=tuple(steps))


def selected(plan: LoweredPlan, choice: Choice) -> dict[int, Pattern]:
    """The collectives of a plan, by stage, that `choice` selects."""
    return {stage: found for stage, (found, use, _) in chosen(plan, choice).items() if use}


class _CollectiveStage:
    """Rewriter of the steps of one stage of one worker's plan into a collective."""

    def __init__(self, plan: LoweredPlan, found: Pattern, steps: Sequence[Step]) -> None:
        self.worker = plan.worker
        self.in_place = plan.in_place
        self.found = found
        self.sends = {s.peer: s.parts for s in steps if isinstance(s, Send)}
        self.receives = {s.peer: s.size for s in steps if isinstance(s, Receive)}
        self.puts = [s for s in steps if isinstance(s, Put)]
        kinds = Send | Receive | Put | Wait | Advance
        self.others = [s for s in steps if not isinstance(s, kinds)]
        (self.end,) = (s for s in steps if isinstance(s, Advance))

    def steps(self) -> Iterator[Step]:
        """The new steps: one collective, at most one receive and wait, puts, one advance."""
        stage = self.end.stage
        size, puts = self.gets()
        if size:
            yield Receive(stage, GROUP, size)
        yield Collective(stage, GROUP, self.gives(), self.found, *self.sizes())
        yield from self.others
        yield from (p for p in puts if isinstance(p.source, Subset))
        if size:
            yield Wait(stage)
            yield from (p for p in puts if isinstance(p.source, Message))
        yield self.end

    def sizes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Elements sent to and received from each member, in group order; all-to-all only."""
        if self.found.kind is not Kind.ALL_TO_ALL:
            return (), ()
        sent = {peer: sum(part.size for part in parts) for peer, parts in self.sends.items()}
        group = self.found.group
        return tuple(sent.get(w, 0) for w in group), tuple(self.receives.get(w, 0) for w in group)

    def gives(self) -> tuple[Subset, ...]:
        """The subsets that the worker contributes; in group order if they differ by receiver."""
        if self.found.kind is Kind.REDUCE and self.worker == self.found.root:
            return self.own
        if self.found.kind is Kind.REDUCE_SCATTER:
            mine = {**self.sends, self.worker: self.own}
            return tuple(part for w in self.found.group for part in mine.get(w, ()))
        if self.found.kind is Kind.ALL_TO_ALL:
            return tuple(part for w in self.found.group for part in self.sends.get(w, ()))
        return next(iter(self.sends.values()), ())

    @property
    def first(self) -> list[Put]:
        """The puts that read the message of the first peer, in order of offset."""
        peer = next(iter(self.receives), None)
        read = [p for p in self.puts if isinstance(p.source, Message) and p.source.peer == peer]
        return sorted(read, key=lambda put: put.source.offset)  # type: ignore[union-attr]

    @property
    def own(self) -> tuple[Subset, ...]:
        """The worker's own terms of the sums, in the order of `first`."""
        local = {p.target: p.source for p in self.puts if isinstance(p.source, Subset)}
        return tuple(s for p in self.first if (s := local.get(p.target)) is not None)

    def gets(self) -> tuple[int, list[Put]]:
        """(elements received from the group, all puts of the stage with sources renumbered)."""
        if self.found.kind.sums:
            first = self.first
            targets = {put.target for put in first}
            rest = [put for put in self.puts if put.target not in targets]
            sums = [replace(p, source=_at(p, 0), accumulate=False, coefficient=1) for p in first]
            return sum(put.target.size for put in first), [*rest, *sums]
        if self.found.kind is Kind.ALL_GATHER:
            sizes = {w: self.found.count(w) for w in self.found.group}
        else:
            sizes = self.receives
        starts = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))
        puts = []
        for put in self.puts:
            if isinstance(put.source, Message):
                put = replace(put, source=_at(put, starts[put.source.peer]))
            puts.append(put)
        size = sum(sizes.values())
        # In place, result and argument may share memory, which MPI does not allow.
        if self.found.kind is Kind.ALL_GATHER and not self.in_place:
            puts = self._joined(puts, starts[self.worker], size)
        return size, puts

    def _joined(self, puts: list[Put], start: int, size: int) -> list[Put]:
        """Merge the puts of an all-gather into one, if the gathered elements are an entire region
        in order: then they can be received directly in it, the worker's own block included."""
        mine: dict[Subset, int] = {}
        for part in self.gives():
            mine[part] = start
            start += part.size
        pieces, rest = [], []
        for put in puts:
            if isinstance(put.source, Message):
                pieces.append((put, put.source.offset))
            elif put.source in mine:
                pieces.append((put, mine[put.source]))
            else:
                rest.append(put)
        region = pieces[0][0].target.region
        whole = region.size == size and all(
            put.target.region == region and put.coefficient == 1 and offset_of(put.target) == offset
            for put, offset in pieces
        )
        if not whole:
            return puts
        return [*rest, Put(as_subset(region), Message(GROUP, 0), 1, accumulate=False)]


def _at(put: Put, start: int) -> Message:
    """The source of a put from a peer's message, as a source in the group's data from `start`."""
    assert isinstance(put.source, Message)
    return Message(GROUP, start + put.source.offset)


def offset_of(box: Subset) -> int | None:
    """Offset, in elements, of a box that is contiguous in its region; None if it is not."""
    shape = box.region.shape
    ones = next((k for k, n in enumerate(box.shape) if n != 1), len(shape))
    if box.shape[ones + 1 :] != shape[ones + 1 :]:
        return None
    return sum(a * math.prod(shape[k + 1 :]) for k, a in enumerate(box.start))
