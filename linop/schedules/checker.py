"""The check of a schedule before it runs: `check`, and what it proves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Literal

from linop.errors import ArgumentError, expect
from linop.schedules.actions import MESSAGES
from linop.schedules.completeness import (
    check_computations,
    check_dependencies,
    check_messages,
    places,
)
from linop.schedules.live_memory import Sizes, expect_sizes, peak_bytes, peaks
from linop.schedules.message_flow import (
    Edge,
    Sends,
    check_deadlock,
    check_message_order,
    expect_slots,
    sends_and_receives,
    sends_in_words,
    slots_needed,
)
from linop.schedules.parameter_use import check_groups, check_updates, check_versions
from linop.schedules.schedule import Schedule, chain, expect_edges, with_messages
from linop.schedules.schedule_errors import EdgeMismatchError, MemoryLimitError


@dataclass(frozen=True)
class CheckedSchedule:
    """A schedule that `check` accepted, and what it found.

    Attributes:
        schedule: the schedule, with its messages.
        proven: a sentence for each property that holds.
        activations: by stage, the largest number of micro-batches between forward and backward.
        versions: by stage, the largest number of versions of the parameters that are kept.
        slots: by edge between two workers, stages (a, b) for outputs and (b, a) for their
            gradients, the number of slots with which no send ever waits, whatever the times.
        peak_bytes: of each worker, its largest number of live bytes; empty without sizes.

    Example:
        The first of two stages holds the activations of two micro-batches in 1F1B, of all in GPipe:

        >>> schedules = linop.schedules
        >>> schedules.check(schedules.one_forward_one_backward(2, 8)).activations
        {0: 2, 1: 1}
        >>> proven = schedules.check(schedules.gpipe(2, 8))
        >>> proven.activations, proven.proven[-1]
        ({0: 8, 1: 8}, 'no deadlock with eager sends')
    """

    schedule: Schedule
    proven: tuple[str, ...]
    activations: Mapping[int, int]
    versions: Mapping[int, int]
    slots: Mapping[Edge, int]
    peak_bytes: tuple[float, ...] = ()


def check(
    schedule: Schedule,
    *,
    edges: Sequence[Edge] | None = None,
    sends: Literal["eager", "rendezvous"] | int | Mapping[Edge, int] = "eager",
    shapes: Mapping[Edge, tuple[object, object]] | None = None,
    versions: int | Mapping[int, int] | None = None,
    replicas: Sequence[Schedule] = (),
    sizes: Sizes | None = None,
    limit: float | Sequence[float] | None = None,
) -> CheckedSchedule:
    r"""Prove that a schedule can be run, and that it computes the gradients of every micro-batch;
    of forwards alone, their outputs.

    The checks are made in the order of the errors below. Nothing is executed, no time is assumed:
    what is accepted ends whatever the times of the actions.

    Args:
        schedule: a schedule of computations, which gets its messages by `with_messages`, or one
            with messages.
        edges: pairs of stages between which data go forward, and gradients back; by default from
            each stage to the next.
        sends: ``"eager"`` if they never wait; a number of slots, of each edge or by edge as in
            `CheckedSchedule.slots`, if they wait while so many messages are sent and not received;
            ``"rendezvous"``, or 0 slots, if they wait for the receive.
        shapes: by edge, what its stages send and expect, each a shape, dtype or pair or tuple of
            them; compared by ``==``.
        versions: largest number of versions of its parameters that a stage keeps, of each or by
            stage; by default as many as are read.
        replicas: schedules of the other members of the groups that run UNSHARD, RESHARD and
            REDUCE_GRAD together, worker by worker; they are checked, too.
        sizes: for the prediction of memory.
        limit: largest number of live bytes, of each worker or one for each.

    Raises:
        PlacementError: a stage is on two workers.
        DuplicateActionError, MissingActionError: an action occurs twice, or not at all.
        UnmatchedMessageError: a send or receive lacks its other end, or its edge.
        DependencyError: an action precedes one of its worker whose result it needs.
        UpdateError: updates do not take in every gradient, once, on all stages alike.
        VersionError: forward and backward read two versions of the parameters.
        MissingVersionError: a version is read before it exists, or after it is kept.
        EdgeMismatchError: shapes or dtypes differ at the ends of an edge.
        MessageOrderError: messages of an edge are received in another order than sent.
        GroupOrderError: members of a group run its actions in different orders.
        ScheduleDeadlockError: workers wait for each other in a circle.
        MemoryLimitError: live bytes exceed the limit.
        ArgumentError: an argument does not fit the schedule.

    Example:
        Both workers send at once. That hangs where a send waits for its receive:

        >>> table = linop.schedules.Schedule.from_csv(
        ...     "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
        ...     "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1"
        ... )
        >>> linop.schedules.check(table).activations
        {0: 2, 1: 1}
        >>> linop.schedules.check(table, sends="rendezvous")
        Traceback (most recent call last):
        linop.schedules.schedule_errors.ScheduleDeadlockError: ...
    """
    stages = range(expect("schedule", schedule, Schedule).stages)
    at = places(schedule)
    check_computations(schedule, at)
    if edges is None:
        edges = chain(schedule)
    edges = expect_edges(schedule, edges)
    _check_arguments(schedule, edges, shapes, sizes, limit)
    on = schedule.placement
    given = _slots(sends, [e for a, b in edges if on[a] != on[b] for e in ((a, b), (b, a))])
    if not any(action.kind in MESSAGES for row in schedule.workers for action in row):
        schedule = with_messages(schedule, edges)
        at = places(schedule)
    check_messages(schedule, at, edges)
    check_dependencies(schedule, at, edges)
    check_updates(schedule)
    check_versions(schedule, _kept(stages, versions))
    for edge, (sent, expected) in (shapes or {}).items():
        if sent != expected:
            raise EdgeMismatchError(
                f"stage {edge[0]} sends {sent}, but stage {edge[1]} expects {expected}"
            )
    rows = sends_and_receives(schedule)
    check_message_order(schedule, rows)
    check_groups(schedule, replicas)
    check_deadlock([schedule], given)
    others = [
        check(other, edges=edges, sends=sends).schedule for other in replicas if other != schedule
    ]
    if others:
        check_deadlock([schedule, *others], given)
    activations, live_versions = peaks(schedule)
    slots = slots_needed(rows)
    used = dict.fromkeys(slots, given) if isinstance(given, int) else given or slots
    found = peak_bytes(schedule, sizes, used) if sizes is not None else []
    for worker, (peak, position) in enumerate(found):
        most = limit[worker] if isinstance(limit, Sequence) else limit
        if most is not None and peak > most:
            raise MemoryLimitError(
                f"worker {worker}: {peak:,.0f} bytes live at {schedule.workers[worker][position]}, "
                f"{most:,.0f} allowed"
            )
    proven = _proven(schedule, given, shapes, replicas, limit)
    most_bytes = tuple(peak for peak, _ in found)
    return CheckedSchedule(schedule, proven, activations, live_versions, slots, most_bytes)


def _check_arguments(
    schedule: Schedule,
    edges: Sequence[Edge],
    shapes: Mapping[Edge, tuple[object, object]] | None,
    sizes: Sizes | None,
    limit: float | Sequence[float] | None,
) -> None:
    if not isinstance(shapes, Mapping | None):
        raise ArgumentError(f"shapes: pairs by edge expected, given {shapes!r}")
    for edge, ends in (shapes or {}).items():
        if edge not in edges:
            raise ArgumentError(f"shapes: {edge} is none of the edges {list(edges)}")
        if not (isinstance(ends, list | tuple) and len(ends) == 2):
            raise ArgumentError(
                f"shapes: what is sent and what is expected, of {edge} expected, given {ends!r}"
            )
    if sizes is None:
        if limit is not None:
            raise ArgumentError("limit: sizes expected, without which no bytes can be predicted")
        return
    expect_sizes(sizes, schedule)
    crossing = {*edges, *((b, a) for a, b in edges)}
    for edge in sizes.messages:
        if edge not in crossing:
            raise ArgumentError(f"sizes: messages {edge} are of none of the edges {list(edges)}")
    if isinstance(limit, Sequence) and len(limit) != len(schedule.workers):
        raise ArgumentError(
            f"limit: {len(schedule.workers)} numbers expected, one a worker, given {len(limit)}"
        )
    for most in limit if isinstance(limit, Sequence) else (limit,):
        if most is not None and (not isinstance(most, Real) or most != most):
            raise ArgumentError(f"limit: numbers expected, given {most!r}")


def _kept(stages: range, versions: int | Mapping[int, int] | None) -> Mapping[int, int]:
    """Largest number of versions, by stage."""
    if versions is None:
        return {}
    given = versions if isinstance(versions, Mapping) else dict.fromkeys(stages, versions)
    for stage, number in given.items():
        if stage not in stages or not isinstance(number, int) or number < 1:
            raise ArgumentError(
                f"versions: at least 1 expected, of a stage up to {stages[-1]}, given {number!r} "
                f"of {stage!r}"
            )
    return given


def _slots(sends: object, crossing: Sequence[Edge]) -> Sends:
    """Slots of the edges between workers."""
    if sends in ("eager", "rendezvous"):
        return None if sends == "eager" else 0
    if not isinstance(sends, Mapping | int):
        raise ArgumentError(f"sends: 'eager', 'rendezvous' or slots expected, given {sends!r}")
    expect_slots("sends", sends, crossing)
    return sends


def _proven(
    schedule: Schedule, given: Sends, shapes: object, replicas: object, limit: object
) -> tuple[str, ...]:
    texts = {
        f"every action of {schedule.stages} stages and {schedule.micro_batches} micro-batches, "
        "once": True,
        "every action after those that it needs": True,
        "every send with its receive, in the same order": True,
        "forward and backward of a micro-batch read one version of the parameters": True,
        "shapes and dtypes of the edges agree": shapes is not None,
        f"no deadlock with {sends_in_words(given)}": True,
        "group actions in one order on all replicas": bool(replicas),
        "live bytes within the limit": limit is not None,
    }
    return tuple(text for text, holds in texts.items() if holds)
