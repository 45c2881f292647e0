"""Completeness and order of a schedule: every action once, every message with its other end, and
each action after what it needs on its own worker."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from linop.schedules.actions import COMPUTE, GROUP, MESSAGES, RECEIVES, Action, Kind, message
from linop.schedules.schedule import Schedule
from linop.schedules.schedule_errors import (
    DependencyError,
    DuplicateActionError,
    MissingActionError,
    PlacementError,
    UnmatchedMessageError,
)

Edges = Sequence[tuple[int, int]]
Key = tuple[int, Kind, int | None, int | None]
"""Stage, kind, micro-batch, and for messages the stage at the other end."""
Places = dict[Key, int]
"""Index of each computation and message in its worker's row."""
_SHARDED = COMPUTE | {Kind.UNSHARD, Kind.RESHARD, Kind.UPDATE}
_KEYED = COMPUTE | MESSAGES
F, B = Kind.FORWARD, Kind.BACKWARD
I, W = Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT  # noqa: E741  the field's letters


def places(schedule: Schedule) -> Places:
    """Index of each computation and message in its worker's row.

    Raises:
        PlacementError, DuplicateActionError: as those say.
    """
    found: Places = {}
    for worker, row in enumerate(schedule.workers):
        for index, action in enumerate(row):
            first = schedule.placement[action.stage]
            if first != worker:
                raise PlacementError(
                    f"worker {worker}: {action}, but stage {action.stage} is on worker {first}"
                )
            if action.kind not in _KEYED:
                continue
            key = key_of(action)
            if key in found:
                raise DuplicateActionError(
                    f"worker {worker}: {action} at positions {found[key]} and {index}"
                )
            found[key] = index
    return found


def key_of(action: Action) -> Key:
    """The key of a computation or message."""
    return action.stage, action.kind, action.micro_batch, action.other


def backward_of(stage: int, micro_batch: int, at: Places) -> Action:
    """The action that makes the gradient of a stage's input: B, or its half I."""
    kind = B if (stage, B, micro_batch, None) in at else I
    return Action(stage, kind, micro_batch)


def has_backwards(schedule: Schedule) -> bool:
    """False for schedules of forwards alone, as evaluation runs them."""
    return any(action.kind in (B, I, W) for row in schedule.workers for action in row)


def check_computations(schedule: Schedule, at: Places) -> None:
    """Every forward once, and, if there are backwards at all, each as B or as both I and W.

    Raises:
        MissingActionError, DuplicateActionError: as those say.
    """
    backwards = has_backwards(schedule)
    for m in range(schedule.micro_batches):
        for s in range(schedule.stages):
            has = [kind for kind in (F, B, I, W) if (s, kind, m, None) in at]
            if F not in has:
                raise MissingActionError(f"stage {s}: no forward {s}F{m}")
            if B in has and len(has) > 2:
                raise DuplicateActionError(
                    f"stage {s}: {s}B{m} beside {s}{has[2]}{m}; expected B, or I and W"
                )
            if backwards and has not in ([F, B], [F, I, W]):
                wanted = {I: f"{s}W{m}", W: f"{s}I{m}", F: f"{s}B{m}"}[has[-1]]
                raise MissingActionError(f"stage {s}: no backward {wanted}")


def check_messages(schedule: Schedule, at: Places, edges: Edges) -> None:
    """On every edge between two workers, a send and a receive of each micro-batch and direction.

    Raises:
        UnmatchedMessageError: as it says.
    """
    worker = schedule.placement
    backwards = has_backwards(schedule)
    expected: set[Key] = set()
    for a, b in edges:
        if worker[a] == worker[b]:
            continue
        for m in range(schedule.micro_batches):
            ends = [(message(a, Kind.SEND_F, m, b), message(b, Kind.RECV_F, m, a))]
            if backwards:
                ends.append((message(b, Kind.SEND_B, m, a), message(a, Kind.RECV_B, m, b)))
            for send, receive in ends:
                expected |= {key_of(send), key_of(receive)}
                if key_of(send) not in at or key_of(receive) not in at:
                    raise UnmatchedMessageError(_unmatched(send, receive, at, worker))
    for row in schedule.workers:
        for action in row:
            if action.kind in MESSAGES and key_of(action) not in expected:
                raise UnmatchedMessageError(
                    f"worker {worker[action.stage]}: {action}, but data between stages "
                    f"{action.stage} and {action.other} cross no edge between two workers"
                )


def _unmatched(send: Action, receive: Action, at: Places, worker: Mapping[int, int]) -> str:
    has, lacks = (send, receive) if key_of(send) in at else (receive, send)
    if key_of(has) in at:
        return f"worker {worker[has.stage]}: {has}, but worker {worker[lacks.stage]} lacks {lacks}"
    return (
        f"stages {send.stage} and {receive.stage}: on workers {worker[send.stage]} and "
        f"{worker[receive.stage]}, but neither {send} nor {receive}"
    )


def needs(action: Action, at: Places, worker: Mapping[int, int], edges: Edges) -> Iterator[Action]:
    """Actions of the same worker whose results an action needs."""
    s, kind, m = action.stage, action.kind, action.micro_batch
    if m is None or kind in RECEIVES or kind not in _KEYED:
        return
    if kind == F:
        for a, b in edges:
            if b == s:
                here = worker[a] == worker[s]
                yield Action(a, F, m) if here else message(s, Kind.RECV_F, m, a)
    elif kind in (B, I):
        yield Action(s, F, m)
        for a, b in edges:
            if a == s:
                here = worker[b] == worker[s]
                yield backward_of(b, m, at) if here else message(s, Kind.RECV_B, m, b)
    elif kind == W:
        yield Action(s, I, m)
    else:
        yield Action(s, F, m) if kind == Kind.SEND_F else backward_of(s, m, at)


def check_dependencies(schedule: Schedule, at: Places, edges: Edges) -> None:
    """Every action after those of its worker whose results it needs; and if its stage has any
    UNSHARD and RESHARD, computations between them and updates outside.

    Raises:
        DependencyError: as it says.
    """
    ends = neighbours(edges)
    for worker, row in enumerate(schedule.workers):
        sharded: dict[int, bool] = {}
        for action in reversed(row):  # in the end: the state before a stage's first group action
            if action.kind in (Kind.UNSHARD, Kind.RESHARD):
                sharded[action.stage] = action.kind == Kind.UNSHARD
        for index, action in enumerate(row):
            for needed in needs(action, at, schedule.placement, ends[action.stage]):
                if at[key_of(needed)] > index:
                    raise DependencyError(f"worker {worker}: {action} before {needed}")
            wanted = action.kind in (Kind.UNSHARD, Kind.UPDATE)
            if action.stage in sharded and action.kind in _SHARDED:
                if sharded[action.stage] != wanted:
                    now = "unsharded" if wanted else "sharded"
                    raise DependencyError(
                        f"worker {worker}: {action} at position {index}, where stage "
                        f"{action.stage} is {now}"
                    )
                if action.kind in GROUP:
                    sharded[action.stage] = not wanted


def neighbours(edges: Edges) -> dict[int, list[tuple[int, int]]]:
    """Edges of each stage."""
    found: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for edge in edges:
        for stage in edge:
            found[stage].append(edge)
    return found
