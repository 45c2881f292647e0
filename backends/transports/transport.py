"""The `Transport` interface between workers, and agreement of workers over its control channel.

A `Transport` moves buffers and control messages. `agree` merges the workers' verdicts about a call
along a tree, so that an error found by one worker is raised by all.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from linop.backends.transports.deadlock import Key, Point
from linop.backends.transports.recorder import Recorder
from linop.errors import BackendError, LinopError, interrupt, restated
from linop.spaces.scalars import Array

Item = TypeVar("Item")
ANY = -2
"""Tag that stands for no plan."""
MEET = "meet"
"""Default name of a collective operation in `Transport.gather_all`."""


class Awaited(NamedTuple):
    """Description of a worker's wait: as text, and as the point that others must reach
    (`linop.backends.transports.deadlock`)."""

    words: str
    peers: Sequence[int] = ()
    """Workers whose messages are missing; empty if unknown."""
    at: float = 0
    """Last stage whose messages this worker has sent."""
    needs: float | None = None
    """Stage that the others must reach; None for the same one."""
    back: int = 0
    """Number of runs by which the others may be behind."""
    key: Key | None = None
    """Key of the control exchange; None for the running plan."""
    number: int = 0
    """Number of the control exchange among those of its key."""
    ended: bool = False


Who = Callable[[], Awaited | str]
"""Function that describes a wait, called only when a report is needed."""


Counts = Mapping[tuple[int, ...], int | None]
"""Calls of a worker since the last collective compile, by group of workers; None where workers of
the group may differ."""


def awaited(said: Awaited | str) -> Awaited:
    return Awaited(said) if isinstance(said, str) else said


class Plans(Protocol):
    """Interface of a worker's plans that transports use."""

    def hear(self, tag: int, error: LinopError, call: int = 0) -> None:
        """Break the plan of a tag, unless it is broken already: another worker failed in the call
        of this number."""

    def alarm(self, tag: int) -> LinopError | None:
        """Error of an alarm about this plan that has not been raised here yet, or None."""

    def running(self, tag: int) -> int:
        """Number of the plan's current call; 0 if it is not running."""

    def points(self) -> Mapping[Key, Point]:
        """This worker's progress in all plans and control exchanges."""

    def counts(self) -> Counts:
        """Number of calls of each group's plans."""

    def last_calls(self) -> str:
        """Last calls of this worker, oldest first, one per line."""


class Alone:
    """A `Plans` without plans."""

    def hear(self, tag: int, error: LinopError, call: int = 0) -> None:
        """Ignore the alarm."""

    def alarm(self, tag: int) -> None:
        return None

    def running(self, tag: int) -> int:
        return 0

    def points(self) -> Mapping[Key, Point]:
        return {}

    def counts(self) -> Counts:
        return {}

    def last_calls(self) -> str:
        return "  none\n"


