"""The messages of a schedule: their order on each edge, slots, and deadlock, also of replicas that
meet in group actions.

Actions are executed as far as they go, each worker's in order, without times (Kahn, 1974): which
actions can be executed does not depend on who is faster, so one execution decides for all.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from linop.errors import ArgumentError
from linop.schedules.actions import GROUP, MESSAGES, SENDS, Action, Kind
from linop.schedules.schedule import Schedule, chain
from linop.schedules.schedule_errors import MessageOrderError, ScheduleDeadlockError

Edge = tuple[int, int]
"""Source and target of messages: stage a to b for outputs, b to a for their gradients."""
Sends = int | Mapping[Edge, int] | None
"""Slots of each edge or by edge, 0 for rendezvous; None for sends that never wait."""


@dataclass(frozen=True)
class Step:
    """A send or receive: message `number` of an edge, by position in its worker's row. Or group
    action `number`, which all its members execute at once."""

    position: int
    send: bool
    edge: Edge
    number: int
    peer: int
    """Worker at the other end."""
    members: Sequence[int] = ()
    """Workers of the group, of a group action."""


Steps = list[list[Step]]


def sends_and_receives(schedule: Schedule) -> Steps:
    """Sends and receives of each worker, in order."""
    worker = schedule.placement
    rows = []
    for row in schedule.workers:
        count: dict[tuple[bool, Edge], int] = defaultdict(int)
        steps = []
        for position, action in enumerate(row):
            if action.kind in MESSAGES and action.other is not None:
                send = action.kind in SENDS
                ends = action.stage, action.other
                edge = ends if send else ends[::-1]
                number = count[send, edge]
                count[send, edge] += 1
                steps.append(Step(position, send, edge, number, worker[action.other]))
        rows.append(steps)
    return rows


def joined(replicas: Sequence[Schedule]) -> Steps:
    """Sends, receives and group actions of replicas: workers and stages of the later ones are
    numbered on."""
    stages, workers = replicas[0].stages, len(replicas[0].workers)
    rows = []
    for r, replica in enumerate(replicas):
        for w, steps in enumerate(sends_and_receives(replica)):
            if r:
                steps = [_moved(step, r * stages, r * workers) for step in steps]
            members = range(w, len(replicas) * workers, workers)
            group = [k for k, a in enumerate(replica.workers[w]) if a.kind in GROUP]
            meetings = [Step(k, False, (-1, -1), n, -1, members) for n, k in enumerate(group)]
            rows.append(sorted([*steps, *meetings], key=lambda step: step.position))
    return rows


def _moved(step: Step, stages: int, workers: int) -> Step:
    a, b = step.edge
    return replace(step, edge=(a + stages, b + stages), peer=step.peer + workers)


def edges_of(schedule: Schedule) -> list[Edge]:
    """Source and target of a schedule's messages, each once."""
    sends = (a for row in schedule.workers for a in row if a.kind in SENDS)
    return list(dict.fromkeys((a.stage, a.other) for a in sends if a.other is not None))


def data_edges(schedule: Schedule) -> list[Edge]:
    """Pairs of stages between which data go forward: from each to the next, and those of the
    schedule's messages."""
    return list(dict.fromkeys([*chain(schedule), *edges_of(schedule.only({Kind.SEND_F}))]))


def expect_slots(what: str, slots: object, edges: Collection[Edge]) -> None:
    """Check numbers of slots: one of all edges, or one of each.

    Raises:
        ArgumentError: they are none, or an edge lacks its number.
    """
    given = slots.items() if isinstance(slots, Mapping) else [("each edge", slots)]
    for edge, number in given:
        if not isinstance(number, int) or number < 0:
            raise ArgumentError(f"{what}: at least 0 expected for {edge}, given {number!r}")
    if isinstance(slots, Mapping) and (lacking := [edge for edge in edges if edge not in slots]):
        raise ArgumentError(f"{what}: slots of every edge expected, {lacking} lacking")


def check_message_order(schedule: Schedule, rows: Steps) -> None:
    """The messages of each edge and direction are received in the order in which they are sent.

    Raises:
        MessageOrderError: as it says.
    """
    order: dict[tuple[bool, Edge], list[int | None]] = defaultdict(list)
    for row, steps in zip(schedule.workers, rows, strict=True):
        for step in steps:
            order[step.send, step.edge].append(row[step.position].micro_batch)
    for (send, edge), sent in order.items():
        received = order[False, edge] if send else sent
        if sent != received:
            at = next(i for i, (m, n) in enumerate(zip(sent, received, strict=True)) if m != n)
            raise MessageOrderError(
                f"stage {edge[0]} to stage {edge[1]}: message {at} is sent for micro-batch "
                f"{sent[at]}, received for micro-batch {received[at]}"
            )


