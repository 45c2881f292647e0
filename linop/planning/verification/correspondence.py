"""Checks between the plans of different workers: matching messages and collectives, no deadlock.

Sizes, stages, groups and dtypes are compared at all ends. The elements that a message holds are
checked in `linop.planning.verification.translation`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from linop.planning.patterns import Kind, Pattern
from linop.planning.plan import GROUP, Collective, LoweredPlan, Receive, Send, Wait
from linop.planning.verification.plan_errors import (
    CollectiveMismatchError,
    CycleError,
    DTypeMismatchError,
    DuplicateMessageError,
    MissingReceiveError,
    MissingSendError,
    SizeMismatchError,
    WorkerError,
)
from linop.planning.verification.plan_stages import PlanStage

Read = Mapping[int, Sequence[PlanStage]]
"""The stages of all plans, by worker (`plan_stages.read`)."""

Key = tuple[int, int, int]
"""(stage, sender, receiver) of a message."""


def match_messages(plans: Mapping[int, LoweredPlan], stages: Read) -> None:
    """Check that every message is sent once and received once, in the same stage, with equal sizes,
    and that all plans have the same dtype.

    Raises:
        WorkerError, DuplicateMessageError, MissingReceiveError, MissingSendError,
            SizeMismatchError, DTypeMismatchError.
    """
    sends, receives = _messages(stages, Send, plans), _messages(stages, Receive, plans)
    for key in sorted(sends.keys() | receives.keys()) if sends != receives else ():
        stage, sender, receiver = key
        what = f"stage {stage}, worker {sender} to worker {receiver}"
        if key not in receives:
            raise MissingReceiveError(f"{what}: sent, and nobody receives it")
        if key not in sends:
            raise MissingSendError(f"{what}: expected, and nobody sends it")
        if sends[key] != receives[key]:
            raise SizeMismatchError(f"{what}: {sends[key]} sent, {receives[key]} expected")
    # One dtype for all plans implies that both ends of every message agree.
    dtypes = {plan.dtype: worker for worker, plan in plans.items()}
    if len(dtypes) > 1:
        (a, first), (b, second) = list(dtypes.items())[:2]
        raise DTypeMismatchError(f"worker {first} has a plan of {a}, worker {second} one of {b}")


def _messages(
    stages: Read, kind: type[Send | Receive], plans: Mapping[int, LoweredPlan]
) -> dict[Key, int]:
    """Sizes, in elements, of the point-to-point messages that are sent, or received, by key."""
    found: dict[Key, int] = {}
    for worker, own in stages.items():
        for stage in own:
            for at, step in stage.of(kind):
                if isinstance(step, Collective) or step.peer == GROUP:
                    continue
                if step.peer not in plans or step.peer == worker:
                    wrong = "is this worker" if step.peer == worker else "has no plan"
                    raise WorkerError(f"{stage.where(at)}: worker {step.peer} {wrong}")
                ends = (worker, step.peer) if kind is Send else (step.peer, worker)
                if (stage.number, *ends) in found:
                    raise DuplicateMessageError(f"{stage.where(at)}: a second one in this stage")
                found[stage.number, *ends] = step.size
    return found


# Collectives


def collective_of(stage: PlanStage) -> Collective | None:
    """The collective that a worker begins in a stage; None if there is none."""
    return next((step for _, step in stage.of(Collective)), None)


def match_collectives(stages: Read) -> None:
    """Check that all members of a group begin the same collective in the same stage, once, with
    consistent sizes of contributions and results.

    Raises:
        DuplicateMessageError, MissingSendError, CollectiveMismatchError.
    """
    begun: dict[tuple[int, int], Collective] = {}
    for worker, own in stages.items():
        for stage in own:
            _one_at_most(stage)
            mine = collective_of(stage)
            if mine is not None:
                _well_formed(stage, mine)
                begun[stage.number, worker] = mine
    for (number, worker), mine in begun.items():
        _same_everywhere(number, worker, mine, begun)
    for own in stages.values():
        for stage in own:
            if (mine := collective_of(stage)) is not None:
                _sizes_fit(stage, mine)


def _one_at_most(stage: PlanStage) -> None:
    """Check for at most one `Collective` and one `Receive` from `GROUP`, and no `Send` to it."""
    begun = [at for at, step in stage.of(Send) if isinstance(step, Collective)]
    got = [at for at, step in stage.of(Receive) if step.peer == GROUP]
    for at in (*begun[1:], *got[1:]):
        raise DuplicateMessageError(f"{stage.where(at)}: a second one in this stage")
    for at, step in stage.of(Send):
        if isinstance(step, Collective) != (step.peer == GROUP):
            raise CollectiveMismatchError(f"{stage.where(at)}: to the group, and no collective")
    if got and not begun:
        raise MissingSendError(f"{stage.where(got[0])}: and begins no collective")


def _well_formed(stage: PlanStage, mine: Collective) -> None:
    """Check one worker's collective: membership of its group, its root, its numbers of sizes."""
    found = mine.pattern
    if stage.worker not in found.group:
        raise CollectiveMismatchError(
            f"stage {stage.number}, worker {stage.worker}: {found}: it is no member of that group"
        )
    rooted = found.kind in (Kind.BROADCAST, Kind.REDUCE)
    each = len(found.group) if found.kind is Kind.ALL_TO_ALL else 0
    if (
        not found.kind.collective
        or len(found.counts) not in (1, len(found.group))
        or (len(mine.sent), len(mine.received)) != (each, each)
        or (found.root in found.group) != rooted
    ):
        raise CollectiveMismatchError(
            f"stage {stage.number}, worker {stage.worker}: {mine!r}: a collective has one root in "
            f"its group or none, and one size or one for each member"
        )


