"""Division of one worker's plan into stages, and the checks that need no other plan.

Checked: regions exist when used and have matching shapes; boxes and reads of messages are in
bounds; receives are posted before the wait, and messages read after it. Elements are checked in
`linop.planning.verification.writes`, messages between workers in
`linop.planning.verification.correspondence`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, zip_longest
from typing import TypeVar

from linop.planning.plan import (
    Advance,
    Alias,
    Apply,
    Collective,
    Make,
    Message,
    Plan,
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

S = TypeVar("S", bound=Step)


@dataclass(frozen=True, eq=False)
class PlanStage:
    """One stage of one worker's plan.

    Args:
        steps: (position in the plan, step); both puts of a `Sum` in its place.
        before, after: regions current before and after the stage, by name.
    """

    worker: int
    number: int
    steps: Sequence[tuple[int, Step]]
    before: Mapping[str, Region]
    after: Mapping[str, Region]

    def of(self, kind: type[S]) -> Iterator[tuple[int, S]]:
        """The steps of a class, with their positions in the plan."""
        return ((at, step) for at, step in self.steps if isinstance(step, kind))

    @cached_property
    def sent(self) -> Mapping[int, tuple[Subset, ...]]:
        """The subsets sent to each peer, in order."""
        return {step.peer: step.parts for _, step in self.of(Send)}

    def where(self, at: int) -> str:
        """Text of the step at a position of the plan, for error messages."""
        step = next(step for k, step in self.steps if k == at)
        return where(self.worker, self.number, at, step)


def where(worker: int, stage: int, at: int, step: Step) -> str:
    """Text of a step of a plan, for error messages."""
    return f"worker {worker}, stage {stage}, step {at} ({step})"


def read(plan: Plan) -> tuple[PlanStage, ...]:
    """Divide a plan into its stages, and check every step.

    Raises:
        PlanError: the plan cannot run, whatever other workers do; of the subclasses listed first in
            `linop.planning.verification.plan_errors`, or WorkerError.
    """
    stages: list[PlanStage] = []
    steps: list[tuple[int, Step]] = []
    current: Mapping[str, Region] = _inputs(plan)
    for at, step in enumerate(plan.steps):
        steps.append((at, step))
        if isinstance(step, Advance):
            stages.append(_Reader(plan.worker, step.stage, steps, current).read())
            current, steps = stages[-1].after, []
    if steps:
        raise UnfinishedError(
            f"worker {plan.worker}, step {steps[0][0]} ({steps[0][1]}): no advance follows it; a "
            f"plan ends with the advance of its last stage"
        )
    for before, after in pairwise([None, *stages, None]):
        _check_storage(before, after)
    numbers = [stage.number for stage in stages]
    if any(a >= b for a, b in pairwise(numbers)):
        raise StageError(f"worker {plan.worker}: stages {numbers}; their numbers increase")
    for region in plan.outputs:
        if current.get(region.name) != region:
            raise UnknownRegionError(f"worker {plan.worker}, the result: no region {region!r}")
    return tuple(stages)


def _check_storage(stage: PlanStage | None, after: PlanStage | None) -> None:
    """Check that the regions made within regions of the next stage are copied there, as a whole
    and as they are, and that nothing else needs their memory."""
    makes = [] if stage is None else [one for one in stage.of(Make) if one[1].within is not None]
    puts = [] if after is None else list(after.of(Put))
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


def _inputs(plan: Plan) -> dict[str, Region]:
    given = {region.name: region for region in plan.inputs}
    for region in plan.inputs:
        if plan.worker not in region.workers or given[region.name] != region:
            raise WorkerError(f"worker {plan.worker} is given {region!r}: not its own, or twice")
    return given


class _Reader:
    """Checker of one stage: symbolic run of its steps, in order."""

    def __init__(
        self,
        worker: int,
        number: int,
        steps: Sequence[tuple[int, Step]],
        before: Mapping[str, Region],
    ) -> None:
        self.worker, self.number, self.steps = worker, number, steps
        self.before = before
        self.after: dict[str, Region] = {}
        self.made: dict[str, Region] = {}
        self.expected: dict[int, int] = {}
        self.waited = False
        self.at = 0

    @property
    def here(self) -> str:
        """Text of the current step, for error messages."""
        at, step = self.steps[self.at]
        return where(self.worker, self.number, at, step)

    def read(self) -> PlanStage:
        every: list[tuple[int, Step]] = []
        for k, (at, step) in enumerate(self.steps):
            self.at = k
            self._check(step)
            each = puts_of([step]) if isinstance(step, Sum) else [step]
            every += [(at, one) for one in each]
        if self.expected and not self.waited:
            raise StepOrderError(
                f"{self.here}: messages from {sorted(self.expected)} are received, and no wait "
                f"for them comes before the end of the stage"
            )
        return PlanStage(self.worker, self.number, every, self.before, self.after)

    def _check(self, step: Step) -> None:
        if isinstance(step, Receive | Send | Wait) and step.stage != self.number:
            raise StageError(f"{self.here}: of stage {step.stage}, in stage {self.number}")
        match step:
            case Receive():
                self._receive(step)
            case Send():
                if isinstance(step, Collective) and self.waited:
                    raise StepOrderError(f"{self.here}: begins after the wait of its stage")
                for part in step.parts:
                    self._read(part)
            case Make():
                self._bring(step.region)
                self.made[step.region.name] = step.region
            case Alias():
                self._alias(step)
            case Put():
                self._put(step)
            case Sum():
                self._sum(step)
            case Apply():
                self._apply(step)
            case Wait():
                if self.waited:
                    raise StepOrderError(f"{self.here}: a second wait in this stage")
                self.waited = True

    def _receive(self, step: Receive) -> None:
        if self.waited:
            raise StepOrderError(f"{self.here}: comes after the wait of its stage, not before it")
        # A duplicate is reported by `linop.planning.verification.correspondence`.
        self.expected[step.peer] = step.size

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
        ends = zip_longest(part.start, part.stop, part.region.shape, fillvalue=-1)
        if not all(0 <= a <= b <= n for a, b, n in ends):
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
