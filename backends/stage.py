"""One stage of a worker's plan, sorted by kind of step, with the memory before and after it; and
what its steps become."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from linop.backends.code import Code
from linop.backends.strided import Cell, View
from linop.plan import Alias, Apply, Make, Message, Put, Receive, Send, Step, Wait
from linop.region import Subset

Ready = Callable[[], bool]


class Lines(NamedTuple):
    """The lines of a step, and what a trace says about it."""

    label: str
    text: Sequence[str]
    about: Mapping[str, Any]
    """Peers, bytes."""
    ready: Ready | None = None
    """For a step that waits: whether it would not have to."""
    fresh: Sequence[str] | None = None
    """The lines where results are made by the run, if these are others."""
    keeps: str | None = None
    """The region that the step leaves as it is, if its memory is the argument's."""


class Stage:
    """The steps of one stage, with the cells of the regions before and after it."""

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
                    cell = self.new[step.region.name] = Cell(step.region.shape, code.local())
                    self.made.append((step, cell))
                case Alias():
                    self.new[step.target.name] = current[step.source.name]
                case Apply():
                    self.new.update({r.name: Cell(r.shape, code.local()) for r in step.outputs})
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
        """The puts that read a message from a peer, in its order."""
        found = [p for p in self.puts if isinstance(p.source, Message) and p.source.peer == peer]
        return sorted(found, key=lambda put: put.source.offset)  # type: ignore[union-attr]

    def addend(self, put: Put) -> Put | None:
        """The first put that adds to what this one sets, if it adds to all of it."""
        region = put.target.region.name
        for other in self.puts:
            same = other.accumulate and other.target.region.name == region
            if same and other.target.overlaps(put.target):
                return other if other.target == put.target else None
        return None

    def pairs(self) -> list[tuple[Put, Put]]:
        """Puts that set what the next one adds to: each pair can be done in one pass, inside one
        memory."""
        firsts = [p for p in self.puts if not p.accumulate and _plain(p)]
        found = [(put, self.addend(put)) for put in firsts]
        return [(put, other) for put, other in found if other and _plain(other)]

    def target(self, put: Put) -> View:
        return View.of(self.new[put.target.region.name], put.target)

    def source(self, part: Subset) -> View:
        return View.of(self.current[part.region.name], part)


def creates(put: Put) -> bool:
    """Whether this sets all of a region to what is in its own memory already, or has come."""
    return put.target.whole and not put.accumulate and _plain(put)


def _plain(put: Put) -> bool:
    return put.coefficient == 1 and not put.crosses
