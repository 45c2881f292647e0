"""Waits of one rank that end: when what they wait for is there, at an alarm of another rank, at a
deadlock, or at the limit."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import takewhile

from linop.backends.channel import ALARM, NOTE, Channel
from linop.backends.deadlock import Key, Mail, Member, Point, State, Wait, is_of_python
from linop.backends.transport import ANY, Alone, Plans, Who, awaited, heard
from linop.errors import DeadlockError, LinopError

_SPINS = 50
"""Polls before a rank that waits yields its core between them, if every rank has one: a yield costs
little where nobody else wants it, and two ranks that share one wait for each other."""
_YIELDS = 20000
"""Polls after which it sleeps between them."""
_NAP = 50e-6
"""Seconds of such a sleep."""
_OFTEN, _LOOKS = 512, 20
"""Yields, and naps, after which it looks for alarms, and at the clock."""
_LONG = 1.0
"""Seconds after which a rank says that it waits."""
_MINUTE = 60.0
"""Seconds between words on stderr about a wait."""
_PATIENCE = 1.0
"""Seconds to wait for what others wait for."""
_COMING = 2e-3
"""Seconds that an alarm may come later than its bell."""


@dataclass(frozen=True)
class Alarm:
    """An error for all ranks: from which it is, the plan that it is about, and what that rank waits
    for, if it is stuck."""

    error: LinopError
    worker: int
    tag: int
    stuck: str | None = None


class Waits:
    """How one rank waits.

    Args:
        limit: seconds that a wait may take.
    """

    def __init__(self, channel: Channel, limit: float) -> None:
        self.channel = channel
        self._limit = limit
        self.worker: int = channel.comm.rank
        self.workers: int = channel.comm.size
        self.busy = ANY
        self.plans: Plans = Alone()
        self.bells: list[memoryview] | None = None
        self._bell: memoryview | None = None
        self._threads = {threading.current_thread()}
        self._rung = 0
        self.points: dict[Key, Point] = {}
        self._stuck: list[Alarm] = []
        self._member = Member(self.worker, self.workers)
        self.spins = 0 if self.workers > (os.cpu_count() or 1) else _SPINS

    def listen_to(self, bells: list[memoryview]) -> None:
        """Learn of alarms by numbers in shared memory."""
        self.bells = bells
        self._bell = bells[self.worker]
        self._rung = bells[self.worker][0]

    def until(self, done: Callable[[], bool], who: Who) -> None:
        """Poll until something is done. MPI's own wait may spin; ranks that share a core, or wait
        long, must let others run.

        Raises:
            LinopError: another rank raised an alarm about the plan that is being called.
                DeadlockError: it will never be done, or the limit is reached.
        """
        for _ in range(self.spins):
            if done():
                return
        wait = _Long(done, who, self.busy)
        polls = 0
        if is_of_python(thread := threading.current_thread()):
            self._threads.add(thread)
        try:
            while not done():
                polls += 1
                if polls < _YIELDS:
                    os.sched_yield()
                    looks = polls % _OFTEN == 0
                else:
                    time.sleep(_NAP)
                    looks = polls % _LOOKS == 0
                if looks:
                    self._look(wait)
        finally:
            if self._member.told:
                self._send(self._member.leaves(time.monotonic()))

    def _look(self, wait: _Long) -> None:
        """Raise what makes it useless to wait on."""
        self._hear_alarms()
        error = self.plans.alarm(wait.busy)
        if error is not None:
            raise heard(error, wait.busy)
        waited = time.monotonic() - wait.begun
        if waited > self._limit or self._stuck:
            raise heard(self._limit_error(wait), wait.busy)
        if waited > _LONG and self.workers > 1 and self._has_one_thread():
            self._tell(wait)
            self._judge(wait.busy)
        if waited > wait.next_words:
            wait.next_words += _MINUTE
            self._remark(waited, wait.words())

    def _remark(self, waited: float, words: str) -> None:
        text = f"linop: worker {self.worker} has waited for {waited:.0f} s for {words}\n"
        sys.stderr.write(text)
        sys.stderr.flush()

    # Deadlocks

    def _has_one_thread(self) -> bool:
        """True if no other thread of this rank may be about to do what others wait for: a rank of
        several is not guessed about."""
        self._threads = {thread for thread in list(self._threads) if thread.is_alive()}
        if len(self._threads) > 1 and self._member.told:
            self._send(self._member.leaves(time.monotonic()))
        return len(self._threads) <= 1

    def _tell(self, wait: _Long) -> None:
        """Say that this rank waits; answer, and hold still while others are asked."""
        while True:
            now = time.monotonic()
            state = (
                None
                if wait.done()
                else State(self._wait(wait), {**self.points, **self.plans.points()})
            )
            self._send(self._member.waits(now))
            while (said := self.channel.anyone(NOTE)) is not None:
                self._send(self._member.hears(said[0], said[2], state, now))
            self._send(self._member.tick(now, state))
            if not self._member.held:
                return
            time.sleep(_NAP)

    def _judge(self, busy: int) -> None:
        verdict, self._member.verdict = self._member.verdict, None
        if verdict is None:
            return
        self.channel.epoch += 1
        error = DeadlockError(f"deadlock: {verdict.text}")
        for kind, number in verdict.broken:
            if kind in ("plan", "call", "bind"):
                self.plans.hear(number, error)
        self.plans.alarm(busy)
        raise heard(error, busy)

    def _send(self, mail: Mail) -> None:
        for peer, note in mail:
            self.channel.say(peer, NOTE, note)

    def _wait(self, wait: _Long) -> Wait:
        """This rank's wait, to be judged."""
        said = awaited(wait.who())
        key, number, peers = said.key, said.number, said.peers
        if key is None:
            key, number = ("plan", wait.busy), self.plans.running(wait.busy)
            if not number:
                peers = ()  # a plan that a local map called has been another since
        needs = number - said.back, said.at if said.needs is None else said.needs
        return Wait(wait.words(), key, (number, said.at), needs, tuple(peers), said.ended)

    def leaving(self, done: Callable[[], bool], who: Who) -> Callable[[], bool]:
        """A poll for the end of the program, which tells the others that this rank has ended."""
        wait = _Long(done, who, self.busy)

        def poll() -> bool:
            if done():
                self._send(self._member.leaves(time.monotonic()))
                return True
            waited = time.monotonic() - wait.begun
            if waited > _LONG:
                self._tell(wait)
                if self._member.verdict is not None:
                    self._member.verdict = None
                    self.channel.epoch += 1
            return waited > self._limit

        return poll

    # Alarms

    def alarm(self, error: LinopError, tag: int) -> None:
        """Tell all ranks of an error in a plan."""
        self._tell_all(Alarm(error, self.worker, tag))

    def _tell_all(self, alarm: Alarm) -> None:
        for peer in range(self.workers):
            if peer != self.worker:
                self.channel.say(peer, ALARM, alarm)
                if self.bells is not None:
                    self.bells[peer][0] = time.monotonic_ns()

    def _hear_alarms(self) -> bool:
        """Take the alarms that have come: each breaks its plan, if that is whole, and no other."""
        any_came = False
        while (said := self.channel.anyone(ALARM)) is not None:
            any_came = True
            _, epoch, alarm = said
            if alarm.stuck is None:
                self.plans.hear(alarm.tag, alarm.error)
            elif epoch >= self.channel.epoch:
                self._stuck.append(alarm)
        return any_came

    def alarmed(self) -> bool:
        bell = self._bell
        return bell is None or bell[0] != self._rung

    def check(self, tag: int) -> None:
        if self._bell is None:
            for _ in range(2):  # a look may only bring what the next finds
                self._hear_alarms()
        elif self._bell[0] != self._rung:
            self._rung = self._bell[0]
            begun = time.monotonic()
            # It was sent before the bell was rung; but maybe on another communicator.
            while not self._hear_alarms() and time.monotonic() - begun < _COMING:
                pass
        error = self.plans.alarm(tag)
        if error is not None:
            raise heard(error, tag)

    # The limit

    def _limit_error(self, wait: _Long) -> DeadlockError:
        """Tell the others what this rank waits for, and hear what they wait for."""
        mine = f"worker {self.worker} waits for {wait.words()}"
        text = f"a wait took longer than {self._limit:g} s"
        waits = {self.worker: mine}
        self._tell_all(Alarm(DeadlockError(f"{text}: {mine}"), self.worker, wait.busy, mine))
        begun = time.monotonic()
        while len(waits) < self.workers and time.monotonic() - begun < _PATIENCE:
            waits |= {a.worker: a.stuck for a in self._stuck if a.stuck is not None}
            time.sleep(_NAP)
            self._hear_alarms()
        self._stuck = []
        self.channel.epoch += 1
        for peer in range(self.workers):
            waits.setdefault(peer, f"worker {peer} does not wait in linop")
        sys.stderr.write(f"linop: worker {self.worker}: {self.plans.last_calls()}\n")
        return DeadlockError(f"{text}: {'; '.join(waits[peer] for peer in sorted(waits))}")


class _Long:
    """A wait, which may become a long one."""

    def __init__(self, done: Callable[[], bool], who: Who, busy: int) -> None:
        self.done = done
        self.who = who
        self.busy = busy  # as it was then: other threads may call other plans
        self.begun = time.monotonic()
        self.next_words = _MINUTE

    def words(self) -> str:
        """The object of the wait, and the user's line that began it."""
        line = users_line()
        return f"{awaited(self.who()).words}{f' ({line})' if line else ''}"


def users_line() -> str:
    """The line of this thread's program that called linop, or torch that does; empty if none."""

    def frames() -> Iterator[tuple[str, str, int]]:
        frame = sys._getframe(2)
        while frame is not None:
            name = str(frame.f_globals.get("__name__", ""))
            yield name, frame.f_code.co_filename, frame.f_lineno
            frame = frame.f_back  # type: ignore[assignment]

    found = [*frames()]
    ours = len([*takewhile(lambda one: _is_ours(one[0]), found)])
    if ours == len(found):
        return ""
    _, path, line = found[ours]
    return f"{os.path.basename(path)}:{line}"


def _is_ours(module: str) -> bool:
    return not module or module.partition(".")[0] in ("linop", "torch", "functools", "contextlib")
