"""Whether the plans of all workers fit together, found without running them.

`verify` simulates the plans side by side: messages are their sizes, arrays are which of their
elements are set. There is one error class for each way in which plans can be wrong.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from linop.errors import PlanError
from linop.plan import (
    Advance,
    Alias,
    Apply,
    Make,
    Message,
    Plan,
    Put,
    Receive,
    Send,
    Step,
    Wait,
)
from linop.region import Region, Subset


class MissingSendError(PlanError):
    """A worker gets ready for a message that nobody sends."""


class MissingReceiveError(PlanError):
    """A worker sends a message that nobody gets ready for."""


class DuplicateMessageError(PlanError):
    """Two messages, or two receives, between the same workers in the same stage."""


class SizeMismatchError(PlanError):
    """A message is longer or shorter than its receiver expects, or two parts differ in shape."""


class DTypeMismatchError(PlanError):
    """Two workers that exchange a message disagree about its dtype."""


class CycleError(PlanError):
    """Workers wait for each other in a circle."""


class UnknownRegionError(PlanError):
    """A step uses a region, a part of one, or a message that its worker does not have then."""


class MemoryMismatchError(PlanError):
    """A region is kept, without a copy, as one that lives in another memory."""


class TwoWritersError(PlanError):
    """An element is set twice in a stage."""


class UnwrittenError(PlanError):
    """An element of a new region is never set, or added to before it is."""


class WorkerError(PlanError):
    """The set of plans itself is wrong: a worker twice, or a peer without a plan."""


Key = tuple[int, int, int]
"""Stage, sender, receiver."""


def verify(plans: Iterable[Plan]) -> None:
    """Check the plans of all workers of an operator against each other.

    Raises:
        PlanError: the subclass says what is wrong; the message says which worker and step.
    """
    by_worker: dict[int, Plan] = {}
    for plan in plans:
        if plan.worker in by_worker:
            raise WorkerError(f"two plans for worker {plan.worker}")
        by_worker[plan.worker] = plan
    _match_messages(by_worker)
    states = {worker: _Worker(plan) for worker, plan in by_worker.items()}
    sent: set[Key] = set()
    while any(state.waiting for state in states.values()):
        moved = [state.run(sent) for state in states.values() if state.waiting]
        if not any(moved):
            raise CycleError("; ".join(s.complaint(sent) for s in states.values() if s.waiting))


def _match_messages(plans: dict[int, Plan]) -> None:
    sends: dict[Key, int] = {}
    receives: dict[Key, int] = {}
    for worker, plan in plans.items():
        for step in plan.steps:
            if not isinstance(step, Send | Receive):
                continue
            if step.peer not in plans:
                raise WorkerError(f"worker {worker}: {step}: worker {step.peer} has no plan")
            sending = isinstance(step, Send)
            key = (step.stage, *((worker, step.peer) if sending else (step.peer, worker)))
            known = sends if sending else receives
            if key in known:
                raise DuplicateMessageError(f"worker {worker}: {step}: a second one in this stage")
            known[key] = step.size
    for key in sorted(sends.keys() | receives.keys()):
        stage, sender, receiver = key
        what = f"stage {stage}, worker {sender} to worker {receiver}"
        if key not in receives:
            raise MissingReceiveError(f"{what}: sent, and nobody receives it")
        if key not in sends:
            raise MissingSendError(f"{what}: expected, and nobody sends it")
        if sends[key] != receives[key]:
            raise SizeMismatchError(f"{what}: {sends[key]} sent, {receives[key]} expected")
        if plans[sender].dtype != plans[receiver].dtype:
            raise DTypeMismatchError(
                f"{what}: {plans[sender].dtype} sent, {plans[receiver].dtype} expected"
            )


class _Worker:
    """One worker's plan as far as it has come: which elements of which regions are set."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.at = 0
        self.current = {r.name: np.ones(r.shape, bool) for r in plan.inputs}
        self.new: dict[str, np.ndarray] = {}
        self.summed: dict[str, np.ndarray] = {}
        self.expected: dict[int, int] = {}
        self.waited = False

    @property
    def waiting(self) -> bool:
        """Whether steps are left."""
        return self.at < len(self.plan.steps)

    def run(self, sent: set[Key]) -> bool:
        """Go as far as the messages sent so far allow; whether that was any step at all."""
        begun = self.at
        while self.waiting and not self._blocked(sent):
            self._step(self.plan.steps[self.at], sent)
            self.at += 1
        if not self.waiting:
            for region in self.plan.outputs:
                self._have(region, "the result")
        return self.at > begun

    def _blocked(self, sent: set[Key]) -> list[int]:
        step = self.plan.steps[self.at]
        if not isinstance(step, Wait):
            return []
        me = self.plan.worker
        return [peer for peer in self.expected if (step.stage, peer, me) not in sent]

    def complaint(self, sent: set[Key]) -> str:
        return f"worker {self.plan.worker} waits for {self._blocked(sent)}"

    def _step(self, step: Step, sent: set[Key]) -> None:
        match step:
            case Receive():
                self.expected[step.peer] = step.size
            case Send():
                for part in step.parts:
                    self._read(part, step)
                sent.add((step.stage, self.plan.worker, step.peer))
            case Make():
                self._bring(step.region, np.zeros(step.region.shape, bool), step)
                self.summed[step.region.name] = np.full(step.region.shape, step.zeroed)
            case Alias():
                self._have(step.source, step)
                self._same_shape(step.source, step.target, step)
                if step.source.memory != step.target.memory:
                    raise MemoryMismatchError(
                        f"{self._where(step)}: {step.source.memory} memory, and "
                        f"{step.target.memory} memory expected"
                    )
                self._bring(step.target, np.ones(step.target.shape, bool), step)
            case Put():
                self._put(step)
            case Apply():
                for name in step.call.inputs:
                    if name not in self.current:
                        raise UnknownRegionError(f"{self._where(step)}: no region {name!r}")
                for region in step.outputs:
                    self._bring(region, np.ones(region.shape, bool), step)
            case Wait():
                self.waited = True
            case Advance():
                self._advance(step)

    def _put(self, step: Put) -> None:
        if isinstance(step.source, Subset):
            self._read(step.source, step)
            self._same_shape(step.source, step.target, step)
        else:
            self._read_message(step.source, step.target.size, step)
        name = step.target.region.name
        if name not in self.summed:
            raise UnknownRegionError(f"{self._where(step)}: region {name!r} was not made")
        written, zeroed = self.new[name][step.target.index], self.summed[name][step.target.index]
        if written.shape != step.target.shape:
            raise UnknownRegionError(f"{self._where(step)}: {step.target} is out of bounds")
        if step.accumulate and not (zeroed | written).all():
            raise UnwrittenError(f"{self._where(step)}: adds to elements that were never set")
        if not step.accumulate:
            if written.any():
                raise TwoWritersError(f"{self._where(step)}: elements were written before")
            zeroed[...] = False
        written[...] = True

    def _advance(self, step: Advance) -> None:
        for name, written in self.new.items():
            if name in self.summed and not (written | self.summed[name]).all():
                raise UnwrittenError(f"{self._where(step)}: elements of {name!r} were never set")
        self.current = self.new
        self.new, self.summed, self.expected, self.waited = {}, {}, {}, False

    def _bring(self, region: Region, written: np.ndarray, step: Step) -> None:
        if region.name in self.new:
            raise TwoWritersError(f"{self._where(step)}: region {region.name!r} exists already")
        self.new[region.name] = written

    def _have(self, region: Region, what: object) -> None:
        held = self.current.get(region.name)
        if held is None or held.shape != region.shape:
            raise UnknownRegionError(f"{self._where(what)}: no region {region!r}")

    def _read(self, part: Subset, step: Step) -> None:
        self._have(part.region, step)
        if self.current[part.region.name][part.index].shape != part.shape:
            raise UnknownRegionError(f"{self._where(step)}: {part} is out of bounds")

    def _read_message(self, message: Message, size: int, step: Step) -> None:
        if message.peer not in self.expected:
            raise UnknownRegionError(f"{self._where(step)}: no message from {message.peer}")
        if not self.waited:
            raise UnknownRegionError(f"{self._where(step)}: reads a message before waiting for it")
        if message.offset + size > self.expected[message.peer]:
            raise SizeMismatchError(f"{self._where(step)}: reads past the end of {message}")

    def _same_shape(self, source: Region | Subset, target: Region | Subset, step: Step) -> None:
        if source.shape != target.shape:
            raise SizeMismatchError(
                f"{self._where(step)}: shapes {source.shape} and {target.shape} differ"
            )

    def _where(self, step: object) -> str:
        return f"worker {self.plan.worker}, step {self.at} ({step})"
