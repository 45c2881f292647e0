"""Deadlocks between processes: when nobody can go on, and how all are told. No messages in here.

Workers that have waited long say so to a coordinator, worker 0, and say when they go on. Once all
of them wait, the coordinator asks each to hold still. Who holds does not leave its wait before it
is told, so the answers are one state of the whole program: nobody runs, and each says how far it
has come. A message that has not come is on its way if its sender has passed the point where it
sends it, and is never sent else, for its sender waits. So it is a deadlock if, and only if, every
worker waits for one that has not come that far: latency, sizes and the way of messages count for
nothing. A worker that goes on after all, or is not done asking itself, ends the round.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

Key = tuple[str, int]
"""A plan, or a conversation: its kind, and its number."""
Point = tuple[int, float]
"""A worker's progress in one: the run, and the last stage whose messages it has sent."""
NOWHERE: Point = (0, math.inf)
PAST: Point = (2**62, math.inf)
"""Of a plan that is broken: an alarm is on its way to who waits in it."""

COORDINATOR = 0
_AGAIN = 0.25, 8.0
"""Seconds between two rounds, at first and at most."""


class Wait(NamedTuple):
    """A worker's wait: for some others to come to a point."""

    words: str
    key: Key
    at: Point
    """The progress of the worker itself."""
    needs: Point
    peers: tuple[int, ...]
    """The workers that are late, as it seems here; empty where that is not known."""
    ended: bool = False
    """True if it has left its program, and waits for nothing but the end of the others'."""


class State(NamedTuple):
    """A worker that waits, and how far it is elsewhere."""

    wait: Wait
    points: Mapping[Key, Point]

    def reached(self, key: Key) -> Point:
        return self.wait.at if key == self.wait.key else self.points.get(key, NOWHERE)


def is_deadlock(states: Mapping[int, State]) -> bool:
    """True if none of these workers, all that there are, can go on; and one would have to."""

    def goes_on(wait: Wait) -> bool:
        return all(states[peer].reached(wait.key) >= wait.needs for peer in wait.peers)

    waits = [state.wait for state in states.values()]
    return not all(wait.ended for wait in waits) and not any(map(goes_on, waits))


def is_of_python(thread: threading.Thread) -> bool:
    """True if `threading` started it, or it is the main one. A thread that something else started,
    as torch does for backward passes, works for one that waits for it, and counts as that one."""
    return not isinstance(thread, threading._DummyThread)


def joins(thread: threading.Thread, idents: Collection[int]) -> bool:
    """True if a thread waits without a limit for one of these to end (`Thread.join`), or for one
    that does."""
    frames, seen = sys._current_frames(), set[int]()
    while thread.ident is not None and thread.ident not in seen and thread.is_alive():
        if thread.ident in idents:
            return bool(seen)
        seen.add(thread.ident)
        frame = frames.get(thread.ident)
        while frame is not None and frame.f_code is not _JOIN:
            frame = frame.f_back if frame.f_globals is _JOIN_GLOBALS else None
        if frame is None or frame.f_locals["timeout"] is not None:
            return False
        thread = frame.f_locals["self"]
    return False


_JOIN, _JOIN_GLOBALS = threading.Thread.join.__code__, threading.Thread.join.__globals__


def described(states: Mapping[int, State]) -> str:
    waits = {w: state.wait.words for w, state in states.items() if not state.wait.ended}
    return who_waits(waits, [w for w in states if w not in waits])


def who_waits(
    waits: Mapping[int, str], ended: Collection[int], others: Mapping[int, str] | None = None
) -> str:
    """The waits of workers, the workers that have left, and what others do, in words."""
    said = {worker: f"worker {worker} waits for {words}" for worker, words in waits.items()}
    said |= {worker: f"worker {worker} has ended" for worker in ended}
    said |= {worker: f"worker {worker} {words}" for worker, words in (others or {}).items()}
    return "; ".join(said[worker] for worker in sorted(said))


