"""One worker's part in the detection of deadlocks between processes: its waits in the form of the
protocol (`linop.backends.together.deadlock`), and its notes, over a channel that subclasses
supply."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable

from linop.backends.together.counted_threads import joins, remaining
from linop.backends.together.deadlock import (
    COORDINATOR,
    Key,
    Mail,
    Member,
    Note,
    Point,
    State,
    Wait,
)
from linop.backends.together.recorder import Recorder, at_place
from linop.backends.together.transport import ANY, Alone, Plans, Who, awaited, heard
from linop.errors import DeadlockError, LinopError

LONG = 1.0
"""Seconds after which a wait is reported to the coordinator."""


class Detection:
    """A worker that tells others of its long waits.

    Attributes:
        busy, plans, points, recorder: as those of a `Transport`.
    """

    def __init__(self, worker: int, workers: int) -> None:
        self.worker = worker
        self.workers = workers
        self.busy = ANY
        self.plans: Plans = Alone()
        self.points: dict[Key, Point] = {}
        self.recorder = Recorder()
        self._threads = {threading.current_thread()}
        self._member = Member(worker, workers)

    @abstractmethod
    def _say_note(self, peer: int, note: Note) -> None:
        """Send a note; returns at once."""

    @abstractmethod
    def _next_note(self) -> tuple[int, Note] | None:
        """The next note of any worker, with its sender; None if none has arrived."""

    def _has_one_thread(self, ident: int) -> bool:
        """True if no thread of this worker but the one that waits may do what others wait for.
        Deadlocks are not judged on a worker with several active threads, unless these join that
        one."""
        return sum(not joins(thread, [ident]) for thread in remaining(self._threads)) <= 1

    def _send(self, mail: Mail) -> None:
        for peer, note in mail:
            self._say_note(peer, note)

    def _tell_wait(self) -> None:
        """Report that this worker waits, unless reported already."""
        self._send(self._member.waits(time.monotonic()))

    def _hear_notes(self, state: Callable[[], State | None]) -> None:
        """Answer the notes that have arrived; as coordinator, begin a round if all workers wait.

        Args:
            state: this worker's; it gives None if its wait is over.
        """
        now = time.monotonic()
        while (said := self._next_note()) is not None:
            self._send(self._member.hears(*said, state(), now))
        if self.worker == COORDINATOR:
            self._send(self._member.tick(now, state()))

    def _stop_waiting(self) -> None:
        """Report that this worker continues, if it has reported a wait."""
        self._send(self._member.leaves(time.monotonic()))

    def _state(self, who: Who, busy: int, thread: int | None = None) -> State:
        """A wait, in the form of the protocol, and this worker's progress.

        Args:
            busy: tag of the plan that was called when the wait began.
            thread: identifier of the thread that waits; None for this one.
        """
        said = awaited(who())
        key, number, peers = said.key, said.number, said.peers
        if key is None:
            key, number = ("plan", busy), self.plans.running(busy)
            if not number:
                peers = ()  # a local map has called another plan since
        needs = number - said.back, said.at if said.needs is None else said.needs
        words = at_place(said.words, thread)
        wait = Wait(words, key, (number, said.at), needs, tuple(peers), said.ended)
        return State(wait, {**self.points, **self.plans.points()})

    def _verdict(self, busy: int) -> LinopError | None:
        """Error of a deadlock that the coordinator has found, once, after which the plans in which
        workers waited are broken; None without one."""
        verdict, self._member.verdict = self._member.verdict, None
        if verdict is None:
            return None
        error = DeadlockError(f"deadlock: {verdict.text}")
        for kind, number in verdict.broken:
            if kind in ("plan", "call", "bind"):
                self.plans.hear(number, error)
        self.plans.alarm(busy)
        return heard(error, busy)
