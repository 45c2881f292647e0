"""The interface through which one worker reaches the others, and how workers agree through it.

A `Transport` moves buffers. `agree` is the one collective conversation about a call: everybody's
verdict, merged along a tree, so that what one worker sees wrong every worker hears of.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from linop import errors
from linop.backends.transports.deadlock import Key, Point
from linop.backends.transports.recorder import Recorder
from linop.errors import BackendError, LinopError, interrupt
from linop.spaces.scalars import Array

ANY = -2
"""No plan's tag."""
MEET = "meet"
"""Any part of what else workers do together."""


class Awaited(NamedTuple):
    """A worker's wait, in words, and as a point of `linop.backends.transports.deadlock` that others
    have to come to."""

    words: str
    peers: Sequence[int] = ()
    """The workers that are late; empty where that is not known."""
    at: float = 0
    """The last stage whose messages this worker has sent."""
    needs: float | None = None
    """The stage that the others have to come to; None for the same one."""
    back: int = 0
    """The number of runs that the others may be behind this one."""
    key: Key | None = None
    """The conversation; None for the plan that runs."""
    number: int = 0
    """The number of the conversation among those of its key."""
    ended: bool = False


Who = Callable[[], Awaited | str]
"""A function that gives the object of a wait, called when somebody asks."""


def awaited(said: Awaited | str) -> Awaited:
    return Awaited(said) if isinstance(said, str) else said


class Plans(Protocol):
    """The questions of a transport to the plans whose messages it carries."""

    def hear(self, tag: int, error: LinopError, call: int = 0) -> None:
        """Break the plan of a tag, if it is whole: another worker's run of it ended halfway, the
        one of this number."""

    def alarm(self, tag: int) -> LinopError | None:
        """The error that broke this plan, if nobody has been told here."""

    def running(self, tag: int) -> int:
        """The number of the call of this plan that is under way; 0 if none is."""

    def points(self) -> Mapping[Key, Point]:
        """This worker's progress in all plans and conversations."""

    def last_calls(self) -> str:
        """The last calls here, the oldest first, a line each."""


class Alone:
    """No plans."""

    def hear(self, tag: int, error: LinopError, call: int = 0) -> None:
        """Nothing is broken."""

    def alarm(self, tag: int) -> None:
        return None

    def running(self, tag: int) -> int:
        return 0

    def points(self) -> Mapping[Key, Point]:
        return {}

    def last_calls(self) -> str:
        return "  none\n"


class Transport(Protocol):
    """One worker's exchange of buffers with the others. Messages between two workers arrive in the
    order sent for a tag. What `receiver`, `sender`, `receive` and `send` return is pending: `test`
    and `wait` take it.
    """

    name: str
    worker: int
    workers: int
    busy: int
    """The tag of the plan that runs, whose alarms are raised at once; `ANY` where none does."""
    plans: Plans
    points: dict[Key, Point]
    """This worker's progress in conversations."""
    recorder: Recorder
    """Its last calls."""

    def receiver(self, peer: int, tag: int, buffer: Array) -> Any:
        """A receive of exactly the buffer's size, to be started any number of times."""

    def sender(self, peer: int, tag: int, buffer: Array) -> Any:
        """A send of the buffer, to be started any number of times."""

    def start(self, requests: list[Any]) -> None:
        """Start what `receiver` and `sender` made."""

    def receive(self, peer: int, tag: int, buffer: Array) -> Any:
        """A receive, once and at once."""

    def send(self, peer: int, tag: int, buffer: Array) -> Any:
        """A send, once and at once; the buffer must not change before it is done."""

    def test(self, pending: Sequence[Any]) -> bool:
        """True if all of these are done."""

    def wait(self, pending: Sequence[Any], who: Who) -> None:
        """Wait until all of these are done.

        Raises:
            LinopError: another worker raised an alarm. DeadlockError: it takes too long.
        """

    def free(self, requests: Sequence[Any]) -> None:
        """Give up what `receiver` and `sender` made."""

    def abandon(self, receives: Sequence[Any], sends: Sequence[Any]) -> None:
        """Give up what is pending and may never be done: no buffer of a receive is written to any
        more."""

    def gather_all(self, data: bytes, doing: str = MEET, about: object = "") -> list[bytes]:
        """Everybody's data, of any lengths, by worker: collective.

        Args:
            doing: what for, in a word or two, which has to be the same on all workers.
            about: of what, for a worker that waits in vain.

        Raises:
            BackendError: they do different things; on every worker.
        """

    def post(self, peer: int, data: bytes) -> None:
        """Say something to a worker, apart from all messages."""

    def fetch(self, peer: int, who: Who, patience: float | None = None) -> bytes | None:
        """The next thing that a worker said; None if it says nothing for so many seconds."""

    def alarm(self, error: LinopError, tag: int, call: int) -> None:
        """Make every other worker raise this error: one that waits in that call of the plan of this
        tag, or in a later one, at once; others when they make it, if they do."""

    def alarmed(self) -> bool:
        """True if there may have been an alarm; takes next to no time."""

    def check(self, tag: int) -> None:
        """Raise what another worker's alarm said of this plan, if there was one."""