class Note(NamedTuple):
    """A message between coordinator and workers. Between two of them, in the order sent."""

    kind: str
    """To the coordinator: "waits", "left", "held". From it: "hold", "go on", "deadlock"."""
    number: int
    """Of the worker's wait; of the round, in answers and decisions."""
    round: int = 0
    state: State | None = None
    text: str = ""
    broken: tuple[Key, ...] = ()
    """The plans and conversations that workers waited in."""


Mail = list[tuple[int, Note]]
"""Notes to send, with whom to."""


@dataclass
class Coordinator:
    """Worker 0's part: whether all wait, and what comes of asking them."""

    workers: int
    _waits: dict[int, int] = field(default_factory=dict)
    _held: dict[int, State] = field(default_factory=dict)
    _round: int = 0
    _asking: bool = False
    _next: float = 0.0
    _patience: float = _AGAIN[0]

    def take(self, worker: int, note: Note, now: float) -> Mail:
        """The answer to a worker's note."""
        if note.kind == "waits":
            self._waits[worker] = note.number
            self._patience = _AGAIN[0]
        elif note.kind == "left":
            self._waits.pop(worker, None)
            return self._over(now)
        elif self._asking and note.round == self._round and note.state is not None:
            self._held[worker] = note.state
            if len(self._held) == self.workers:
                return self._decided(now)
        return []

    def tick(self, now: float) -> Mail:
        """Ask all to hold still, if all wait."""
        if self._asking or len(self._waits) < self.workers or now < self._next:
            return []
        self._round += 1
        self._asking, self._held = True, {}
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
        """End the round: all go on, or on with waiting."""
        if not self._asking:
            return []
        self._asking, self._next = False, now + self._patience
        return [(w, Note("go on", n, self._round)) for w, n in self._waits.items()]


@dataclass
class Member:
    """Every worker's part: what it says of its waits."""

    worker: int
    workers: int
    told: bool = False
    """True if the coordinator knows that this worker waits."""
    held: int = 0
    """The round for which it holds still; 0 if for none."""
    verdict: Note | None = None
    """The coordinator's note that it is a deadlock."""
    _number: int = 0
    _coordinator: Coordinator | None = None

    def __post_init__(self) -> None:
        if self.worker == COORDINATOR:
            self._coordinator = Coordinator(self.workers)

    def waits(self, now: float) -> Mail:
        """Say that this worker waits, if it has not said so."""
        if self.told:
            return []
        self.told, self._number = True, self._number + 1
        return self._sent([(COORDINATOR, Note("waits", self._number))], now)

    def leaves(self, now: float) -> Mail:
        """Say that it goes on."""
        if not self.told:
            return []
        self.told, self.held = False, 0
        return self._sent([(COORDINATOR, Note("left", self._number))], now)

    def hears(self, peer: int, note: Note, state: State | None, now: float) -> Mail:
        """The answer to a note.

        Args:
            state: this worker's now; None if it need not wait any more.
        """
        if note.kind in ("waits", "left", "held"):
            assert self._coordinator is not None
            return self._sent(self._coordinator.take(peer, note, now), now, state)
        if not self.told or note.number != self._number:
            return []  # it has gone on, and has said so
        if note.kind == "hold" and state is not None:
            self.held = note.round
            return self._sent([(COORDINATOR, Note("held", note.number, note.round, state))], now)
        if note.kind == "go on":
            self.held = 0
        elif note.kind == "deadlock":
            self.told, self.held, self.verdict = False, 0, note
        return []

    def tick(self, now: float, state: State | None) -> Mail:
        """Notes that the coordinator sends by itself."""
        if self._coordinator is None:
            return []
        return self._sent(self._coordinator.tick(now), now, state)

    def _sent(self, mail: Mail, now: float, state: State | None = None) -> Mail:
        """The notes for others. What worker 0 tells itself, it has heard."""
        out: Mail = []
        for peer, note in mail:
            if peer == self.worker:
                out += self.hears(peer, note, state, now)
            else:
                out.append((peer, note))
        return out
