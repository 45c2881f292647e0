"""Waits of one rank that end: when what they wait for is there, at an alarm of another rank, at a
deadlock, or at the limit."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from mpi4py import MPI

from linop.backends.transports.control_channel import ALARM, ASK, NOTE, Channel
from linop.backends.transports.deadlock import (
    Key,
    Mail,
    Member,
    Point,
    State,
    Wait,
    is_of_python,
    joins,
)
from linop.backends.transports.recorder import Recorder, at_place
from linop.backends.transports.transport import ANY, Alone, Plans, Who, awaited, heard
from linop.backends.transports.watchdog import WATCHDOG
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
_ALIVE = 0.3
"""Seconds within which a rank looks again that waits in linop."""
_APART = 5.0
"""Seconds between two times that a rank is asked where it is: ranks reach their limits together."""
_ALARMED, _ASKED, _ANSWERED = range(3)
"""Meanings of a rank's numbers in shared memory: when an alarm came, when another rank reached its
limit, and which time of these was answered."""


@dataclass(frozen=True)
class Alarm:
    """An error for all ranks: from which it is, the plan and the call that it is about, and what
    that rank waits for, if it is stuck."""

    error: LinopError
    worker: int
    tag: int
    stuck: str | None = None
    call: int = 0


class Waits:
    """The waits of one rank.

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
        self.recorder = Recorder()
        self.bells: list[memoryview] | None = None
        self._bell: memoryview | None = None
        self._threads = {threading.current_thread()}
        self._rung = 0
        self._asked = self._answered = 0
        # Another thread may call MPI only if MPI was told so when it started.
        self._multiple = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self.points: dict[Key, Point] = {}
        self._stuck: list[Alarm] = []
        self._member = Member(self.worker, self.workers)
        self.spins = 0 if self.workers > (os.cpu_count() or 1) else _SPINS

    def listen_to(self, bells: list[memoryview]) -> None:
        """Learn of alarms by numbers in shared memory."""
        self.bells = bells
        self._bell = bells[self.worker]
        self._rung = bells[self.worker][_ALARMED]

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
        WATCHDOG.looked = now = time.monotonic()
        self._hear_alarms()
        error = self.plans.alarm(wait.busy)
        if error is not None:
            raise heard(error, wait.busy)
        waited = now - wait.begun
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
        several is not guessed about, but where they wait for this one to end."""
        self._threads = {thread for thread in list(self._threads) if thread.is_alive()}
        here = [threading.get_ident()]
        alone = sum(not joins(thread, here) for thread in self._threads) <= 1
        if not alone and self._member.told:
            self._send(self._member.leaves(time.monotonic()))
        return alone

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
            WATCHDOG.looked = now = time.monotonic()
            waited = now - wait.begun
            if waited > _LONG:
                self._say_ended()
                self._tell(wait)
                if self._member.verdict is not None:
                    self._member.verdict = None
                    self.channel.epoch += 1
            # Those that began to wait when this rank ended ask it at their limit.
            return waited > self._limit + 2 * _PATIENCE

        return poll

    # Alarms

    def alarm(self, error: LinopError, tag: int, call: int) -> None:
        """Tell all ranks of an error in a call of a plan."""
        self._tell_all(Alarm(error, self.worker, tag, call=call))

    def _tell_all(self, alarm: Alarm) -> None:
        for peer in range(self.workers):
            if peer != self.worker:
                self.channel.say(peer, ALARM, alarm)
                if self.bells is not None:
                    self.bells[peer][_ALARMED] = time.monotonic_ns()

    def _hear_alarms(self) -> bool:
        """Take the alarms that have come: each breaks its plan, if that is whole, and no other."""
        any_came = False
        while (said := self.channel.anyone(ALARM)) is not None:
            any_came = True
            _, epoch, alarm = said
            if alarm.stuck is None:
                self.plans.hear(alarm.tag, alarm.error, alarm.call)
            elif epoch >= self.channel.epoch:
                self._stuck.append(alarm)
        return any_came

    def alarmed(self) -> bool:
        bell = self._bell
        return bell is None or bell[_ALARMED] != self._rung

    def check(self, tag: int) -> None:
        if self._bell is None:
            for _ in range(2):  # a look may only bring what the next finds
                self._hear_alarms()
        elif self._bell[_ALARMED] != self._rung:
            self._rung = self._bell[_ALARMED]
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
        if not self._stuck:
            self._ask()
        self._tell_all(Alarm(DeadlockError(f"{text}: {mine}"), self.worker, wait.busy, mine))
        begun = time.monotonic()
        while len(waits) < self.workers and time.monotonic() - begun < _PATIENCE:
            waits |= {a.worker: a.stuck for a in self._stuck if a.stuck is not None}
            time.sleep(_NAP)
            self._hear_alarms()
            WATCHDOG.looked = time.monotonic()
        self._answer()
        for peer in range(self.workers):
            waits.setdefault(peer, f"worker {peer} does not wait in linop")
        sys.stderr.write(f"linop: {text}: {mine}; {_LAST}:\n{self.plans.last_calls()}")
        sys.stderr.flush()
        return DeadlockError(f"{text}: {'; '.join(waits[peer] for peer in sorted(waits))}")

    def _say_ended(self) -> None:
        """Answer those that have reached their limit, once this rank has ended."""
        self._hear_alarms()
        if self._stuck:
            words = f"worker {self.worker} has ended"
            self._tell_all(Alarm(DeadlockError(words), self.worker, ANY, words))
            self._answer()

    def _answer(self) -> None:
        """The limit is dealt with, here."""
        self._stuck = []
        self.channel.epoch += 1
        if self._bell is not None:
            self._bell[_ANSWERED] = self._bell[_ASKED]
        self._answered = time.monotonic_ns()

    def _ask(self) -> None:
        """Have those that do not wait in linop say where they are: their watchdogs do."""
        for peer in range(self.workers):
            if peer == self.worker:
                continue
            if self.bells is not None:
                self.bells[peer][_ASKED] = time.monotonic_ns()
            elif self._multiple:
                self.channel.say(peer, ASK, None)

    def stuck(self) -> str | None:
        """In the watchdog's thread: what is to be said of this rank, if others asked for it, and it
        does not wait in linop, and answers itself."""
        bell = self._bell
        if bell is not None:
            self._asked, self._answered = bell[_ASKED], bell[_ANSWERED]
        elif self._multiple and self.channel.anyone(ASK) is not None:
            self._asked = time.monotonic_ns()
        if self._asked <= self._answered or time.monotonic() - WATCHDOG.looked < _ALIVE:
            return None
        again = self._asked - self._answered < _APART * 1e9
        self._answered = self._asked
        if bell is not None:
            bell[_ANSWERED] = self._asked
        if again:
            return None
        who = f"worker {self.worker} does not wait in linop, and others have reached the limit"
        return f"linop: {who}; {_LAST}:\n{self.plans.last_calls()}"


_LAST = "its last calls, the oldest first"


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
        return at_place(awaited(self.who()).words)
