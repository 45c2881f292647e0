"""The interface by which a transport supplies the instructions of a plan's messages.

A bound plan (`linop.backends.engine.execution.program`) asks for them stage by stage, and adds
those of local copies and sums. The rooms of the media implement it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

from linop.backends.engine.arrays.lending import lender
from linop.backends.engine.execution.instructions import (
    Add,
    Call,
    Instruction,
    Operation,
    instruction,
)
from linop.backends.engine.execution.layout import Layout
from linop.backends.engine.execution.stage import Stage
from linop.backends.engine.execution.views import View
from linop.planning.plan import Sum

Instructions = Iterable[Instruction]


class Communication(ABC):
    """Messages of one bound plan. The constructor gives the layout its memory (`Layout.place`), and
    prepares the buffers of incoming messages.

    Attributes:
        inbox: for each stage, the view that each put of a message reads, by the put's id. A put
            that is left out is done by the message itself.
        takes_out: True if results can be computed in arrays that a caller passes.
        lent: a sequence that is empty when the last buffer of the pool is lent: the results are
            copied then; None if that never happens.
        early: True if messages come into memory of the plan, so that no sender waits for the run
            that receives them to begin.
    """

    layout: Layout
    inbox: Sequence[Mapping[int, View]]
    takes_out = True
    lent: Sequence[object] | None = None
    early = False

    def lending(self) -> Sequence[Operation]:
        """Operations that take buffers for the open results from a pool."""
        dtype = self.layout.dtype
        kinds = {one: self.layout.arrays_of(one) for one in self.layout.open}
        return [Call(lender(kind, one.shape, dtype), (), [one]) for one, kind in kinds.items()]

    def begin(self) -> Instructions:
        """The first instructions of a run, after zeroed memory is filled."""
        return ()

    @abstractmethod
    def sends(self, stage: Stage) -> Instructions:
        """Instructions that send a stage's messages, or pack them."""

    def depart(self, stage: Stage) -> Instructions:
        """Instructions after the local copies of a stage: what its messages still need."""
        del stage
        return ()

    def sum(self, stage: Stage, step: Sum, first: View, second: View) -> Instruction:
        """The instruction of a sum, after the wait for messages."""
        target = stage.target(step.first)
        creates = target.buffer in self.layout.open and step.first.target.whole
        size = self.layout.bytes_of(target.size)
        return instruction(str(step), Add(target, first, second, creates), bytes=size)

    @abstractmethod
    def wait(self, stage: Stage) -> Instructions:
        """Instructions that wait for a stage's messages."""

    def end(self) -> Instructions:
        """The last instructions of a run."""
        return ()

    @abstractmethod
    def describe(self) -> str:
        """Transport of the messages, as one line of text."""

    @abstractmethod
    def release(self) -> None:
        """Release requests and shared memory."""

    @abstractmethod
    def abandon(self) -> None:
        """Release them in the middle of a run; no other follows."""
