"""One stage of a worker's plan: its steps by kind, and the buffers of the regions before and after
it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import copy

from linop.backends.engine.arrays.interface import Arrays
from linop.backends.engine.execution.views import Buffer, View
from linop.planning.plan import (
    Advance,
    Alias,
    Apply,
    Make,
    Message,
    Put,
    Receive,
    Send,
    Step,
    Sum,
    Wait,
    puts_of,
)
from linop.spaces.region import Region, Subset


class Stage:
    """Steps of one stage, with the buffers of the regions that it takes (`current`) and makes
    (`new`).

    Attributes:
        writes: puts and sums, in order; `puts`: the puts, those of sums included.
        sends: in the order of departure: to the successor first, so that workers do not all address
            the same one.
    """

    def __init__(
        self, worker: int, steps: Sequence[Step], current: dict[str, Buffer], arrays: Arrays
    ) -> None:
        (end,) = (step for step in steps if isinstance(step, Advance))
        self.number = end.stage
        taken = current if end.taken is None else end.taken
        self.current = {name: current[name] for name in taken}
        self.new: dict[str, Buffer] = {}
        self.made: list[tuple[Make, Buffer]] = []
        self.writes: list[Put | Sum] = []
        self.puts = puts_of(steps)
        self.receives: list[Receive] = []
        self.sends: list[Send] = []
        self.applies: list[Apply] = []
        self.waits: Wait | None = None
        for step in steps:
            match step:
                case Make() if step.inside:
                    self.new[step.region.name] = current[step.region.name]
                case Make():
                    buffer = self.new[step.region.name] = buffer_of(step.region, arrays)
                    self.made.append((step, buffer))
                case Alias():
                    self.new[step.target.name] = current[step.source.name]
                case Apply():
                    kept = [current[name] for name in step.call.inputs] if step.inside else None
                    made = kept or [buffer_of(region, arrays) for region in step.outputs]
                    self.new.update(zip((r.name for r in step.outputs), made, strict=True))
                    self.applies.append(step)
                case Put() | Sum():
                    self.writes.append(step)
                case Receive():
                    self.receives.append(step)
                case Send():
                    self.sends.append(step)
                case Wait():
                    self.waits = step
        self.sends.sort(key=lambda send: (send.peer < worker, send.peer))
        self.created = frozenset(p.target.region.name for p in self.puts if creates(p))
        """Regions that one put sets as a whole."""

    def part(self, peers: Collection[int]) -> Stage:
        """The stage with the messages of some peers only."""
        part = copy(self)
        part.sends = [send for send in self.sends if send.peer in peers]
        part.receives = [receive for receive in self.receives if receive.peer in peers]
        return part

    @property
    def sums(self) -> list[Sum]:
        return [step for step in self.writes if isinstance(step, Sum)]

    def incoming(self, peer: int) -> list[Put]:
        """Puts that read a message from a peer, by offset in the message."""
        found = [p for p in self.puts if isinstance(p.source, Message) and p.source.peer == peer]
        return sorted(found, key=lambda put: put.source.offset)  # type: ignore[union-attr]

    def target(self, put: Put) -> View:
        return self.view(put.target)

    def view(self, subset: Subset) -> View:
        """View of a subset of a new region."""
        return View.of(self.new[subset.region.name], subset)

    def source(self, part: Subset) -> View:
        return View.of(self.current[part.region.name], part)


def buffer_of(region: Region, arrays: Arrays) -> Buffer:
    """New buffer for a region."""
    return Buffer(region.shape, on_host=arrays.of(region.memory) is not arrays)


def creates(put: Put) -> bool:
    """True if a put sets a whole region, without scaling or a copy between host and device
    memory."""
    return put.target.whole and put.is_copy