class Transport(Protocol):
    """One worker's messages to and from the others. Messages between two workers arrive in the
    order sent, for each tag. `receiver`, `sender`, `receive` and `send` return requests, which
    `test` and `wait` take."""

    name: str
    worker: int
    workers: int
    busy: int
    """Tag of the running plan, whose alarms are raised at once; `ANY` if none is running."""
    plans: Plans
    points: dict[Key, Point]
    """This worker's progress in control exchanges."""
    recorder: Recorder
    """Recorder of the worker's last calls."""
    out_of_step: bool
    """True once all workers were told that their numbers of calls differ."""

    def receiver(self, peer: int, tag: int, buffer: Array) -> Any:
        """Persistent receive of exactly the buffer's size; `start` it for each message."""

    def sender(self, peer: int, tag: int, buffer: Array) -> Any:
        """Persistent send of the buffer; `start` it for each message."""

    def start(self, requests: list[Any]) -> None:
        """Start persistent requests."""

    def receive(self, peer: int, tag: int, buffer: Array) -> Any:
        """Post one receive."""

    def send(self, peer: int, tag: int, buffer: Array) -> Any:
        """Start one send; the buffer must not change before it completes."""

    def test(self, pending: Sequence[Any]) -> bool:
        """True if all requests are complete."""

    def wait(self, pending: Sequence[Any], who: Who) -> None:
        """Wait until all requests are complete.

        Raises:
            LinopError: another worker raised an alarm. DeadlockError: a deadlock was detected, or
                the limit is reached.
        """

    def free(self, requests: Sequence[Any]) -> None:
        """Free persistent requests."""

    def abandon(self, receives: Sequence[Any], sends: Sequence[Any]) -> None:
        """Abandon requests that may never complete; afterwards no receive buffer is written to."""

    def gather_all(self, item: Item, doing: str = MEET, about: object = "") -> list[Item]:
        """All-gather of objects that pickle, by worker; collective over all workers. Each worker
        gets copies of the others' items, and its own.

        Args:
            doing: name of the operation; must be the same on all workers.
            about: its subject, for a report of a wait.

        Raises:
            BackendError: workers call different operations; on every worker.
        """

    def post(self, peer: int, item: object) -> None:
        """Send a control message, an object that pickles, to a worker."""

    def fetch(self, peer: int, who: Who, patience: float | None = None) -> Any:
        """Next control message of a worker; None if none arrives for `patience` seconds."""

    def alarm(self, error: LinopError, tag: int, call: int) -> None:
        """Raise an error on every other worker: at once if it waits in that call, or a later one,
        of the tag's plan; else when it makes the call."""

    def alarmed(self) -> bool:
        """True if there may be an alarm; costs almost nothing."""

    def check(self, tag: int) -> None:
        """Raise the error of another worker's alarm about this plan, if there is one."""


@dataclass
class Verdict:
    """Merged statements of workers before a call: errors found, calls made, votes."""

    wrong: dict[int, LinopError] = field(default_factory=dict)
    """Errors by worker."""
    calls: dict[tuple[int, int], tuple[int, str]] = field(default_factory=dict)
    """Calls by (tag, call number): the first worker that makes it, and its name."""
    votes: bool = True
    """True if all workers vote yes."""

    def merged(self, other: Verdict) -> Verdict:
        calls = dict(self.calls)
        for call, said in other.calls.items():
            calls[call] = min(said, calls.get(call, said))
        return Verdict(self.wrong | other.wrong, calls, self.votes and other.votes)

    def error(self) -> LinopError | None:
        """The first worker's error, to be raised on every worker; None if all agree."""
        if self.wrong:
            return self.wrong[min(self.wrong)]
        if len(self.calls) > 1:
            calls = "; ".join(f"worker {w} calls {what}" for w, what in sorted(self.calls.values()))
            return BackendError(
                f"workers call different plans: {calls}. Call the same plans in the same order on "
                f"every worker; plans that several threads call, once before these begin"
            )
        return None


def peers_named(peers: Sequence[int]) -> str:
    """Workers as text."""
    return f"worker{'s' if len(peers) > 1 else ''} {', '.join(map(str, peers))}"


class Gathering:
    """Implementation of `Transport.gather_all` over an exchange of items."""

    recorder: Recorder

    def gather_all(self, item: Item, doing: str = MEET, about: object = "") -> list[Item]:
        if doing != MEET:
            self.recorder.meets(doing, about)
        said = self._exchanged((doing, item), doing, about)
        if len({one for one, _ in said}) > 1:
            check_doing(self._exchanged((doing, str(about)), doing, about))
        return [one for _, one in said]

    @abstractmethod
    def _exchanged(self, mine: Item, doing: str, about: object) -> list[Item]:
        """Items of all workers, by worker; collective."""


def check_doing(said: Sequence[tuple[str, object]]) -> None:
    """Check that all workers call the same operation.

    Args:
        said: operation and subject of each worker.

    Raises:
        BackendError: the operations differ.
    """
    if len({doing for doing, _ in said}) > 1:
        each = (f"worker {w}: {in_words(*one)}" for w, one in enumerate(said))
        raise BackendError(
            f"workers do different things: {'; '.join(each)}. Do the same, in the same order, on "
            f"every worker"
        )


