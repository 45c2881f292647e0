"""What one worker does: an ordered list of typed steps.

A plan is pure data. `linop.planning.lowering` makes the plans of an operator, `linop.verify_plans`
proves that those of all workers compute it, without running them, and a backend runs one.

Arrays live in two generations: the steps of a stage read the regions of the stage before it, and
write regions of their own; `Advance` makes the new ones current and forgets the others. So an array
is never changed after its stage, and passing a region on costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from linop.normal_form.maps import Call
from linop.planning.patterns import Pattern
from linop.spaces.exact import exact, shown
from linop.spaces.region import Region, Subset, memory_mark
from linop.spaces.scalars import Scalar

GROUP = -1
"""The peer that stands for all others of a collective's group."""


@dataclass(frozen=True)
class Receive:
    """Get ready for a message of `size` elements from a peer; at most one per stage and peer."""

    stage: int
    peer: int
    size: int

    def __str__(self) -> str:
        return f"receive {self.size} elements from {self.peer}"


@dataclass(frozen=True)
class Send:
    """Pack parts of current regions, in order, into one message to a peer; does not wait."""

    stage: int
    peer: int
    parts: tuple[Subset, ...]

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    def __str__(self) -> str:
        return f"send {self.size} elements to {self.peer}: {', '.join(map(str, self.parts))}"


@dataclass(frozen=True)
class Collective(Send):
    """Begin a collective with a group of workers, to which this one contributes `parts`; does not
    wait. The group is the peer `GROUP`, from which a worker that gets anything has a `Receive`."""

    pattern: Pattern
    sent: tuple[int, ...] = ()
    """Elements for each member of the group, in its order: of an all-to-all only."""
    received: tuple[int, ...] = ()
    """Elements from each member of the group, in its order: of an all-to-all only."""

    def __str__(self) -> str:
        return f"begin the {self.pattern}: {', '.join(map(str, self.parts)) or 'nothing'}"


@dataclass(frozen=True)
class Make:
    """A new array for a region: zeros, or uninitialised if every element is going to be set."""

    region: Region
    zeroed: bool

    def __str__(self) -> str:
        return f"make {_shaped(self.region)}{' of zeros' if self.zeroed else ''}"


@dataclass(frozen=True)
class Alias:
    """A new region that is a current one unchanged, in the same memory: no copy."""

    source: Region
    target: Region

    def __str__(self) -> str:
        return f"keep {self.source}" + (
            f" as {self.target}" if self.source.name != self.target.name else ""
        )


@dataclass(frozen=True)
class Message:
    """A piece of a received message: elements from `offset` on, shaped like the target."""

    peer: int
    offset: int

    def __str__(self) -> str:
        return f"message from {self.peer} at {self.offset}"


@dataclass(frozen=True)
class Put:
    """Set or increase a part of a new region by a multiple of a current part (in another memory, it
    may be), or of a message."""

    target: Subset
    source: Subset | Message
    coefficient: Scalar
    """1, or a number of the plan's dtype."""
    accumulate: bool

    @property
    def crosses(self) -> bool:
        """Whether this goes from one memory of the worker to another. What comes in a message does
        not: its source is the message, wherever a backend receives that."""
        return isinstance(self.source, Subset) and self.source.memory != self.target.memory

    @property
    def keeps(self) -> bool:
        """Whether this leaves a part of a region as it was."""
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
        if not isinstance(self.source, Subset) or not self.crosses:
            return text
        return f"{text}, {self.source.memory} to {self.target.memory} memory"


@dataclass(frozen=True)
class Wait:
    """Until all messages of the stage have come."""

    stage: int

    def __str__(self) -> str:
        return "wait for messages"


@dataclass(frozen=True)
class Apply:
    """A local map, from current regions to new ones."""

    call: Call
    outputs: tuple[Region, ...]

    def __str__(self) -> str:
        call = self.call
        return f"{', '.join(call.outputs)} = {call.map.symbol}({', '.join(call.inputs)})"


@dataclass(frozen=True)
class Advance:
    """The stage is over: its regions become the current ones."""

    stage: int

    def __str__(self) -> str:
        return "next stage"


Step = Receive | Send | Make | Alias | Put | Wait | Apply | Advance


@dataclass(frozen=True)
class Plan:
    """The steps of one worker, with the regions it is given and those it gives back."""

    worker: int
    dtype: np.dtype
    inputs: tuple[Region, ...]
    outputs: tuple[Region, ...]
    steps: tuple[Step, ...]
    patterns: tuple[Pattern, ...] = ()
    """What the movement stages are, in order; stage 2 k is the movement k."""

    def pattern(self, stage: int) -> Pattern | None:
        """What a stage is, if it is a movement."""
        known = stage % 2 == 0 and stage // 2 < len(self.patterns)
        return self.patterns[stage // 2] if known else None

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
        """Whether a result may be the memory of the argument of its name: what stays is where it
        was, and nothing is read where something else is written."""
        steps = self.steps
        if any(isinstance(step, Apply) for step in steps):
            return False
        if sum(isinstance(step, Advance) for step in steps) != 1:
            return False
        # A region that becomes another is read at the end, when its own memory may be written.
        aliases = [step for step in steps if isinstance(step, Alias)]
        written_to = {r.name for r in self.outputs}
        written_to -= {a.target.name for a in aliases if a.source.name == a.target.name}
        if any(a.source.name != a.target.name and a.source.name in written_to for a in aliases):
            return False
        puts = [step for step in steps if isinstance(step, Put)]
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
        """What is given and given back, what is sent and received, and the steps, one a line; a
        stage that is a collective begins with that."""
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
        """How much memory a step moves or makes."""
        match step:
            case Send() | Receive():
                size = step.size
            case Put():
                size = step.target.size
            case Make():
                size = step.region.size
            case _:
                return ""
        return f"  ({size * self.dtype.itemsize} bytes)"


def _names(regions: tuple[Region, ...]) -> str:
    return ", ".join(map(_shaped, regions)) or "nothing"


def _shaped(region: Region) -> str:
    return f"{region.name}{list(region.shape)}{memory_mark(region)}"
