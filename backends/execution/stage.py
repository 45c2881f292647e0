"""One stage of a worker's plan: its steps by kind, and the memory cells of the regions before and
after it; and `Lines`, the emitted form of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from linop.backends.execution.emitter import Code
from linop.backends.execution.views import Cell, View
from linop.planning.plan import Alias, Apply, Make, Message, Put, Receive, Send, Step, Wait
from linop.spaces.region import Region, Subset

Ready = Callable[[], bool]


class Lines(NamedTuple):
    """Emitted lines of a step, with its attributes for traces."""

    label: str
    text: Sequence[str]
    about: Mapping[str, Any]
    """Attributes in a trace: peers, bytes."""
    ready: Ready | None = None
    """For a step that waits: returns True if it would not have to."""
    fresh: Sequence[str] | None = None
    """Variant used when the run allocates its result; None if it does not differ."""
    keeps: str | None = None
    """Region that the step only copies: the step is omitted if the region's memory is the
    argument's."""


class Stage:
    """Steps of one stage, with the cells of the regions before (`current`) and after it (`new`)."""

    def __init__(
        self, number: int, steps: Sequence[Step], current: dict[str, Cell], code: Code
    ) -> None:
        self.number = number
        self.current = current
        self.new: dict[str, Cell] = {}
        self.made: list[tuple[Make, Cell]] = []
        self.puts: list[Put] = []
        self.receives: list[Receive] = []
        self.sends: list[Send] = []
        self.applies: list[Apply] = []
        self.waits: Wait | None = None
        for step in steps:
            match step:
                case Make():
                    cell = self.new[step.region.name] = cell_of(step.region, code)
                    self.made.append((step, cell))
                case Alias():
                    self.new[step.target.name] = current[step.source.name]
                case Apply():
                    self.new.update({r.name: cell_of(r, code) for r in step.outputs})
                    self.applies.append(step)
                case Put():
                    self.puts.append(step)
                case Receive():
                    self.receives.append(step)
                case Send():
                    self.sends.append(step)
                case Wait():
                    self.waits = step

    def incoming(self, peer: int) -> list[Put]:
        """Puts that read a message from a peer, by offset in the message."""
        found = [p for p in self.puts if isinstance(p.source, Message) and p.source.peer == peer]
        return sorted(found, key=lambda put: put.source.offset)  # type: ignore[union-attr]

    def addend(self, put: Put) -> Put | None:
        """The first accumulation into the target of this put, if it covers all of it, no more; else
        None."""
        for other in self._adding.get(put.target.region.name, ()):
            if other.target.overlaps(put.target):
                return other if other.target == put.target else None
        return None

    @cached_property
    def _adding(self) -> dict[str, list[Put]]:
        """Accumulating puts of each region, in order."""
        found: dict[str, list[Put]] = {}
        for put in self.puts:
            if put.accumulate:
                found.setdefault(put.target.region.name, []).append(put)
        return found

    @cached_property
    def created(self) -> frozenset[str]:
        """Regions that one put sets as a whole; see `creates`."""
        return frozenset(put.target.region.name for put in self.puts if creates(put))

    def pairs(self) -> list[tuple[Put, Put]]:
        """Puts that set a box, each with the accumulation that follows: one pass can do both,
        within the memory in which messages arrive."""
        firsts = [p for p in self.puts if not p.accumulate and _plain(p)]
        firsts = [p for p in firsts if not self.new[p.target.region.name].apart]
        found = [(put, self.addend(put)) for put in firsts]
        return [(put, other) for put, other in found if other and _plain(other)]

    def target(self, put: Put) -> View:
        return View.of(self.new[put.target.region.name], put.target)

    def source(self, part: Subset) -> View:
        return View.of(self.current[part.region.name], part)


def cell_of(region: Region, code: Code) -> Cell:
    """New cell for a region."""
    apart = code.arrays.of(region.memory) is not code.arrays
    return Cell(region.shape, code.local(), apart=apart)


def creates(put: Put) -> bool:
    """True if a put sets a whole region, without scaling or a copy between host and device
    memory."""
    return put.target.whole and not put.accumulate and _plain(put)


def _plain(put: Put) -> bool:
    return put.coefficient == 1 and not put.crosses