def in_words(doing: str, about: object) -> str:
    return f"{doing} {about}".rstrip()


def gathering(peer: int, doing: str, about: object) -> str:
    """Description of the wait for a worker in `Transport.gather_all`."""
    return f"worker {peer} to {in_words(doing, about)}"


def heard(error: LinopError, tag: int) -> LinopError:
    """New instance of an alarm's error for the receiving worker, marked with the plan's tag so that
    it raises no further alarm."""
    mine = restated(error, str(error))
    mine.alarm = tag
    interrupt(mine)
    return mine


class Talk:
    """A tagged exchange over the control channel; on abort, unconsumed messages are revoked, so
    that the next exchange does not take them for its own.

    Args:
        topic: tag of the exchange: equal on all participants, and different for each exchange.
    """

    def __init__(self, transport: Transport, topic: tuple[object, ...]) -> None:
        self._transport = transport
        self._topic = topic
        self._told: list[int] = []
        self._topics: dict[int, tuple[object, ...]] = {}

    def __enter__(self) -> Talk:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._transport.points[self.key] = self.number, math.inf
            return
        interrupt(error)
        for peer in self._told:
            self._transport.post(peer, (self._topic, _TAKEN_BACK))

    @property
    def key(self) -> Key:
        """Kind and tag of the exchange, without its number."""
        about = self._topic[1] if len(self._topic) > 1 else 0
        assert isinstance(about, int)
        return str(self._topic[0]), about

    @property
    def number(self) -> int:
        """Number of the control exchange among those of its key."""
        number = self._topic[2] if len(self._topic) > 2 else 1
        assert isinstance(number, int)
        return number

    def awaited(self, words: str, peer: int, at: int, needs: int) -> Awaited:
        """Description of a wait in this exchange, at a stage of it."""
        return Awaited(words, (peer,), at, needs, key=self.key, number=self.number)

    def say(self, peer: int, item: Any) -> None:
        """Send an item to a worker, with the tag of the exchange that it was last heard in
        (default: this one)."""
        self._told.append(peer)
        topic = self._topics.get(peer, self._topic)
        self._transport.post(peer, (topic, item))

    def hear(self, peer: int, who: Who) -> Any:
        """Next item from a worker in this exchange. An item of another exchange is returned if it
        is not revoked within `_PATIENCE`."""
        other: Any = None
        while True:
            said = self._transport.fetch(peer, who, None if other is None else _PATIENCE)
            if said is None:
                return other
            topic, item = said
            self._topics[peer] = topic
            if isinstance(item, str) and item == _TAKEN_BACK:
                other = None
            elif topic == self._topic:
                return item
            else:
                other = item


_TAKEN_BACK = "taken back"
_PATIENCE = 0.1
"""Seconds to wait for a revocation of an aborted exchange's message."""


def agree(talk: Talk, me: int, group: Sequence[int], mine: Verdict, what: str) -> Verdict:
    """All-reduce of verdicts over a group: merged up a binomial tree, and sent down again. Each
    worker communicates with at most ⌈log₂ n⌉ others.

    Args:
        me: index of this worker in the group.
        what: the operation that follows, for a report of a wait.
    """
    n = len(group)

    def fetch(k: int, at: int) -> Verdict:
        words = f"worker {group[k]} to {what}"
        said = talk.hear(group[k], lambda: talk.awaited(words, group[k], at, at + 1))
        if isinstance(said, Verdict):
            return said
        # An item of another exchange, in which that worker is.
        words = f"worker {group[k]} does something else, and others {what}; do the same, in the "
        return Verdict({group[k]: BackendError(f"{words}same order, on every worker")})

    step = 1
    children: list[int] = []
    while step < n and me % (2 * step) == 0:
        if me + step < n:
            children.append(me + step)
            mine = mine.merged(fetch(me + step, 0))
        step *= 2
    if me:
        talk.say(group[me - step], mine)
        mine = fetch(me - step, 1)
    for child in reversed(children):
        talk.say(group[child], mine)
    return mine
