"""Agreement of workers over the control channel, so that an error found by one is raised by all.

`agree` merges the verdicts of a plan's workers along a tree: at its first call, and when it is
bound. `Gathering` is an all-gather of objects, of all workers, which have to do the same;
`linop.backends.engine.compile_agreement` is by one.
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from linop.backends.together.deadlock import Key, Point
from linop.backends.together.matching import Label, Matching
from linop.backends.together.messages import opened, sealed
from linop.backends.together.recorder import Recorder, at_place
from linop.backends.together.transport import ANY, MEET, Awaited, Item, Plans, Transport, Who
from linop.errors import BackendError, DeadlockError, LinopError, interrupt, restated


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


ALL: Key = "all", 0
"""Key of gatherings of all workers, for deadlock detection."""
_BITS = 40
_NAPS = 1e-3, 0.1
"""Shortest and longest seconds between looks for alarms, in a wait for other threads."""
_LONGEST = 600.0
"""Longest wait for other threads, in seconds."""


class Gathering:
    """Implementation of `Transport.gather_all` over an exchange of items."""

    recorder: Recorder
    points: dict[Key, Point]
    plans: Plans
    worker: int
    workers: int
    limit: float
    matching: Matching
    _gatherings = 0

    def _number(self, epoch: int) -> int:
        """Number of the current gathering.

        Args:
            epoch: number of errors so far that ended the waits of all workers. They may have
                interrupted different gatherings.
        """
        return max(self._gatherings, epoch << _BITS) + 1

    def _gathered(self, number: int) -> None:
        """Record that a gathering is complete here."""
        self._gatherings, self.points[ALL] = number, (number, math.inf)

    def gather_all(
        self, item: Item, doing: str = MEET, about: object = "", key: int = 0
    ) -> list[Item]:
        if doing != MEET:
            self.recorder.meets(doing, about)
        packed = b"" if self.workers == 1 else sealed(item)
        return opened(self._alike(packed, (doing, key), about), self.worker, item)

    def _alike(self, item: bytes, label: Label, about: object) -> list[bytes]:
        """Messages of all workers' gatherings of one label, by worker; collective."""
        doing, matching = label[0], self.matching
        with matching:
            try:
                said = self._exchanged((label, item), doing, about)
                if matching.is_empty and all(one == label for one, _ in said):
                    return [one for _, one in said]
                self._match(said, label, about)
            except BaseException as error:
                matching.drop(restated(error, str(error)))
                raise
            found = matching.take(label)
            if found is not None:
                return found
            matching.begin(label)
        try:
            return self._matched(label, doing, about)
        finally:
            matching.end()

    def _match(self, said: list[tuple[Label, bytes]], label: Label, about: object) -> None:
        """Add items that do not belong together, or to those that wait; collective.

        Raises:
            BackendError: no thread of some worker will bring what is missing; on every worker.
        """
        self.matching.add(said)
        if self.matching.is_empty:
            return
        mine = (label[0], str(about)), self.matching.others_may_come(label)
        each = self._exchanged(mine, label[0], about)
        if all(may for _, may in each):
            return
        error = different([words for words, _ in each])
        if any(may for _, may in each):
            # Other threads may wait for one that raises now.
            self.plans.hear(ANY, error)
            self.alarm(error, ANY, 0)
        raise error

    def _matched(self, label: Label, doing: str, about: object) -> list[bytes]:
        """Messages that other threads' gatherings bring; wait for them."""
        begun, nap = time.monotonic(), _NAPS[0]
        while (found := self.matching.take(label)) is None:
            error = self.matching.wait(nap)
            if error is not None:
                raise restated(error, str(error))
            self._end_if_told()
            if time.monotonic() - begun > min(self.limit, _LONGEST):
                raise self._late(doing, about)
            nap = min(2 * nap, _NAPS[1])
        return found

    def _end_if_told(self) -> None:
        """Raise the error of an alarm that ends all waits, if there is one."""
        self.check(ANY)

    def _late(self, doing: str, about: object) -> DeadlockError:
        """The error of a wait for threads of other workers, which it tells all."""
        error = DeadlockError(
            at_place(
                f"a wait took longer than {min(self.limit, _LONGEST):g} s: worker {self.worker} "
                f"waits for a thread of each other worker to {in_words(doing, about)}"
            )
        )
        self.plans.hear(ANY, error)
        self.alarm(error, ANY, 0)
        return error

    @abstractmethod
    def _exchanged(self, mine: Item, doing: str, about: object) -> list[Item]:
        """Items of all workers, by worker; collective, by one thread at a time."""

    @abstractmethod
    def alarm(self, error: LinopError, tag: int, call: int) -> None:
        """As of `Transport`."""

    @abstractmethod
    def check(self, tag: int) -> None:
        """As of `Transport`."""


def different(said: Sequence[tuple[str, str]]) -> BackendError:
    """The error of workers that do not call the same operation.

    Args:
        said: operation and subject of each worker.
    """
    each = (f"worker {w}: {in_words(*one)}" for w, one in enumerate(said))
    return BackendError(
        f"workers do different things: {'; '.join(each)}. Do the same, in the same order, on "
        f"every worker"
    )


def in_words(doing: str, about: object) -> str:
    return f"{doing} {about}".rstrip()


def gathering(peer: int, doing: str, about: object) -> str:
    """Description of the wait for a worker in `Transport.gather_all`."""
    return f"worker {peer} to {in_words(doing, about)}"