def check_deadlock(replicas: Sequence[Schedule], slots: Sends) -> None:
    """All actions can be executed, whichever worker is faster.

    Args:
        replicas: schedules of as many workers, with the same group actions on each.
        slots: largest number of messages sent and not yet received on an edge; 0 for rendezvous,
            where a send waits for its receive; None if sends never wait.

    Raises:
        ScheduleDeadlockError: workers wait for each other in a circle, which it names.
    """
    rows, stages = joined(replicas), replicas[0].stages
    at = [0] * len(rows)
    sent: dict[Edge, int] = defaultdict(int)
    received: dict[Edge, int] = defaultdict(int)

    def limit(edge: Edge) -> int | None:
        return slots[edge[0] % stages, edge[1] % stages] if isinstance(slots, Mapping) else slots

    def head(worker: int) -> Step | None:
        return rows[worker][at[worker]] if at[worker] < len(rows[worker]) else None

    def awaited(step: Step) -> Sequence[int]:
        """Members of a group that are not at its action yet."""
        return [m for m in step.members if (h := head(m)) is None or not h.members]

    def ready(step: Step) -> bool:
        if step.members:
            return not awaited(step)
        number = limit(step.edge)
        if number == 0:  # both ends at once
            other = head(step.peer)
            return other is not None and other.edge == step.edge and other.send != step.send
        if step.send:
            return number is None or step.number < received[step.edge] + number
        return step.number < sent[step.edge]

    runnable = deque(range(len(rows)))
    while runnable:
        worker = runnable.popleft()
        while (step := head(worker)) is not None and ready(step):
            if step.members:
                for member in step.members:
                    at[member] += 1
                runnable.extend(step.members)
                continue
            at[worker] += 1
            if limit(step.edge) == 0:
                at[step.peer] += 1
            elif step.send:
                sent[step.edge] += 1
            else:
                received[step.edge] += 1
            runnable.append(step.peer)
    stuck = next((w for w in range(len(rows)) if head(w) is not None), None)
    if stuck is not None:
        heads = {w: s for w in range(len(rows)) if (s := head(w))}
        waits = {w: awaited(s)[0] if s.members else s.peer for w, s in heads.items()}
        raise _deadlock(replicas, heads, waits, stuck, slots)


def sends_in_words(slots: Sends) -> str:
    """How sends wait, for messages."""
    if slots is None or slots == 0:
        return "eager sends" if slots is None else "rendezvous sends"
    return "the given slots" if isinstance(slots, Mapping) else f"slots an edge: {slots}"


def _deadlock(
    replicas: Sequence[Schedule],
    heads: Mapping[int, Step],
    waits: Mapping[int, int],
    start: int,
    slots: Sends,
) -> ScheduleDeadlockError:
    """The error that names the circle to which waiting from one worker leads.

    Args:
        heads: the step at which each worker waits.
        waits: the worker that it waits for.
    """
    actions = [row for replica in replicas for row in replica.workers]

    def named(worker: int) -> str:
        replica, w = divmod(worker, len(replicas[0].workers))
        return f"worker {w} of replica {replica}" if len(replicas) > 1 else f"worker {w}"

    def done(step: Step, action: Action) -> str:
        if step.members:
            return f"comes to {action}"
        return f"{'receives from' if step.send else 'sends to'} stage {action.stage}"

    path = [start]
    while (after := waits[path[-1]]) not in path:
        path.append(after)
    cycle = [(w, actions[w][heads[w].position]) for w in path[path.index(after) :]]
    parts = [
        f"{named(w)} at {action} waits until {named(waits[w])} {done(heads[w], action)}"
        for w, action in cycle
    ]
    error = ScheduleDeadlockError(f"deadlock with {sends_in_words(slots)}: {'; '.join(parts)}")
    error.cycle = tuple(cycle)
    return error


def slots_needed(rows: Steps) -> dict[Edge, int]:
    """For each edge between two workers and direction, the number of slots with which no send ever
    waits, whatever the times of the actions: the largest number of messages that may be sent and
    not yet received.

    A receive precedes a send for certain if messages lead from one to the other; clocks, a count of
    finished actions of each worker, say so (Mattern, 1988). The schedule must be free of deadlock.
    """
    workers = range(len(rows))
    receives: dict[Edge, list[int]] = defaultdict(list)
    for steps in rows:
        for step in steps:
            if not step.send:
                receives[step.edge].append(step.position)
    clock = [[0] * len(rows) for _ in workers]
    sent: dict[tuple[Edge, int], list[int]] = {}
    needed: dict[Edge, int] = {}
    at = [0] * len(rows)
    runnable = deque(workers)
    while runnable:
        w = runnable.popleft()
        own = clock[w]
        while at[w] < len(rows[w]):
            step = rows[w][at[w]]
            if not step.send and (step.edge, step.number) not in sent:
                break
            if step.send:
                done = bisect_left(receives[step.edge], own[step.peer])
                needed[step.edge] = max(needed.get(step.edge, 0), step.number + 1 - done)
                own[w] = step.position + 1
                sent[step.edge, step.number] = own.copy()
                runnable.append(step.peer)
            else:
                own[:] = map(max, own, sent.pop((step.edge, step.number)))
                own[w] = step.position + 1
            at[w] += 1
    return dict(sorted(needed.items()))
