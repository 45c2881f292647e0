"""Division of one worker's plan into stages, and the checks that need no other plan.

Checked: regions exist when used and have matching shapes; boxes and reads of messages are in
bounds; receives are posted before the wait, and messages read after it. Elements are checked in
`linop.planning.verification.writes`, messages between workers in
`linop.planning.verification.correspondence`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import le
from typing import Any, TypeVar

import numpy as np

from linop.caching import cached_property
from linop.planning.plan import (
    Advance,
    Alias,
    Apply,
    Collective,
    LoweredPlan,
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
from linop.planning.verification.plan_errors import (
    CallMismatchError,
    DTypeMismatchError,
    FusedSumError,
    MemoryMismatchError,
    OutOfBoundsError,
    SizeMismatchError,
    StageError,
    StepOrderError,
    StorageError,
    TwoWritersError,
    UnfinishedError,
    UnknownRegionError,
    WorkerError,
)
from linop.spaces.region import Region, Subset, as_subset
from linop.spaces.scalars import Scalar

S = TypeVar("S", bound=Step)


@dataclass(frozen=True, eq=False)
class PlanStage:
    """One stage of one worker's plan.

    Args:
        steps: in order; both puts of a `Sum` in its place.
        places: position of each step in the plan.
        before, after: regions that the stage takes, and those that it makes, by name.
    """

    worker: int
    number: int
    steps: Sequence[Step]
    places: Sequence[int]
    before: Mapping[str, Region]
    after: Mapping[str, Region]

    def of(self, kind: type[S]) -> Iterator[tuple[int, S]]:
        """The steps of a class, with their positions in the plan."""
        if not any(issubclass(one, kind) for one in self._classes):
            return iter(())
        steps = zip(self.places, self.steps, strict=True)
        return ((at, step) for at, step in steps if isinstance(step, kind))

    @cached_property
    def _classes(self) -> set[type[Step]]:
        return set(map(type, self.steps))

    @cached_property
    def sent(self) -> Mapping[int, tuple[Subset, ...]]:
        """The subsets sent to each peer, in order."""
        return {step.peer: step.parts for _, step in self.of(Send)}

    def where(self, at: int) -> str:
        """Text of the step at a position of the plan, for error messages."""
        return where(self.worker, self.number, at, self.steps[self.places.index(at)])


def where(worker: int, stage: int, at: int, step: Step) -> str:
    """Text of a step of a plan, for error messages."""
    return f"worker {worker}, stage {stage}, step {at} ({step})"


def read(plan: LoweredPlan) -> tuple[PlanStage, ...]:
    """Divide a plan into its stages, and check every step.

    Raises:
        PlanError: the plan cannot run, whatever other workers do; of the subclasses listed first in
            `linop.planning.verification.plan_errors`, or WorkerError.
    """
    stages: list[PlanStage] = []
    first = 0
    current = _inputs(plan)
    for at, step in enumerate(plan.steps):
        if isinstance(step, Advance):
            steps = plan.steps[first : at + 1]
            taken = _taken(plan, at, step, current)
            stage = _Reader(plan, step.stage, steps, first, taken).read()
            for name in taken:
                del current[name]
            for name in stage.after:
                if name in current:
                    raise TwoWritersError(
                        f"{where(plan.worker, step.stage, at, step)}: makes region {name!r}, and "
                        f"does not take that which exists"
                    )
            current |= stage.after
            stages.append(stage)
            first = at + 1
    if first < len(plan.steps):
        raise UnfinishedError(
            f"worker {plan.worker}, step {first} ({plan.steps[first]}): no advance follows it; a "
            f"plan ends with the advance of its last stage"
        )
    for before, after in pairwise([None, *stages, None]):
        _check_storage(before, after)
        _check_inside(before, after)
        _check_overwritten(plan, before, after)
    numbers = [stage.number for stage in stages]
    if any(a >= b for a, b in pairwise(numbers)):
        raise StageError(f"worker {plan.worker}: stages {numbers}; their numbers increase")
    for region in plan.outputs:
        if current.get(region.name) != region:
            raise UnknownRegionError(f"worker {plan.worker}, the result: no region {region!r}")
    return tuple(stages)


def _taken(
    plan: LoweredPlan, at: int, step: Advance, current: Mapping[str, Region]
) -> dict[str, Region]:
    """The regions that a stage takes."""
    if step.taken is None:
        return dict(current)
    taken: dict[str, Region] = {}
    for name in step.taken:
        if name not in current or name in taken:
            why = "which it has taken" if name in taken else "and there is no such region"
            raise UnknownRegionError(
                f"{where(plan.worker, step.stage, at, step)}: takes region {name!r}, {why}"
            )
        taken[name] = current[name]
    return taken


def _check_storage(stage: PlanStage | None, after: PlanStage | None) -> None:
    """Check that the regions made within regions of the next stage are copied there, as a whole
    and as they are, and that nothing else needs their memory."""
    makes = [] if stage is None else [one for one in stage.of(Make) if one[1].within is not None]
    inside = set() if after is None else {m.region.name for _, m in after.of(Make) if m.inside}
    every = [] if after is None else list(after.of(Put))
    puts = [one for one in every if not (one[1].keeps and one[1].target.region.name in inside)]
    if not makes and not any(put.stored for _, put in puts):
        return
    places = {make.within: make.region for _, make in makes}
    for at, put in puts:
        region = places.get(put.target)
        if put.stored and (region is None or put.source != as_subset(region) or not put.is_copy):
            assert after is not None
            raise StorageError(f"{after.where(at)}: its source was not made within its target")
    stored = {put.target for _, put in puts if put.stored}
    for at, make in makes:
        assert stage is not None
        target = make.within
        if after is None or target is None or target not in stored or places[target] != make.region:
            raise StorageError(
                f"{stage.where(at)}: the next stage does not copy the region to {target}"
            )
        others = [made for _, made in after.of(Make) if made.region == target.region]
        kept = any(alias.source == make.region for _, alias in after.of(Alias))
        added = any(p.accumulate and p.target.overlaps(target) for _, p in puts)
        if make.zeroed or kept or added or any(other.zeroed or other.within for other in others):
            raise StorageError(f"{stage.where(at)}: the memory of {target} has another use")


def _check_overwritten(plan: LoweredPlan, stage: PlanStage | None, after: PlanStage | None) -> None:
    """Check that a region takes the memory of an argument only in the first stage, if that may be
    overwritten, is set to it first, and that nothing else reads the argument."""
    for at, make in [] if after is None else after.of(Make):
        if not make.inside:
            continue
        assert after is not None
        name, puts = make.region.name, [put for _, put in after.of(Put)]
        own = [put for put in puts if put.target.region.name == name]
        kept = bool(own) and own[0].keeps and own[0].stored and own[0].target.whole
        read = [put.source for put in puts if put is not own[0]] if own else []
        parts = [part for _, send in after.of(Send) for part in send.parts]
        names = [one.region.name for one in (*read, *parts) if isinstance(one, Subset)]
        names += [alias.source.name for _, alias in after.of(Alias)]
        if (
            stage is not None
            or name not in plan.scratch
            or make.region not in plan.inputs
            or make.zeroed
            or make.within is not None
            or not kept
            or not all(put.accumulate for put in own[1:])
            or name in names
        ):
            raise StorageError(f"{after.where(at)}: the argument's memory has another use")


def _check_inside(stage: PlanStage | None, after: PlanStage | None) -> None:
    """Check that a local map overwrites an array only if the stage before made it."""
    made = set() if stage is None else {step.region.name for _, step in stage.of(Make)}
    for at, step in [] if after is None else after.of(Apply):
        if step.inside and (step.call.map.inside is None or not made.issuperset(step.call.inputs)):
            assert after is not None
            raise StorageError(f"{after.where(at)}: the array that it overwrites was not made")


def _is_of(coefficient: Scalar, dtype: np.dtype[Any]) -> bool:
    """True if a factor is a number of a dtype, which does not round or wrap it."""
    try:
        return bool(dtype.type(coefficient) == coefficient)
    except (OverflowError, TypeError):
        return False


def _inputs(plan: LoweredPlan) -> dict[str, Region]:
    given = {region.name: region for region in plan.inputs}
    for region in plan.inputs:
        if plan.worker not in region.workers or given[region.name] != region:
            raise WorkerError(f"worker {plan.worker} is given {region!r}: not its own, or twice")
    return given


class _Reader:
    """Checker of one stage: symbolic run of its steps, in order."""

    def __init__(
        self,
        plan: LoweredPlan,
        number: int,
        steps: Sequence[Step],
        first: int,
        before: Mapping[str, Region],
    ) -> None:
        self.worker, self.dtype = plan.worker, plan.dtype
        self.number, self.steps, self.first = number, steps, first
        self.before = before
        self.after: dict[str, Region] = {}
        self.made: dict[str, Region] = {}
        self.expected: dict[int, int] = {}
        self.waited = False
        self.at = 0

    @property
    def here(self) -> str:
        """Text of the current step, for error messages."""
        return where(self.worker, self.number, self.first + self.at, self.steps[self.at])

    def read(self) -> PlanStage:
        every: list[Step] = []
        places: list[int] = []
        for k, step in enumerate(self.steps):
            self.at = k
            _CHECKS[type(step)](self, step)
            each = puts_of([step]) if isinstance(step, Sum) else (step,)
            every += each
            places += [self.first + k] * len(each)
        if self.expected and not self.waited:
            raise StepOrderError(
                f"{self.here}: messages from {sorted(self.expected)} are received, and no wait "
                f"for them comes before the end of the stage"
            )
        return PlanStage(self.worker, self.number, every, places, self.before, self.after)

    def _of_stage(self, step: Receive | Send | Wait) -> None:
        if step.stage != self.number:
            raise StageError(f"{self.here}: of stage {step.stage}, in stage {self.number}")

    def _receive(self, step: Receive) -> None:
        self._of_stage(step)
        if self.waited:
            raise StepOrderError(f"{self.here}: comes after the wait of its stage, not before it")
        # A duplicate is reported by `linop.planning.verification.correspondence`.
        self.expected[step.peer] = step.size

    def _send(self, step: Send) -> None:
        self._of_stage(step)
        for part in step.parts:
            self._read(part)

    def _collective(self, step: Collective) -> None:
        if self.waited:
            raise StepOrderError(f"{self.here}: begins after the wait of its stage")
        self._send(step)

    def _wait(self, step: Wait) -> None:
        self._of_stage(step)
        if self.waited:
            raise StepOrderError(f"{self.here}: a second wait in this stage")
        self.waited = True

    def _make(self, step: Make) -> None:
        self._bring(step.region)
        self.made[step.region.name] = step.region

    def _alias(self, step: Alias) -> None:
        self._same_shape(step.source, step.target)
        if step.source.memory != step.target.memory:
            raise MemoryMismatchError(
                f"{self.here}: {step.source.memory} memory, and {step.target.memory} memory "
                f"expected"
            )
        self._have(step.source)
        self._bring(step.target)

    def _put(self, step: Put) -> None:
        region = step.target.region
        if self.made.get(region.name) != region:
            raise UnknownRegionError(f"{self.here}: region {region.name!r} was not made")
        self._in_bounds(step.target)
        if not _is_of(step.coefficient, self.dtype):
            raise DTypeMismatchError(
                f"{self.here}: the coefficient {step.coefficient!r} is no number of {self.dtype}"
            )
        if isinstance(step.source, Subset):
            self._read(step.source)
            self._same_shape(step.source, step.target)
        else:
            self._read_message(step.source, step.target.size)

    def _sum(self, step: Sum) -> None:
        first, second = step.first, step.second
        if not (first.is_copy and second.is_addition and first.target == second.target):
            raise FusedSumError(f"{self.here}: {first}, then {second}")
        self._put(first)
        self._put(second)

    def _apply(self, step: Apply) -> None:
        call = step.call
        for name in call.inputs:
            if name not in self.before:
                raise UnknownRegionError(f"{self.here}: no region {name!r}")
        given = [self.before[name] for name in call.inputs]
        self._same_ends("takes", call.map.domain.regions, given)
        self._same_ends("gives", call.map.codomain.regions, step.outputs)
        if tuple(region.name for region in step.outputs) != call.outputs:
            names = [region.name for region in step.outputs]
            raise CallMismatchError(f"{self.here}: gives {names}, and {call.outputs} expected")
        for region in step.outputs:
            self._bring(region)

    def _same_ends(self, verb: str, own: Sequence[Region], given: Sequence[Region]) -> None:
        wanted, found = ([(r.shape, r.memory) for r in side] for side in (own, given))
        if wanted != found:
            raise CallMismatchError(f"{self.here}: {verb} {wanted}, and {found} given")

    def _bring(self, region: Region) -> None:
        if region.name in self.after:
            raise TwoWritersError(f"{self.here}: region {region.name!r} exists already")
        if self.worker not in region.workers:
            raise WorkerError(f"{self.here}: {region!r} is not on worker {self.worker}")
        self.after[region.name] = region

    def _have(self, region: Region) -> None:
        if self.before.get(region.name) != region:
            raise UnknownRegionError(f"{self.here}: no region {region!r}")

    def _read(self, part: Subset) -> None:
        self._have(part.region)
        self._in_bounds(part)

    def _in_bounds(self, part: Subset) -> None:
        start, stop, shape = part.start, part.stop, part.region.shape
        ordered = all(map(le, start, stop)) and all(map(le, stop, shape))
        if not (ordered and min(start, default=0) >= 0 and len(start) == len(stop) == len(shape)):
            raise OutOfBoundsError(
                f"{self.here}: {part} is out of bounds of {part.region.name!r}, of shape "
                f"{part.region.shape}"
            )

    def _read_message(self, message: Message, size: int) -> None:
        if message.peer not in self.expected:
            raise UnknownRegionError(f"{self.here}: no message from {message.peer}")
        if not self.waited:
            raise StepOrderError(f"{self.here}: reads a message before waiting for it")
        whole = self.expected[message.peer]
        if message.offset < 0 or message.offset + size > whole:
            raise OutOfBoundsError(
                f"{self.here}: reads elements {message.offset} to {message.offset + size} of "
                f"{whole} from {message.peer}"
            )

    def _same_shape(self, source: Region | Subset, target: Region | Subset) -> None:
        if source.shape != target.shape:
            raise SizeMismatchError(f"{self.here}: shapes {source.shape} and {target.shape} differ")


_CHECKS: dict[type[Step], Callable[[_Reader, Any], None]] = {
    Receive: _Reader._receive,
    Send: _Reader._send,
    Collective: _Reader._collective,
    Make: _Reader._make,
    Alias: _Reader._alias,
    Put: _Reader._put,
    Sum: _Reader._sum,
    Apply: _Reader._apply,
    Wait: _Reader._wait,
    Advance: lambda reader, step: None,
}
"""The check of each class of steps."""
