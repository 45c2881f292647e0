"""Bounded waits of one rank: they end when the awaited event occurs, at another rank's alarm, at a
deadlock, or at the time limit."""

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
"""Polls before a waiting rank yields its core between them, if each rank has a core of its own: a
yield costs little if no other process wants the core, and ranks that share one wait for each
other."""
_YIELDS = 20000
"""Polls after which a waiting rank sleeps between them."""
_NAP = 50e-6
"""Seconds of each sleep."""
_OFTEN, _LOOKS = 512, 20
"""Number of yields, and of sleeps, between checks for alarms and of the time."""
_LONG = 1.0
"""Seconds after which a wait is reported to the coordinator."""
_MINUTE = 60.0
"""Seconds between remarks on stderr about a wait."""
_PATIENCE = 1.0
"""Seconds to collect the descriptions of other ranks' waits."""
_COMING = 2e-3
"""Longest delay of an alarm after its bell, in seconds."""
_ALIVE = 0.3
"""Longest time between checks of a rank that waits in linop, in seconds."""
_APART = 5.0
"""Shortest time between reports of a rank's position, in seconds: ranks reach their limits
together."""
_ALARMED, _ASKED, _ANSWERED = range(3)
"""Indices of a rank's bells (times in shared memory): last alarm; last time another rank reached
its limit; the latter time that was answered last."""


@dataclass(frozen=True)
class Alarm:
    """An error sent to all ranks: its origin, the plan's tag and the call, and the origin's wait if
    it reached its limit."""

    error: LinopError
    worker: int
    tag: int
    stuck: str | None = None
    call: int = 0


class Waits:
    """Waits of one rank.

    Args:
        limit: longest wait, in seconds.
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
        # Other threads may call MPI only at this thread level.
        self._multiple = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self.points: dict[Key, Point] = {}
        self._stuck: list[Alarm] = []
        self._member = Member(self.worker, self.workers)
        self.spins = 0 if self.workers > (os.cpu_count() or 1) else _SPINS

    def listen_to(self, bells: list[memoryview]) -> None:
        """Use bells (numbers in shared memory) to detect alarms without probing."""
        self.bells = bells
        self._bell = bells[self.worker]
        self._rung = bells[self.worker][_ALARMED]

    def until(self, done: Callable[[], bool], who: Who) -> None:
        """Poll until a condition holds. MPI's own wait may spin; ranks that share a core, or wait
        for long, must yield it.

        Raises:
            LinopError: another rank raised an alarm about the plan that is being called.
                DeadlockError: there is a deadlock, or the limit is reached.
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
        """Check for alarms, deadlock and the limit, and raise their errors."""
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
        """True if no other thread of this rank may do what others wait for. Deadlocks are not
        judged on a rank with several active threads, unless these join this one."""
        self._threads = {thread for thread in list(self._threads) if thread.is_alive()}
        here = [threading.get_ident()]
        alone = sum(not joins(thread, here) for thread in self._threads) <= 1
        if not alone and self._member.told:
            self._send(self._member.leaves(time.monotonic()))
        return alone

    def _tell(self, wait: _Long) -> None:
        """Report this rank's wait, answer notes, and hold while the coordinator asks the others."""
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
        """This rank's wait, in the form of the deadlock protocol."""
        said = awaited(wait.who())
        key, number, peers = said.key, said.number, said.peers
        if key is None:
            key, number = ("plan", wait.busy), self.plans.running(wait.busy)
            if not number:
                peers = ()  # a local map has called another plan since
        needs = number - said.back, said.at if said.needs is None else said.needs
        return Wait(wait.words(), key, (number, said.at), needs, tuple(peers), said.ended)

    def leaving(self, done: Callable[[], bool], who: Who) -> Callable[[], bool]:
        """Polling function for the end of the program, which reports to others that this rank has
        ended."""
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
            # Ranks whose wait began when this one ended ask it at their limit.
            return waited > self._limit + 2 * _PATIENCE

        return poll

    # Alarms

    def alarm(self, error: LinopError, tag: int, call: int) -> None:
        """Send the error of a plan's call to all ranks."""
        self._tell_all(Alarm(error, self.worker, tag, call=call))

    def _tell_all(self, alarm: Alarm) -> None:
        for peer in range(self.workers):
            if peer != self.worker:
                self.channel.say(peer, ALARM, alarm)
                if self.bells is not None:
                    self.bells[peer][_ALARMED] = time.monotonic_ns()

    def _hear_alarms(self) -> bool:
        """Process arrived alarms: each breaks its plan, unless broken already, and no other. True
        if any arrived."""
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
            for _ in range(2):  # a probe may only progress what the next one finds
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
        """Error for a wait beyond the limit: exchange descriptions of waits with all ranks, and
        report them."""
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
        """Answer ranks that reached their limit, after this rank has ended."""
        self._hear_alarms()
        if self._stuck:
            words = f"worker {self.worker} has ended"
            self._tell_all(Alarm(DeadlockError(words), self.worker, ANY, words))
            self._answer()

    def _answer(self) -> None:
        """Mark the limit as handled on this rank."""
        self._stuck = []
        self.channel.epoch += 1
        if self._bell is not None:
            self._bell[_ANSWERED] = self._bell[_ASKED]
        self._answered = time.monotonic_ns()

    def _ask(self) -> None:
        """Ask ranks that do not wait in linop for their position; their watchdogs report it."""
        for peer in range(self.workers):
            if peer == self.worker:
                continue
            if self.bells is not None:
                self.bells[peer][_ASKED] = time.monotonic_ns()
            elif self._multiple:
                self.channel.say(peer, ASK, None)

    def stuck(self) -> str | None:
        """Report about this rank, or None. Called in the watchdog's thread; a report is due if
        others have asked, and the rank does not wait in linop, where it would answer itself."""
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
    """State of one wait."""

    def __init__(self, done: Callable[[], bool], who: Who, busy: int) -> None:
        self.done = done
        self.who = who
        self.busy = busy  # at the start of the wait: other threads may call other plans
        self.begun = time.monotonic()
        self.next_words = _MINUTE

    def words(self) -> str:
        """Description of the wait, with the user's source line."""
        return at_place(awaited(self.who()).words)