def _same_everywhere(
    number: int, worker: int, mine: Collective, begun: Mapping[tuple[int, int], Collective]
) -> None:
    what = f"stage {number}, worker {worker}: {mine.pattern}"
    group = mine.pattern.group
    for k, member in enumerate(group):
        theirs = begun.get((number, member))
        if theirs is None:
            raise MissingSendError(f"{what}: worker {member} does not begin it")
        if theirs.pattern != mine.pattern:
            raise CollectiveMismatchError(f"{what}; worker {member} begins {theirs.pattern}")
        if mine.pattern.kind is Kind.ALL_TO_ALL:
            sent, expected = theirs.sent[group.index(worker)], mine.received[k]
            if sent != expected:
                raise CollectiveMismatchError(
                    f"{what}: worker {member} sends {sent} elements, {expected} expected"
                )


def _sizes_fit(stage: PlanStage, mine: Collective) -> None:
    receives = {step.peer: step.size for _, step in stage.of(Receive)}
    given, got = mine.size, receives.get(GROUP, 0)
    every = _sizes(mine, stage.worker)
    if (given, got) not in every:
        texts = " or ".join(f"{a} and {b}" for a, b in every)
        raise CollectiveMismatchError(
            f"stage {stage.number}, worker {stage.worker}: {mine.pattern}: brings and gets {given} "
            f"and {got} elements; {texts} expected"
        )


def _sizes(mine: Collective, worker: int) -> list[tuple[int, int]]:
    """The admissible (contributed, received) numbers of elements of a member of a collective."""
    found = mine.pattern
    own, every = found.count(worker), sum(map(found.count, found.group))
    match found.kind:
        case Kind.BROADCAST:
            return [(own, 0) if worker == found.root else (0, own)]
        case Kind.REDUCE:
            # The root may contribute no term.
            return [(own, own), (0, own)] if worker == found.root else [(own, 0)]
        case Kind.ALL_REDUCE:
            return [(own, own)]
        case Kind.ALL_GATHER:
            return [(own, every)]
        case Kind.REDUCE_SCATTER:
            return [(every, own)]
        case _:
            return [(sum(mine.sent), sum(mine.received))]


def terms(
    found: Pattern, begun: Mapping[int, Collective], receiver: int
) -> Iterator[tuple[int, int, int, int]]:
    """The contributions that a member of a group receives from a collective.

    Args:
        begun: the collectives that the members begin, by worker.

    Yields:
        (sender, start, stop, offset): elements start to stop - 1 of the sender's contribution, and
        their offset in the receiver's result; contributions at equal offsets are summed.
    """
    group, starts = found.group, _starts([found.count(w) for w in found.group])
    me = group.index(receiver)
    for k, worker in enumerate(group):
        size = begun[worker].size
        match found.kind:
            case Kind.BROADCAST if worker != found.root:
                continue
            case Kind.BROADCAST | Kind.REDUCE | Kind.ALL_REDUCE:
                yield worker, 0, size, 0
            case Kind.ALL_GATHER:
                yield worker, 0, size, starts[k]
            case Kind.REDUCE_SCATTER:
                yield worker, starts[me], starts[me + 1], 0
            case _:
                sent, got = _starts(begun[worker].sent), _starts(begun[receiver].received)
                yield worker, sent[me], sent[me + 1], got[k]


def _starts(sizes: Sequence[int]) -> list[int]:
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size)
    return starts


# Deadlocks


def no_cycle(stages: Read) -> None:
    """Check that every wait ends, whatever the relative speed of workers.

    Raises:
        CycleError: workers wait for each other; the message lists all of them.
    """
    done: set[Key] = set()
    runs = {worker: _run(own, done) for worker, own in stages.items()}
    ready = list(runs)
    waiting: dict[int, list[int]] = {}
    asleep: dict[Key, list[int]] = defaultdict(list)
    while ready:
        worker = ready.pop()
        for event in runs[worker]:
            if isinstance(event, tuple):
                for other in asleep.pop(event, ()):
                    waiting.pop(other)
                    ready.append(other)
                continue
            waiting[worker] = [peer for _, peer, _ in event]
            asleep[event[0]].append(worker)
            break
    if waiting:
        said = (f"worker {worker} waits for {waiting[worker]}" for worker in sorted(waiting))
        raise CycleError("; ".join(said))


def _run(stages: Sequence[PlanStage], done: set[Key]) -> Iterator[Key | list[Key]]:
    """Symbolic run of a worker: yields the key of each message it sends, and, while it waits, the
    list of keys that are missing. Beginning a collective is one message to `GROUP`.

    Args:
        done: keys of all messages sent so far, by all workers.
    """
    for stage in stages:
        needed: list[Key] = []
        for step in stage.steps:
            match step:
                case Receive(peer=peer) if peer != GROUP:
                    needed.append((stage.number, peer, stage.worker))
                case Collective():
                    needed += [(stage.number, w, GROUP) for w in step.pattern.group]
                    done.add((stage.number, stage.worker, GROUP))
                    yield stage.number, stage.worker, GROUP
                case Send():
                    done.add((stage.number, stage.worker, step.peer))
                    yield stage.number, stage.worker, step.peer
                case Wait():
                    while missing := [key for key in needed if key not in done]:
                        yield missing
