"""Running one worker's plan: the steps of `linop.plan` over NumPy arrays and a transport."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from linop.plan import Advance, Alias, Apply, Make, Plan, Put, Receive, Send, Step, Wait
from linop.region import Subset
from linop.scalars import Array

if TYPE_CHECKING:
    from linop.backends.base import Transport


class Execution:
    """One run of a plan, which can pause where it first has to wait."""

    def __init__(
        self, plan: Plan, transport: Transport, tag: int, arrays: dict[str, Array]
    ) -> None:
        self.plan = plan
        self.transport = transport
        self.tag = tag
        self.given = arrays
        self.current = dict(arrays)
        self.new: dict[str, Array] = {}
        self.messages: dict[int, Array] = {}
        self.pending: list[Any] = []
        self._steps = iter(plan.steps)

    def to_first_wait(self) -> None:
        """Run until messages have to be waited for."""
        next(self._run(), None)

    def to_end(self) -> dict[str, Array]:
        """Run all, or what is left, and return the results by region name. They share no memory
        with the arguments, nor with each other."""
        self._settle()
        for _ in self._run():
            self._settle()
        self._settle()
        taken = list(self.given.values())
        results = {}
        for region in self.plan.outputs:
            array = self.current[region.name]
            if any(np.may_share_memory(array, other) for other in taken):
                array = array.copy()
            taken.append(array)
            results[region.name] = array
        return results

    def _run(self) -> Iterator[Step]:
        for step in self._steps:
            if isinstance(step, Wait):
                yield step
            else:
                self._do(step)

    def _do(self, step: Step) -> None:
        match step:
            case Put():
                self._put(step)
            case Alias():
                self.new[step.target.name] = self.current[step.source.name]
            case Make():
                make = np.zeros if step.zeroed else np.empty
                self.new[step.region.name] = make(step.region.shape, self.plan.dtype)
            case Receive():
                buffer = self.messages[step.peer] = np.empty(step.size, self.plan.dtype)
                self.pending.append(self.transport.receive(step.peer, self.tag, buffer))
            case Send():
                self.pending.append(self.transport.send(step.peer, self.tag, self._packed(step)))
            case Apply():
                inputs = [self.current[name] for name in step.call.inputs]
                for region, result in zip(step.outputs, step.call.map(inputs), strict=True):
                    self.new[region.name] = result
            case Advance():
                self.current, self.new = self.new, {}
                self.messages.clear()

    def _put(self, step: Put) -> None:
        target = self.new[step.target.region.name][step.target.index]
        if isinstance(step.source, Subset):
            source = self.current[step.source.region.name][step.source.index]
        else:
            start = step.source.offset
            piece = self.messages[step.source.peer][start : start + step.target.size]
            source = piece.reshape(step.target.shape)
        if step.coefficient != 1:
            source = source * step.coefficient
        if step.accumulate:
            target += source
        else:
            target[...] = source

    def _packed(self, step: Send) -> Array:
        buffer = np.empty(step.size, self.plan.dtype)
        start = 0
        for part in step.parts:
            piece = self.current[part.region.name][part.index]
            buffer[start : start + part.size].reshape(part.shape)[...] = piece
            start += part.size
        return buffer

    def _settle(self) -> None:
        """Until everything sent and received so far is done."""
        if self.pending:
            self.transport.wait(self.pending)
            self.pending.clear()
