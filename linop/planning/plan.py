"""Plans and their steps: the program of one worker as an ordered list of typed, frozen data.

`linop.planning.lowering` builds the plans of an operator, `linop.verify_plans` proves without
running them that those of all workers compute it, and a backend runs one. Only step types, and
queries on a plan, belong here.

Arrays have two generations: the steps of a stage read current regions, and write new ones;
`Advance` makes the new ones current in place of those that the stage took, by default of all. So an
array never changes after its stage, an unchanged region is passed on without a copy, and regions
that a stage does not take cost it nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from linop.caching import cached_property
from linop.normal_form.maps import Call
from linop.planning.patterns import Pattern
from linop.spaces.exact import exact, shown
from linop.spaces.region import Region, Subset, memory_mark
from linop.spaces.scalars import Scalar

GROUP = -1
"""Peer number that denotes the other members of a collective's group."""


@dataclass(frozen=True)
class Receive:
    """Post the receive of a message of `size` elements; at most one per stage and peer."""

    stage: int
    peer: int
    size: int

    def __str__(self) -> str:
        return f"receive {self.size} elements from {self.peer}"


@dataclass(frozen=True)
class Send:
    """Pack subsets of current regions, in order, into one message to a peer; non-blocking."""

    stage: int
    peer: int
    parts: tuple[Subset, ...]

    @cached_property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    def __str__(self) -> str:
        return f"send {self.size} elements to {self.peer}: {', '.join(map(str, self.parts))}"


@dataclass(frozen=True)
class Collective(Send):
    """Begin a collective to which this worker contributes `parts`; non-blocking. The group is the
    peer `GROUP`; a worker that receives a result has a `Receive` from it."""

    pattern: Pattern
    sent: tuple[int, ...] = ()
    """Elements sent to each member, in group order; empty except for an all-to-all."""
    received: tuple[int, ...] = ()
    """Elements received from each member, in group order; empty except for an all-to-all."""

    def __str__(self) -> str:
        return f"begin the {self.pattern}: {', '.join(map(str, self.parts)) or 'nothing'}"


@dataclass(frozen=True)
class Make:
    """Allocate the array of a new region: of zeros, or uninitialised if puts set every element."""

    region: Region
    zeroed: bool
    within: Subset | None = None
    """Subset of a region of the next stage whose memory the array shares; None: memory of its
    own."""
    inside: bool = False
    """True if it takes the memory of the argument of its name, which nothing else reads
    (`LoweredPlan.scratch`); the put that copies this is `Put.stored`."""

    def __str__(self) -> str:
        where = "" if self.within is None else f" within {self.within}"
        where += " inside of the argument" if self.inside else ""
        return f"make {_shaped(self.region)}{' of zeros' if self.zeroed else ''}{where}"


@dataclass(frozen=True)
class Alias:
    """Make a new region share the array of a current one: unchanged, same memory, no copy."""

    source: Region
    target: Region

    def __str__(self) -> str:
        return f"keep {self.source}" + (
            f" as {self.target}" if self.source.name != self.target.name else ""
        )


@dataclass(frozen=True)
class Message:
    """Source of a put in a received message: the elements from `offset`, in the target's shape."""

    peer: int
    offset: int

    def __str__(self) -> str:
        return f"message from {self.peer} at {self.offset}"


@dataclass(frozen=True)
class Put:
    """Set a subset of a new region to ``coefficient * source``, or add that to it (`accumulate`).
    The source is a subset of a current region, in any of the worker's memories, or a message."""

    target: Subset
    source: Subset | Message
    coefficient: Scalar
    """1, or a number of the plan's dtype."""
    accumulate: bool
    stored: bool = False
    """True if nothing has to be done, since the source was made within the target, or the target
    inside of the source (`Make`)."""

    @property
    def is_copy(self) -> bool:
        """True if this sets the subset, unscaled, without a copy from another kind of memory."""
        return not self.accumulate and self._is_plain

    @property
    def is_addition(self) -> bool:
        """True if this accumulates, unscaled, without a copy from another kind of memory."""
        return self.accumulate and self._is_plain

    @property
    def _is_plain(self) -> bool:
        return self.coefficient == 1 and not self.crosses

    @property
    def crosses(self) -> bool:
        """True if this copies from one kind of the worker's memory to another. False for a source
        in a message, whichever memory the backend receives it in."""
        return isinstance(self.source, Subset) and self.source.memory != self.target.memory

    @property
    def keeps(self) -> bool:
        """True if this copies a subset onto itself: same region name, box, memory; unscaled."""
        source = self.source
        if not isinstance(source, Subset) or self.coefficient != 1:
            return False
        if self.accumulate or self.crosses:
            return False
        same = source.region.name == self.target.region.name
        return same and source.slices == self.target.slices

    def __str__(self) -> str:
        scale = "" if self.coefficient == 1 else f"{shown(exact(self.coefficient))} · "
        text = f"{self.target} {'+=' if self.accumulate else '='} {scale}{self.source}"
        if self.stored:
            return f"{text}, made there"
        if not isinstance(self.source, Subset) or not self.crosses:
            return text
        return f"{text}, {self.source.memory} to {self.target.memory} memory"


@dataclass(frozen=True)
class Sum:
    """Set a subset of a new region to the sum of two sources in one pass over memory: in place of a
    put that sets it, `first`, and one that accumulates into it, `second`."""

    first: Put
    second: Put

    def __str__(self) -> str:
        return f"{self.first} + {self.second.source}"


@dataclass(frozen=True)
class Wait:
    """Wait until all messages of the stage have arrived."""

    stage: int

    def __str__(self) -> str:
        return "wait for messages"


