"""Which stages a group of workers does together, and how their plans then read: no MPI in here.

A stage that is a collective (`linop.planning.patterns`) can be run by one call of a message-passing
library in the place of a message for each pair. `collected` rewrites a plan for that: to a worker,
the rest of its group is then one peer, `GROUP`, to which it sends all that it contributes, and from
which it receives all that it gets. What is chosen depends on facts that all workers share, so all
of a group choose alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np

from linop.planning.network import Network
from linop.planning.patterns import Kind, Pattern, seconds
from linop.planning.plan import (
    GROUP,
    Advance,
    Collective,
    Message,
    Plan,
    Put,
    Receive,
    Send,
    Step,
    Wait,
)
from linop.spaces.region import Subset, as_subset

LEAST = 4
"""Workers of a group from which on a collective can be faster than messages."""
LARGE = 2**31 - 1
"""Bytes that MPI 3 counts one by one; more are one item of a datatype of that size."""
SUMMED = "ilqILQfdFD"
"""Character codes of the dtypes that MPI adds as NumPy does. In Open MPI sums of 8 and 16 bits do
not wrap around: they stay at the largest number."""


@dataclass(frozen=True)
class Choice:
    """A user's settings of collectives; the same on all workers."""

    use: bool | None = None
    """Whether they are used; None where they are predicted to be faster."""
    any_order: bool = False
    """Whether sums may be added up in any order."""

    def of(self, found: Pattern, dtype: np.dtype[Any]) -> tuple[bool, str]:
        """Whether a stage is run together, and why."""
        if self.use is False:
            return False, "switched off"
        if not found.aligned:
            return False, "its messages have their parts in different orders"
        if max(found.counts, default=0) * len(found.group) * dtype.itemsize > LARGE:
            return False, f"MPI counts up to {LARGE} bytes"
        if found.kind.sums:
            if found.coefficient != 1:
                return False, "what it adds is scaled"
            if dtype.char not in SUMMED:
                return False, f"MPI does not add {dtype}"
            if not (dtype.kind in "iu" or len(found.group) == 2 or self.any_order):
                return False, "sums have a fixed order"
        if self.use:
            return True, "asked for"
        if len(found.group) < LEAST:
            return False, f"fewer than {LEAST} workers"
        apart, together = seconds(found, dtype.itemsize, Network())
        said = f"predicted {together * 1e6:.3g} µs together, {apart * 1e6:.3g} µs in messages"
        return together < apart, said


def chosen(plan: Plan, choice: Choice) -> dict[int, tuple[Pattern, bool, str]]:
    """The collectives of a plan by stage: what they are, whether they are run together, and why."""
    found = {2 * k: one for k, one in enumerate(plan.patterns) if one.kind.collective}
    return {stage: (one, *choice.of(one, plan.dtype)) for stage, one in found.items()}


def collected(plan: Plan, stages: Mapping[int, Pattern]) -> Plan:
    """A plan with some stages run together."""
    steps: list[Step] = []
    stage: list[Step] = []
    for step in plan.steps:
        stage.append(step)
        if isinstance(step, Advance):
            found = stages.get(step.stage)
            steps += stage if found is None else _Together(plan, found, stage).steps()
            stage = []
    return replace(plan, steps=tuple(steps))


def with_all(plan: Plan, choice: Choice) -> Plan:
    """A plan with all stages run together that are chosen."""
    used = {stage: found for stage, (found, use, _) in chosen(plan, choice).items() if use}
    return collected(plan, used)


class _Together:
    """The steps of a stage, while they are rewritten."""

    def __init__(self, plan: Plan, found: Pattern, steps: Sequence[Step]) -> None:
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
        """The new ones: one receive at most, one send, one wait."""
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
        """Elements for each member of the group, and from each, where they differ."""
        if self.found.kind is not Kind.ALL_TO_ALL:
            return (), ()
        sent = {peer: sum(part.size for part in parts) for peer, parts in self.sends.items()}
        group = self.found.group
        return tuple(sent.get(w, 0) for w in group), tuple(self.receives.get(w, 0) for w in group)

    def gives(self) -> tuple[Subset, ...]:
        """The parts that the worker contributes, in the order of the group where they differ."""
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
        """The puts of one peer's message, in its order."""
        peer = next(iter(self.receives), None)
        read = [p for p in self.puts if isinstance(p.source, Message) and p.source.peer == peer]
        return sorted(read, key=lambda put: put.source.offset)  # type: ignore[union-attr]

    @property
    def own(self) -> tuple[Subset, ...]:
        """What the worker itself adds to each of the boxes that messages are added to."""
        local = {p.target: p.source for p in self.puts if isinstance(p.source, Subset)}
        return tuple(s for p in self.first if (s := local.get(p.target)) is not None)

    def gets(self) -> tuple[int, list[Put]]:
        """The elements that the worker gets, and its puts, of what it gets and of its own."""
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
        # A call's result may be its argument; MPI's may not.
        if self.found.kind is Kind.ALL_GATHER and not self.in_place:
            puts = self._joined(puts, starts[self.worker], size)
        return size, puts

    def _joined(self, puts: list[Put], start: int, size: int) -> list[Put]:
        """What is gathered, put at one go, where it is a region as it is: then it can be received
        there, the worker's own part included."""
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
            put.target.region == region and put.coefficient == 1 and _starts(put.target) == offset
            for put, offset in pieces
        )
        if not whole:
            return puts
        return [*rest, Put(as_subset(region), Message(GROUP, 0), 1, accumulate=False)]


def _at(put: Put, start: int) -> Message:
    """Where a message's piece is in what comes from the group."""
    assert isinstance(put.source, Message)
    return Message(GROUP, start + put.source.offset)


def _starts(box: Subset) -> int | None:
    """Where a box that is one run of its region's elements starts; None if it is not."""
    shape = box.region.shape
    ones = next((k for k, n in enumerate(box.shape) if n != 1), len(shape))
    if box.shape[ones + 1 :] != shape[ones + 1 :]:
        return None
    return sum(a * math.prod(shape[k + 1 :]) for k, a in enumerate(box.start))
