"""Dependencies between the actions of a schedule: which must end before which begins."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from linop.caching import cached_property
from linop.schedules.actions import COMPUTE, MESSAGES, RECEIVES, SENDS, Action, Kind
from linop.schedules.message_flow import Edge, Sends, data_edges
from linop.schedules.schedule import Schedule
from linop.schedules.schedule_errors import (
    DuplicateActionError,
    MissingActionError,
    UnmatchedMessageError,
)

_SEND_OF = {Kind.RECV_F: Kind.SEND_F, Kind.RECV_B: Kind.SEND_B}
_RECEIVE_OF = {send: receive for receive, send in _SEND_OF.items()}
_BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT)  # in order, which a set has not
Message = tuple[int, int, Kind, int | None]
"""Sending stage, receiving stage, kind of the send or receive, micro-batch."""


@dataclass(frozen=True, eq=False)
class Dependencies:
    """Actions of all workers, those of worker 0 first, with the worker of each, and the numbers of
    those that each needs."""

    workers: tuple[int, ...]
    actions: tuple[Action, ...]
    needs: tuple[tuple[int, ...], ...]

    @cached_property
    def followers(self) -> list[list[int]]:
        """The numbers of the actions that need each action."""
        found: list[list[int]] = [[] for _ in self.actions]
        for k, needs in enumerate(self.needs):
            for other in needs:
                found[other].append(k)
        return found

    def cycle(self, among: Sequence[int]) -> list[int]:
        """A circle of actions, each of which waits for the next.

        Args:
            among: actions of which each needs another.
        """
        stuck, path = set(among), [among[0]]
        while True:
            path.append(next(k for k in self.needs[path[-1]] if k in stuck))
            if path[-1] in path[:-1]:
                return path[path.index(path[-1]) : -1]

    @classmethod
    def of(
        cls,
        schedule: Schedule,
        edges: Sequence[tuple[int, int]] | None = None,
        overlap: bool = True,
        slots: Sends = None,
    ) -> Dependencies:
        """Dependencies of a schedule with messages: those of its data, the order of each worker,
        and of messages the order of their channel and its slots.

        Args:
            edges: pairs of stages between which data go; by default from each stage to the next,
                and those of the messages.
            overlap: messages do not delay the actions that follow them on their worker.
            slots: number of messages that may be sent and not received, of each edge or by
                (sending stage, receiving stage); 0 for rendezvous, None for any.

        Raises:
            DuplicateActionError, MissingActionError, UnmatchedMessageError: as those say.
        """
        actions = tuple(action for row in schedule.workers for action in row)
        if edges is None:
            edges = data_edges(schedule)
        workers = tuple(w for w, row in enumerate(schedule.workers) for _ in row)
        builder = _Builder(actions, schedule.placement, list(edges))
        for k, action in enumerate(actions):
            builder.needs[k] += builder.data(action)
        builder.orders(schedule, overlap, slots)
        needs = tuple(tuple(dict.fromkeys(each)) for each in builder.needs)
        return cls(workers, actions, needs)


@dataclass
class _Builder:
    actions: Sequence[Action]
    placement: dict[int, int]
    edges: list[tuple[int, int]]
    needs: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.needs = [[] for _ in self.actions]
        self.at: dict[tuple[int, Kind, int | None], int] = {}
        self.messages: dict[Message, int] = {}
        self.before: defaultdict[int, list[int]] = defaultdict(list)
        self.after: defaultdict[int, list[int]] = defaultdict(list)
        for a, b in self.edges:
            self.before[b].append(a)
            self.after[a].append(b)
        for k, action in enumerate(self.actions):
            if action.kind in COMPUTE:
                self._new(self.at, (action.stage, action.kind, action.micro_batch), k)
            elif action.kind in MESSAGES:
                self._new(self.messages, _message(action), k)

    def _new(self, found: dict, key: tuple, k: int) -> None:  # type: ignore[type-arg]
        if key in found:
            raise DuplicateActionError(f"{self.actions[k]}: twice in the schedule; expected once")
        found[key] = k

    def data(self, action: Action) -> Iterable[int]:
        """The actions whose data an action reads."""
        stage, kind, m = action.stage, action.kind, action.micro_batch
        if kind == Kind.FORWARD:
            yield from (self._output(action, Kind.RECV_F, other) for other in self.before[stage])
        elif kind in _BACKWARDS:
            yield self._made(action, stage, (Kind.FORWARD,))
            yield from (self._output(action, Kind.RECV_B, other) for other in self.after[stage])
        elif kind == Kind.BACKWARD_WEIGHT:
            yield self._made(action, stage, (Kind.BACKWARD_INPUT,))
        elif kind == Kind.SEND_F:
            yield self._made(action, stage, (Kind.FORWARD,))
        elif kind == Kind.SEND_B:
            yield self._made(action, stage, _BACKWARDS)
        elif kind in RECEIVES:
            send = _other(action), stage, _SEND_OF[kind], m
            if send not in self.messages:
                raise UnmatchedMessageError(
                    f"{action}: no worker sends it; expected a send from stage {action.other} to "
                    f"stage {stage}"
                )
            yield self.messages[send]

    def _output(self, action: Action, receive: Kind, other: int) -> int:
        """The receive of another stage's data if there is one, else what makes them."""
        stage, m = action.stage, action.micro_batch
        message = self.messages.get((other, stage, receive, m))
        if message is not None:
            return message
        made = (Kind.FORWARD,) if receive == Kind.RECV_F else _BACKWARDS
        return self._made(action, other, made)

    def _made(self, action: Action, stage: int, kinds: tuple[Kind, ...]) -> int:
        for kind in kinds:
            k = self.at.get((stage, kind, action.micro_batch))
            if k is not None:
                return k
        wanted = " or ".join(str(Action(stage, kind, action.micro_batch)) for kind in kinds)
        raise MissingActionError(f"{action} needs {wanted}, which no worker executes")

    def orders(self, schedule: Schedule, overlap: bool, slots: Sends) -> None:
        """Add the order of each worker, of messages between two workers, and of slots."""
        reached: list[int | None] = []  # what must end before a worker comes to an action
        channels: dict[tuple[int, int], int] = {}
        k = 0
        for worker, row in enumerate(schedule.workers):
            last: int | None = None
            for action in row:
                reached.append(last)
                if last is not None:
                    self.needs[k].append(last)
                message = action.kind in MESSAGES
                if not (overlap and message):
                    last = k
                elif action.kind in SENDS:
                    channel = worker, self.placement.get(_other(action), -1)
                    if channel in channels:
                        self.needs[k].append(channels[channel])
                    channels[channel] = k
                k += 1
        for edge, pairs in self._pairs().items() if slots is not None else ():
            limit = slots[edge] if isinstance(slots, Mapping) else slots
            for number, (send, receive) in enumerate(pairs):
                if limit == 0 and (there := reached[receive]) is not None:
                    self.needs[send].append(there)
                elif limit and number >= limit:
                    self.needs[send].append(pairs[number - limit][1])

    def _pairs(self) -> dict[Edge, list[tuple[int, int]]]:
        """(send, its receive) of every message of each edge, in the order of the sends."""
        found: defaultdict[Edge, list[tuple[int, int]]] = defaultdict(list)
        for (a, b, kind, m), k in self.messages.items():
            if kind in SENDS:
                receive = self.messages.get((a, b, _RECEIVE_OF[kind], m))
                if receive is None:
                    raise UnmatchedMessageError(f"{self.actions[k]}: no worker receives it")
                found[a, b].append((k, receive))
        return found


def _message(action: Action) -> Message:
    """Key of a send or a receive: the same ends at both."""
    own, other = action.stage, _other(action)
    ends = (own, other) if action.kind in SENDS else (other, own)
    return (*ends, action.kind, action.micro_batch)


def _other(action: Action) -> int:
    assert action.other is not None, action  # of messages
    return action.other
