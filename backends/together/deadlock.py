"""Deadlock detection between processes, as a protocol without communication: notes in, notes out.

A worker that has waited for long sends a note to the coordinator, worker 0, and another when it
continues. Once all workers wait, the coordinator asks each to hold. A worker that holds does not
leave its wait until told, so the answers are one consistent state of the program: no worker runs,
and each reports its progress. A missing message is in flight if its sender's progress is past the
point of sending it; otherwise it is never sent, since the sender waits. So there is a deadlock if
and only if every worker waits for one whose progress is short of that point: latency, message sizes
and transports do not matter. A worker that continues after all, or has not answered yet, ends the
round.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

Key = tuple[str, int]
"""A plan or a kind of control exchange: its name, and its number."""
Point = tuple[int, float]
"""Progress of a worker in a plan or exchange: the run, and the last stage whose messages it has
sent."""
NOWHERE: Point = (0, math.inf)
PAST: Point = (2**62, math.inf)
"""Progress in a broken plan: an alarm is in flight to the workers that wait in it."""

COORDINATOR = 0
_AGAIN = 0.25, 8.0
"""Seconds between two rounds: initially, and at most."""


class Wait(NamedTuple):
    """A worker's wait for others to reach a point."""

    words: str
    key: Key
    at: Point
    """Progress of the waiting worker itself."""
    needs: Point
    peers: tuple[int, ...]
    """Workers whose messages are missing; empty if unknown."""
    ended: bool = False
    """True if the worker has left its program, and only waits for the others' end."""


class State(NamedTuple):
    """State of a waiting worker: its wait, and its progress in all plans and exchanges."""

    wait: Wait
    points: Mapping[Key, Point]

    def reached(self, key: Key) -> Point:
        return self.wait.at if key == self.wait.key else self.points.get(key, NOWHERE)


def is_deadlock(states: Mapping[int, State]) -> bool:
    """True if no worker can continue, and not all have ended. `states` has every worker."""

    def goes_on(wait: Wait) -> bool:
        return all(states[peer].reached(wait.key) >= wait.needs for peer in wait.peers)

    waits = [state.wait for state in states.values()]
    return not all(wait.ended for wait in waits) and not any(map(goes_on, waits))


def described(states: Mapping[int, State]) -> str:
    waits = {w: state.wait.words for w, state in states.items() if not state.wait.ended}
    return who_waits(waits, [w for w in states if w not in waits])


def who_waits(
    waits: Mapping[int, str], ended: Collection[int], others: Mapping[int, str] | None = None
) -> str:
    """Text: the workers that wait, those that have ended, and the activity of others."""
    said = {worker: f"worker {worker} waits for {words}" for worker, words in waits.items()}
    said |= {worker: f"worker {worker} has ended" for worker in ended}
    said |= {worker: f"worker {worker} {words}" for worker, words in (others or {}).items()}
    return "; ".join(said[worker] for worker in sorted(said))


class Note(NamedTuple):
    """A note between coordinator and workers; notes between two of them arrive in the order
    sent."""

    kind: str
    """To the coordinator: "waits", "left", "held", "ended". From it: "hold", "go on",
    "deadlock"."""
    number: int
    """Number of the worker's wait. `round` is that of the coordinator's round, in answers and
    decisions."""
    round: int = 0
    state: State | None = None
    text: str = ""
    broken: tuple[Key, ...] = ()
    """Plans and exchanges in which workers waited."""


Mail = list[tuple[int, Note]]
"""Notes to send, each with its receiver."""


