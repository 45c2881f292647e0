"""Messages of a plan whose workers are on several machines, some on the same: through shared memory
inside a machine, and by messages between machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

from linop.backends.engine.execution.instructions import Instruction, Operation
from linop.backends.engine.execution.layout import Layout
from linop.backends.engine.execution.stage import Stage
from linop.backends.engine.execution.views import View
from linop.backends.engine.roads.communication import Communication, Instructions
from linop.backends.engine.roads.point_to_point import PointToPoint
from linop.backends.mpi.shared_memory.windows import Windows
from linop.planning.plan import Sum


class Hybrid(Communication):
    """Each message goes one of two ways, by its peer.

    Args:
        near: supplies the messages of the peers on this machine, and the memory of the plan.
        far: supplies those of the others.
    """

    def __init__(self, layout: Layout, near: Windows, far: PointToPoint) -> None:
        self.layout = layout
        self.near, self._far = near, far
        self.takes_out, self.lent = near.takes_out, near.lent
        pairs = zip(near.inbox, far.inbox, strict=True)
        self.inbox: Sequence[Mapping[int, View]] = [{**here, **there} for here, there in pairs]

    def _parts(self, stage: Stage) -> tuple[Stage, Stage]:
        """The stage with the messages of this machine, and with the others."""
        number = self.layout.stages.index(stage)
        return self.near.layout.stages[number], self._far.layout.stages[number]

    def lending(self) -> Sequence[Operation]:
        return self.near.lending()

    def begin(self) -> Instructions:
        return chain(self.near.begin(), self._far.begin())

    def sends(self, stage: Stage) -> Instructions:
        here, there = self._parts(stage)
        yield from self._far.sends(there)
        for each in self.near.sends(here):  # what has left already may be under way for long
            yield replace(each, stage=stage.number) if there.sends else each

    def sum(self, stage: Stage, step: Sum, first: View, second: View) -> Instruction:
        return self.near.sum(self._parts(stage)[0], step, first, second)

    def wait(self, stage: Stage) -> Instructions:
        here, there = self._parts(stage)
        # What is written here needs no call of this worker; what comes from elsewhere does.
        far = self._far.wait(there) if there.receives else ()
        return chain(far, self.near.wait(here) if here.receives else ())

    def end(self) -> Instructions:
        return chain(self._far.end(), self.near.end())

    def describe(self) -> str:
        return f"inside this machine {self.near.describe()}; to others {self._far.describe()}"

    def abandon(self) -> None:
        self._far.abandon()  # first: it may still write to memory that is given back next
        self.near.abandon()

    def release(self) -> None:
        self._far.release()
        self.near.release()
