"""Simulation of a schedule: when each action begins and ends, and what is idle meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from heapq import heapify, heappop, heappush, heapreplace
from pathlib import Path
from typing import NamedTuple

from linop.caching import cached_property
from linop.errors import ArgumentError, expect
from linop.planning.network import Network
from linop.schedules import pictures
from linop.schedules.actions import COMPUTE, MESSAGES, RECEIVES, SENDS, Action, Kind
from linop.schedules.costs import USUAL, Costs, Edges, Number, of_computations, of_messages
from linop.schedules.dependencies import Dependencies
from linop.schedules.live_memory import Sizes, expect_sizes, peak_bytes
from linop.schedules.message_flow import Sends, edges_of, expect_slots
from linop.schedules.schedule import Schedule, expect_edges, with_messages
from linop.schedules.schedule_errors import ScheduleDeadlockError
from linop.svg import Picture
from linop.text import aligned
from linop.writing import written

WORK = COMPUTE | {Kind.UPDATE}
"""Kinds that count as work of a worker; the rest of its time is its bubble."""


class Timed(NamedTuple):
    """An action with its times."""

    action: Action
    start: Number
    end: Number


@dataclass(frozen=True, eq=False)
class Simulation:
    """Predicted times of a schedule, in the unit of its costs.

    Attributes:
        schedule: with its messages.
        workers: of each worker its actions in order; a message beside computation begins when it
            is sent.

    Example:
        >>> found = linop.schedules.simulate(linop.schedules.gpipe(2, 4), {"F": 1, "B": 2})
        >>> found.time, found.busy, found.idle, found.peak_activations
        (15, (12, 12), (3, 3), (4, 4))
    """

    schedule: Schedule
    workers: tuple[tuple[Timed, ...], ...]

    @cached_property
    def time(self) -> Number:
        """Time at which the last action ends."""
        return max((timed.end for row in self.workers for timed in row), default=0)

    @cached_property
    def busy(self) -> tuple[Number, ...]:
        """Time that each worker computes or updates."""
        return tuple(
            sum(each.end - each.start for each in row if each.action.kind in WORK)
            for row in self.workers
        )

    @property
    def idle(self) -> tuple[Number, ...]:
        """Time that each worker does not: its bubble. It waits, or sends what is not overlapped."""
        return tuple(self.time - busy for busy in self.busy)

    @property
    def bubble_of_total(self) -> Number:
        """Idle time of all workers, of all their time: GPipe's fraction, (p−1)/(M+p−1)."""
        return _ratio(sum(self.idle), self.time * len(self.workers))

    @property
    def bubble_of_ideal(self) -> Number:
        """Idle time of all workers, of their work: Megatron's fraction, (p−1)/M."""
        return _ratio(sum(self.idle), sum(self.busy))

    def peak_bytes(self, sizes: Sizes) -> tuple[float, ...]:
        """Largest number of live bytes of each worker, without the slots of messages. Time has no
        part in it. With sizes of boundaries, activations are recomputed."""
        expect_sizes(sizes, self.schedule)
        return tuple(peak for peak, _ in peak_bytes(self.schedule, sizes, {}))

    @property
    def peak_activations(self) -> tuple[float, ...]:
        """Most micro-batches between forward and backward at a time, of each worker: of all of its
        stages together."""
        return self.peak_bytes(Sizes([1] * self.schedule.stages))

    def to_svg(self, path: str | Path | None = None) -> str:
        """Picture of all workers over time, as SVG; written to a file if one is given."""
        return written(path, pictures.svg(self))

    def draw(self) -> Picture:
        """The picture of `to_svg`, which a notebook shows."""
        return pictures.picture(self)

    def _repr_html_(self) -> str:
        return self.draw()._repr_html_()

    def to_trace(
        self,
        path: str | Path | None = None,
        beside: str | Path | None = None,
        begun: float = 0.0,
    ) -> str:
        """Trace in Chrome's format, as `backend.trace` writes it; costs are taken for seconds.

        Args:
            path: file to write it to.
            beside: a trace that `backend.trace` wrote: its events come first, and each simulated
                worker is shown below the real one.
            begun: seconds of that trace at which the simulation is to begin.
        """
        return written(path, pictures.trace(self, beside, begun))

    def __str__(self) -> str:
        peaks = self.peak_activations
        rows: list[tuple[str, ...]] = [("worker", "actions", "work", "idle", "peak activations")]
        rows += [
            (str(w), str(len(row)), *(f"{float(x):.6g}" for x in numbers))
            for w, (row, *numbers) in enumerate(
                zip(self.workers, self.busy, self.idle, peaks, strict=True)
            )
        ]
        head = (
            f"{self.schedule.name}: time {float(self.time):.6g}, bubble "
            f"{float(self.bubble_of_total):.1%} of the total, "
            f"{float(self.bubble_of_ideal):.1%} of the ideal"
        )
        return "\n".join([head, *aligned(rows)])