@dataclass
class Coordinator:
    """State machine of the coordinator (worker 0): who waits, and rounds of questions."""

    workers: int
    _waits: dict[int, int] = field(default_factory=dict)
    _ended: dict[int, State] = field(default_factory=dict)
    _held: dict[int, State] = field(default_factory=dict)
    _round: int = 0
    _asking: bool = False
    _next: float = 0.0
    _patience: float = _AGAIN[0]

    def take(self, worker: int, note: Note, now: float) -> Mail:
        """Process a worker's note; return the notes that answer it."""
        if note.kind == "waits":
            self._waits[worker] = note.number
            self._patience = _AGAIN[0]
        elif note.kind == "left":
            self._waits.pop(worker, None)
            return self._over(now)
        elif note.kind == "ended" and note.state is not None:
            self._ended[worker] = note.state
        elif self._asking and note.round == self._round and note.state is not None:
            self._held[worker] = note.state
            if len(self._held) == self.workers:
                return self._decided(now)
        return []

    def tick(self, now: float) -> Mail:
        """Begin a round if all workers wait: ask each to hold."""
        if self._asking or not self._waits or now < self._next:
            return []
        if len(self._waits) + len(self._ended) < self.workers:
            return []
        self._round += 1
        self._asking, self._held = True, {**self._ended}
        return [(w, Note("hold", n, self._round)) for w, n in self._waits.items()]

    def _decided(self, now: float) -> Mail:
        if not is_deadlock(self._held):
            self._patience = min(2 * self._patience, _AGAIN[1])
            return self._over(now)
        keys = tuple(dict.fromkeys(s.wait.key for s in self._held.values() if not s.wait.ended))
        said = Note("deadlock", 0, self._round, None, described(self._held), keys)
        told: Mail = [(w, said._replace(number=n)) for w, n in self._waits.items()]
        self._asking, self._waits = False, {}
        return told

    def _over(self, now: float) -> Mail:
        """End the round: all workers continue, or continue to wait."""
        if not self._asking:
            return []
        self._asking, self._next = False, now + self._patience
        return [(w, Note("go on", n, self._round)) for w, n in self._waits.items()]


@dataclass
class Member:
    """State machine of every worker: the notes about its waits."""

    worker: int
    workers: int
    told: bool = False
    """True if the coordinator has been told that this worker waits."""
    held: int = 0
    """Round for which the worker holds; 0 for none."""
    verdict: Note | None = None
    """The coordinator's note of a deadlock; None without one."""
    _number: int = 0
    _coordinator: Coordinator | None = None

    def __post_init__(self) -> None:
        if self.worker == COORDINATOR:
            self._coordinator = Coordinator(self.workers)

    def waits(self, now: float) -> Mail:
        """Report that this worker waits, unless reported already."""
        if self.told:
            return []
        self.told, self._number = True, self._number + 1
        return self._sent([(COORDINATOR, Note("waits", self._number))], now)

    def leaves(self, now: float) -> Mail:
        """Report that this worker continues."""
        if not self.told:
            return []
        self.told, self.held = False, 0
        return self._sent([(COORDINATOR, Note("left", self._number))], now)

    def ends(self, state: State, now: float) -> Mail:
        """Report that this worker has left its program, in its last state; it answers no more."""
        return [*self.leaves(now), *self._sent([(COORDINATOR, Note("ended", 0, 0, state))], now)]

    def hears(self, peer: int, note: Note, state: State | None, now: float) -> Mail:
        """Process a note; return the notes that answer it.

        Args:
            state: current state of this worker; None if its wait is over.
        """
        if note.kind in ("waits", "left", "held", "ended"):
            assert self._coordinator is not None
            return self._sent(self._coordinator.take(peer, note, now), now, state)
        if not self.told or note.number != self._number:
            return []  # about an earlier wait, which this worker has reported over
        if note.kind == "hold" and state is not None:
            self.held = note.round
            return self._sent([(COORDINATOR, Note("held", note.number, note.round, state))], now)
        if note.kind == "go on":
            self.held = 0
        elif note.kind == "deadlock":
            self.told, self.held, self.verdict = False, 0, note
        return []

    def tick(self, now: float, state: State | None) -> Mail:
        """Notes that the coordinator sends unprompted."""
        if self._coordinator is None:
            return []
        return self._sent(self._coordinator.tick(now), now, state)

    def _sent(self, mail: Mail, now: float, state: State | None = None) -> Mail:
        """Notes for other workers; worker 0 processes notes to itself at once."""
        out: Mail = []
        for peer, note in mail:
            if peer == self.worker:
                out += self.hears(peer, note, state, now)
            else:
                out.append((peer, note))
        return out
