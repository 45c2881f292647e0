"""The predicted timeline of an operator: when each worker sends, waits, copies and adds.

It is the simulation (`linop.planning.prediction.simulation`) event by event, in the form of a trace
that a backend records, so that one viewer shows both, one below the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from linop import trace_events
from linop.errors import ArgumentError
from linop.normal_form.stages import HasStages
from linop.planning.network import Network
from linop.planning.placement import Placement
from linop.planning.prediction.simulation import StageTimes, simulated
from linop.planning.prediction.trace_picture import duration, trace_picture
from linop.spaces.region import integer
from linop.svg import Picture, short
from linop.writing import written

MOST = 64
"""Workers up to which a timeline is of all; of more it is of the first ones, and of the last."""
_OPERATOR = 400
"""Longest text of an operator in an event, in characters."""


class Event(NamedTuple):
    """A worker's step. `begun` is in seconds from the beginning of the operator.

    Attributes:
        kind: "send", "wait", "copy" or "add".
        peer: the worker that a message is for; else None.
        bytes: that are sent, received, copied or added.
    """

    worker: int
    kind: str
    begun: float
    seconds: float
    peer: int | None = None
    bytes: int | None = None

    @property
    def name(self) -> str:
        """The name in a trace, as a recorded one has it."""
        many = f"{self.bytes} bytes"
        if self.kind == "send":
            return f"send {many} to {self.peer}"
        return "wait for messages" if self.kind == "wait" else self.kind


class Message(NamedTuple):
    """A message between two workers of the timeline, in seconds: when its sender begins, when it
    has left, and when its receiver may have it, not before it has sent its own."""

    sender: int
    receiver: int
    bytes: int
    begun: float
    left: float
    arrived: float


class Timeline:
    """The predicted events of all workers, with their times.

    Attributes:
        operator: its text.
        workers: those that the timeline is of; hidden: the number of the others.
        events: of each worker in order, one worker after the other.
        messages: between these workers.
        time: seconds until all workers are done, the hidden ones, too.

    Example:
        >>> X = linop.TensorSpace((4,), linop.Partition(2))
        >>> found = linop.planning.timeline(linop.shift(X, 1))
        >>> [(m.sender, m.receiver, m.bytes) for m in found.messages]
        [(0, 1, 16), (1, 0, 16)]
        >>> print(found.draw().summary)
        Shift_{+1}: predicted, 10 µs: events of 2 workers over time
    """

    def __init__(
        self,
        operator: str,
        workers: Sequence[int],
        hidden: int,
        events: Sequence[Event],
        messages: Sequence[Message],
        time: float,
    ) -> None:
        self.operator, self.workers, self.hidden = operator, tuple(workers), hidden
        self.events, self.messages, self.time = tuple(events), tuple(messages), time

    def __repr__(self) -> str:
        more = f" of {len(self.workers) + self.hidden}" if self.hidden else ""
        return (
            f"<Timeline of {short(self.operator, 40)}: {len(self.workers)} workers{more}, "
            f"{len(self.events)} events, {self.time:.3g} s>"
        )

    def to_trace(
        self,
        path: str | Path | None = None,
        beside: str | Path | None = None,
        begun: float = 0.0,
    ) -> str:
        """Trace in Chrome's format, as `backend.trace` writes it, with an arrow from each send to
        the wait that it ends.

        Args:
            path: file to write it to.
            beside: a trace that `backend.trace` wrote: its events come first, and each predicted
                worker is shown below the real one.
            begun: seconds of that trace at which the prediction is to begin.

        Raises:
            ArgumentError: a file cannot be read or written, or is no trace.
        """
        before = [] if beside is None else trace_events.recorded(beside)
        return written(path, trace_events.file([*before, *self._trace(begun)]))

    def draw(self) -> Picture:
        """A row for each worker, a box for each event, an arrow for each message."""
        return trace_picture(
            list(self._trace(0.0)),
            f"{short(self.operator, 60)}: predicted, {duration(self.time * 1e6)}",
            f"{self.hidden:,} more workers are not drawn." if self.hidden else "",
        )

    def _repr_html_(self) -> str:
        return self.draw()._repr_html_()

    def _trace(self, begun: float) -> Iterator[dict[str, Any]]:
        first = trace_events.SIMULATED
        text = short(self.operator, _OPERATOR)
        for worker in self.workers:
            name = f"worker {worker}, predicted"
            yield from trace_events.process(first + worker, name, worker)
        for event in self.events:
            about: dict[str, Any] = {"operator": text}
            about |= {} if event.peer is None else {"peer": event.peer}
            about |= {} if event.bytes is None else {"bytes": event.bytes}
            at = first + event.worker, 0
            when = begun + event.begun, event.seconds
            yield trace_events.complete(*at, event.name, "step", *when, about)
        for k, message in enumerate(self.messages):
            middle = (message.begun + message.left) / 2
            source = first + message.sender, 0, begun + middle
            target = first + message.receiver, 0, begun + message.arrived
            yield from trace_events.flow(first + k, f"{message.bytes} bytes", source, target)


def timeline(
    op: HasStages,
    network: Network | None = None,
    placement: Placement | None = None,
    workers: Sequence[int] | None = None,
) -> Timeline:
    """The predicted timeline of one application of an operator, or of a plan's operator
    (``plan.op``): the events whose sums `linop.simulate` gives.

    Each movement stage of a worker is its sends, one after the other, a wait until all messages to
    it are here, and what it copies and adds. Local maps take no time.

    Args:
        op: the operator.
        network: by default the one that `linop.simulate` assumes.
        placement: the machine of each worker; by default all are on one.
        workers: those whose events are wanted; by default all, or of more than 64 the first 63 and
            the last. All take part in the prediction.

    Raises:
        ArgumentError: a worker has no machine, or is none of the operator's. SpaceError: 2**63
            bytes or more are moved.

    Example:
        >>> X = linop.TensorSpace((4,), linop.Partition(2))
        >>> network = linop.planning.Network(latency=1.0, per_byte=0.0, per_byte_copied=0.0)
        >>> events = linop.planning.timeline(linop.shift(X, 1), network).events
        >>> [(event.worker, event.kind, event.begun) for event in events]
        [(0, 'send', 0.0), (0, 'wait', 1.0), (1, 'send', 0.0), (1, 'wait', 1.0)]
    """
    every = op.stages.workers
    some = _chosen(every, workers)
    events: dict[int, list[Event]] = {worker: [] for worker in some}
    messages: list[Message] = []
    watch = partial(_watched, np.array(every, np.int64), frozenset(some), events, messages)
    found = simulated(op, network, placement, watch)
    symbol: Callable[[], str] | None = getattr(op, "symbol", None)
    text = "operator" if symbol is None else symbol()
    in_order = [event for worker in some for event in events[worker]]
    return Timeline(text, some, len(every) - len(some), in_order, messages, found.time)


def _chosen(every: Sequence[int], workers: Sequence[int] | None) -> tuple[int, ...]:
    if workers is None:
        return tuple(every) if len(every) <= MOST else (*every[: MOST - 1], every[-1])
    numbers = tuple(sorted({integer(worker, "timeline: workers") for worker in workers}))
    unknown = sorted(set(numbers) - set(every))
    if unknown:
        raise ArgumentError(
            f"timeline: worker {unknown[0]} given; the operator is of {len(every)} workers"
        )
    return numbers


def _watched(
    workers: np.ndarray,
    some: frozenset[int],
    events: dict[int, list[Event]],
    messages: list[Message],
    stage: StageTimes,
) -> None:
    """Add the events of a stage, and its messages between the workers that are wanted."""
    number = {w: k for k, w in enumerate(workers.tolist()) if w in some}
    of_sender, to_receiver = (
        np.isin(ends, list(number.values())) for ends in (stage.senders, stage.receivers)
    )
    coming = np.bincount(stage.receivers, stage.sizes, len(workers)).astype(np.int64)
    some_come = np.bincount(stage.receivers, minlength=len(workers)) > 0
    mine = np.flatnonzero(of_sender)
    mine = mine[np.lexsort((stage.receivers[mine], stage.senders[mine]))]
    own: dict[int, list[int]] = {}
    for k in mine.tolist():
        own.setdefault(int(stage.senders[k]), []).append(k)
    for worker, at in number.items():
        row, begun = events[worker], float(stage.begun[at])
        gone, here = float(stage.gone[at]), float(stage.here[at])
        sent = own.get(at, [])
        total = float(stage.each[sent].sum()) if sent else 0.0
        # Where a machine's link is the limit, its messages take longer than their own times.
        stretch = (gone - begun) / total if total else 0.0
        for k in sent:
            seconds = float(stage.each[k]) * stretch
            receiver, size = int(workers[stage.receivers[k]]), int(stage.sizes[k])
            row.append(Event(worker, "send", begun, seconds, receiver, size))
            if to_receiver[k]:
                left = begun + seconds
                ready, until = (float(t[stage.receivers[k]]) for t in (stage.gone, stage.here))
                arrived = min(max(left, ready), until)
                messages.append(Message(worker, receiver, size, begun, left, arrived))
            begun += seconds
        if some_come[at]:
            row.append(Event(worker, "wait", gone, here - gone, bytes=int(coming[at])))
        for kind, took in (("copy", stage.copying), ("add", stage.adding)):
            if seconds := float(took[at]):
                row.append(Event(worker, kind, here, seconds))
                here += seconds