@dataclass(frozen=True)
class Apply:
    """Apply a local map to current regions; its results are new regions."""

    call: Call
    outputs: tuple[Region, ...]
    inside: bool = False
    """True if the result overwrites the argument's array."""

    def __str__(self) -> str:
        call, where = self.call, ", inside its argument" if self.inside else ""
        return f"{', '.join(call.outputs)} = {call.map.symbol}({', '.join(call.inputs)}){where}"


@dataclass(frozen=True)
class Advance:
    """End the stage: its new regions become current, in place of those that it took.

    Attributes:
        taken: names of the current regions that the stage takes, and may read; None: all. The
            others stay current.
    """

    stage: int
    taken: tuple[str, ...] | None = None

    def __str__(self) -> str:
        return "next stage"


Step = Receive | Send | Make | Alias | Put | Sum | Wait | Apply | Advance


def puts_of(steps: Iterable[Step]) -> list[Put]:
    """The puts among some steps, those of sums included, in order."""
    found: list[Put] = []
    for step in steps:
        found += [step] if isinstance(step, Put) else []
        found += [step.first, step.second] if isinstance(step, Sum) else []
    return found


@dataclass(frozen=True)
class LoweredPlan:
    """The steps of one worker, with the regions of its arguments and of its results."""

    worker: int
    dtype: np.dtype
    inputs: tuple[Region, ...]
    outputs: tuple[Region, ...]
    steps: tuple[Step, ...]
    patterns: tuple[Pattern, ...] = ()
    """Patterns of the movement stages, in order: of movement k in stage 2 k."""
    scratch: frozenset[str] = frozenset()
    """Names of arguments that a run may overwrite."""

    def pattern(self, stage: int) -> Pattern | None:
        """The pattern of a movement stage; None for a layer."""
        known = stage % 2 == 0 and stage // 2 < len(self.patterns)
        return self.patterns[stage // 2] if known else None

    @property
    def stages(self) -> list[Sequence[Step]]:
        """The steps of each stage, the `Advance` at its end included."""
        ends = [k for k, step in enumerate(self.steps, 1) if isinstance(step, Advance)]
        return [self.steps[a:b] for a, b in pairwise([0, *ends])]

    @property
    def sends(self) -> list[Send]:
        return [step for step in self.steps if isinstance(step, Send)]

    @property
    def receives(self) -> list[Receive]:
        return [step for step in self.steps if isinstance(step, Receive)]

    @property
    def bytes_sent(self) -> int:
        return sum(step.size for step in self.sends) * self.dtype.itemsize

    @property
    def bytes_received(self) -> int:
        return sum(step.size for step in self.receives) * self.dtype.itemsize

    @cached_property
    def in_place(self) -> bool:
        """True if results may share memory with the arguments of the same name: unchanged elements
        keep their position, and no element is read where another is written.

        1. There is one stage, of movements. 2. No region that is written to is kept under another
        name, too. 3. Each result that has an argument's name has its shape and memory, is neither
        cleared nor added to, and what is written to it is not read.
        """
        # 1
        steps = self.steps
        if any(isinstance(step, Apply) for step in steps):
            return False
        if sum(isinstance(step, Advance) for step in steps) != 1:
            return False
        # 2. A region aliased under another name is read last, when its memory may be overwritten.
        aliases = [step for step in steps if isinstance(step, Alias)]
        written_to = {r.name for r in self.outputs}
        written_to -= {a.target.name for a in aliases if a.source.name == a.target.name}
        if any(a.source.name != a.target.name and a.source.name in written_to for a in aliases):
            return False
        # 3
        puts = puts_of(steps)
        new = [put for put in puts if not put.keeps]
        read = [p for step in steps if isinstance(step, Send) for p in step.parts]
        read += [put.source for put in new if isinstance(put.source, Subset)]
        zeroed = {step.region.name for step in steps if isinstance(step, Make) and step.zeroed}
        added = {put.target.region.name for put in puts if put.accumulate}
        given = {region.name: (region.shape, region.memory) for region in self.inputs}
        for region in self.outputs:
            if region.name not in given:
                continue
            same = given[region.name] == (region.shape, region.memory)
            if not same or region.name in zeroed | added:
                return False
            written = [put.target for put in new if put.target.region.name == region.name]
            for part in read:
                if part.region.name == region.name and any(map(part.meets, written)):
                    return False
        return True

    def describe(self) -> str:
        """Printable text of the plan: arguments, results, messages and bytes, then one step per
        line. Stages that are collectives start with a line for their pattern."""
        lines = [
            f"worker {self.worker}: {_names(self.inputs)} -> {_names(self.outputs)}; "
            f"{len(self.sends)} messages sent, {self.bytes_sent} bytes; "
            f"{len(self.receives)} received, {self.bytes_received} bytes"
        ]
        begins, stage = True, 0
        for step in self.steps:
            found = self.pattern(stage) if begins else None
            if found is not None and found.kind.collective:
                lines.append(f"  {found}:")
            lines.append(f"  {step}{self._bytes(step)}")
            begins = isinstance(step, Advance)
            stage = step.stage + 1 if isinstance(step, Advance) else stage
        return "\n".join(lines)

    def _bytes(self, step: Step) -> str:
        """Suffix of a step with the bytes that it moves or allocates; may be empty."""
        match step:
            case Send() | Receive():
                size = step.size
            case Put():
                size = step.target.size
            case Sum():
                size = step.first.target.size
            case Make():
                size = step.region.size
            case _:
                return ""
        return f"  ({size * self.dtype.itemsize} bytes)"


def _names(regions: tuple[Region, ...]) -> str:
    return ", ".join(map(_shaped, regions)) or "nothing"


def _shaped(region: Region) -> str:
    return f"{region.name}{list(region.shape)}{memory_mark(region)}"