def simulate(
    schedule: Schedule,
    costs: Costs = USUAL,
    *,
    edges: Edges = 0,
    network: Network | None = None,
    overlap: bool = True,
    slots: Sends = None,
    cores: int | None = None,
    recompute: bool = False,
) -> Simulation:
    """Simulate one execution of a schedule, without running it.

    A worker executes its actions in order, each as soon as its data are there. Workers wait for a
    free core in the order in which they become ready, the lower worker first, and keep it until the
    action ends.

    Args:
        schedule: if it has no messages, it gets them by `with_messages`.
        costs: of each computation, update and group action, by kind, by (stage, kind), or as a
            function of the action. Updates and group actions are free, and B is I + W, if they are
            not given. By default F, I and W take 1, and B takes 2.
        edges: time of a message: a number, a function of the send, an operator (that moves the data
            forward; its adjoint moves gradients), or a mapping of these by pair of stages. Its
            pairs are then the stages between which data go; otherwise each stage sends to the next,
            and where the schedule has messages.
        network: for operators; by default the one that `linop.simulate` assumes.
        overlap: messages go beside computation, those from one worker to another one after the
            other. Otherwise the sender works on them, and the receiver waits where it receives.
        slots: a send waits until at most this number of messages of its edge, itself included, are
            not received yet: of each edge, or by edge, as `check` finds them; 0 for rendezvous,
            None for sends that never wait. Beside computation (`overlap`) a send that waits does
            not stop its worker.
        cores: number of computations, updates and (without overlap) messages at a time; None for a
            core of each worker.
        recompute: backwards repeat their forward first.

    Raises:
        ArgumentError: a cost is missing, negative or no number, a number is too small, or an edge
            is of a stage that is not there.
        DuplicateActionError: an action occurs twice.
        MissingActionError: an action needs one that no worker executes.
        UnmatchedMessageError: a receive lacks its send, or a send that may wait its receive.
        ScheduleDeadlockError: actions wait for each other in a circle.

    Example:
        A forward takes 1, a backward 2. The same bubble, (p − 1)/(M + p − 1), and less memory:

        >>> schedules = linop.schedules
        >>> for make in (schedules.gpipe, schedules.one_forward_one_backward):
        ...     found = schedules.simulate(make(2, 4), {"F": 1, "B": 2})
        ...     print(found.time, float(found.bubble_of_total), found.peak_activations)
        15 0.2 (4, 4)
        15 0.2 (2, 1)
    """
    expect("schedule", schedule, Schedule)
    if cores is not None and not (isinstance(cores, int) and cores >= 1):
        raise ArgumentError(f"cores: at least 1, or None, expected; given {cores!r}")
    pairs = expect_edges(schedule, edges) if isinstance(edges, Mapping) else None
    if not any(action.kind in MESSAGES for row in schedule.workers for action in row):
        schedule = with_messages(schedule, pairs)
    if slots is not None:
        expect_slots("slots", slots, edges_of(schedule))
    graph = Dependencies.of(schedule, pairs, overlap, slots)
    compute, send = of_computations(costs, recompute), of_messages(edges, network)
    durations: list[Number] = []
    on_core: list[bool] = []
    for action in graph.actions:
        if action.kind in RECEIVES:
            durations.append(0)
        else:
            durations.append(send(action) if action.kind in SENDS else compute(action))
        beside = overlap and action.kind in MESSAGES
        on_core.append(not beside and durations[-1] > 0)
    times = _times(graph, durations, on_core, cores)
    rows = _rows(schedule, graph.actions, times)
    return Simulation(schedule, tuple(rows))


def _times(
    graph: Dependencies, durations: Sequence[Number], on_core: Sequence[bool], cores: int | None
) -> list[tuple[Number, Number]]:
    """(start, end) of every action: a queue of those that are ready, the first to be ready first,
    before as many servers as there are cores."""
    waits = [len(needs) for needs in graph.needs]
    times: list[tuple[Number, Number] | None] = [None] * len(waits)
    ready_at: list[Number] = [0] * len(waits)
    # of those ready at one time, what takes no core comes first: it may make others ready then
    ready = [(ready_at[k], on_core[k], k) for k, many in enumerate(waits) if not many]
    heapify(ready)
    free: list[Number] = [0] * min(cores or 0, len(waits))  # a heap: when each core is free
    followers = graph.followers
    while ready:
        start, _, k = heappop(ready)
        if cores is not None and on_core[k]:
            start = max(start, free[0])
            heapreplace(free, start + durations[k])
        end = start + durations[k]
        times[k] = start, end
        for other in followers[k]:
            if end > ready_at[other]:
                ready_at[other] = end
            waits[other] -= 1
            if not waits[other]:
                heappush(ready, (ready_at[other], on_core[other], other))
    if None in times:
        raise _deadlock(graph, [k for k, time in enumerate(times) if time is None])
    return [time for time in times if time is not None]


def _deadlock(graph: Dependencies, stuck: Sequence[int]) -> ScheduleDeadlockError:
    cycle = graph.cycle(stuck)
    waits = " waits for ".join(str(graph.actions[k]) for k in (*cycle, cycle[0]))
    error = ScheduleDeadlockError(
        f"actions wait for each other: {waits}; change their order, or give the edges more slots"
    )
    error.cycle = tuple((graph.workers[k], graph.actions[k]) for k in cycle)
    return error


def _rows(
    schedule: Schedule, actions: Sequence[Action], times: Sequence[tuple[Number, Number]]
) -> Iterator[tuple[Timed, ...]]:
    each = (Timed(action, *time) for action, time in zip(actions, times, strict=True))
    for row in schedule.workers:
        yield tuple(next(each) for _ in row)


def _ratio(part: Number, whole: Number) -> Number:
    """A fraction, exact if both numbers are; 0 of nothing."""
    if not whole:
        return 0
    return part / whole if isinstance(part + whole, float) else Fraction(part) / whole