@dataclass
class Verdict:
    """The statements of workers before a call: errors that they see, and calls that they make."""

    wrong: dict[int, tuple[str, str]] = field(default_factory=dict)
    """By worker: the class of an error, and its text."""
    calls: dict[tuple[int, int], tuple[int, str]] = field(default_factory=dict)
    """By the numbers of plan and call: the first worker that makes it, and what it is in words."""
    votes: bool = True
    """True if all are for it."""

    def merged(self, other: Verdict) -> Verdict:
        calls = dict(self.calls)
        for call, said in other.calls.items():
            calls[call] = min(said, calls.get(call, said))
        return Verdict(self.wrong | other.wrong, calls, self.votes and other.votes)

    def error(self) -> LinopError | None:
        """The error that this is for everybody: the first worker's."""
        if self.wrong:
            kind, text = self.wrong[min(self.wrong)]
            return rebuilt(kind, text)
        if len(self.calls) > 1:
            calls = "; ".join(f"worker {w} calls {what}" for w, what in sorted(self.calls.values()))
            return BackendError(
                f"workers call different plans: {calls}. Call the same plans in the same order on "
                f"every worker; plans that several threads call, once before these begin"
            )
        return None


def peers_named(peers: Sequence[int]) -> str:
    """Some workers, in words."""
    return f"worker{'s' if len(peers) > 1 else ''} {', '.join(map(str, peers))}"


def check_doing(said: Sequence[tuple[str, object]]) -> None:
    """Check that all workers do the same.

    Args:
        said: what each does, and of what.

    Raises:
        BackendError: they do not.
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
    """The wait in `Transport.gather_all`, in words."""
    return f"worker {peer} to {in_words(doing, about)}"


def heard(error: LinopError, tag: int) -> LinopError:
    """An alarm's error, as the worker that hears it raises it: one of its own, and no new alarm,
    but with the tag of the plan that it is about."""
    mine = rebuilt(type(error).__name__, str(error))
    mine.alarm = tag
    interrupt(mine)
    return mine


def rebuilt(kind: str, text: str) -> LinopError:
    """An error of another worker, of the same class if it is one of ours."""
    known = getattr(errors, kind, None)
    ours = isinstance(known, type) and issubclass(known, LinopError)
    error: LinopError = known(text) if ours else BackendError(f"{kind}: {text}")  # type: ignore[misc]
    return error


class Talk:
    """One conversation of workers, apart from all messages. What a worker said in one that it was
    called away from, it takes back, so that nobody takes it for part of the next.

    Args:
        topic: what it is about: equal for all that take part, and new every time.
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
            self._transport.post(peer, pickle.dumps((self._topic, _TAKEN_BACK)))

    @property
    def key(self) -> Key:
        """The topic of the conversation, but for its number."""
        about = self._topic[1] if len(self._topic) > 1 else 0
        assert isinstance(about, int)
        return str(self._topic[0]), about

    @property
    def number(self) -> int:
        """The number of the conversation among those of its key."""
        number = self._topic[2] if len(self._topic) > 2 else 1
        assert isinstance(number, int)
        return number

    def awaited(self, words: str, peer: int, at: int, needs: int) -> Awaited:
        """A worker's wait in it, at a stage of it."""
        return Awaited(words, (peer,), at, needs, key=self.key, number=self.number)

    def say(self, peer: int, item: Any) -> None:
        """Say something to a worker: in the conversation that it is in, as far as it was heard."""
        self._told.append(peer)
        topic = self._topics.get(peer, self._topic)
        self._transport.post(peer, pickle.dumps((topic, item)))

    def hear(self, peer: int, who: Who) -> Any:
        """The next item that a worker sends in this conversation; or, if it is in another one, in
        that."""
        other: Any = None
        while True:
            data = self._transport.fetch(peer, who, None if other is None else _PATIENCE)
            if data is None:
                return other
            topic, item = pickle.loads(data)
            self._topics[peer] = topic
            if isinstance(item, str) and item == _TAKEN_BACK:
                other = None
            elif topic == self._topic:
                return item
            else:
                other = item


_TAKEN_BACK = "taken back"
_PATIENCE = 0.1
"""Seconds in which a worker takes back what it said in a conversation that it was called away
from."""


def agree(talk: Talk, me: int, group: Sequence[int], mine: Verdict, what: str) -> Verdict:
    """Everybody's verdict, on every worker of a group: merged up a binomial tree over the group,
    and handed down again. Each worker speaks to at most ⌈log₂ n⌉ others.

    Args:
        me: which of the group this worker is.
        what: they are about to do, for a worker that waits in vain.
    """
    n = len(group)

    def fetch(k: int, at: int) -> Verdict:
        words = f"worker {group[k]} to {what}"
        said: Verdict = talk.hear(group[k], lambda: talk.awaited(words, group[k], at, at + 1))
        return said

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
