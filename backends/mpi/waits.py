"""Waits of one rank of MPI, which poll: they end when the awaited event occurs, at another rank's
alarm, at a deadlock, or at the time limit. Those of torch.distributed's processes block
(`linop.backends.torchrun.waits`)."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mpi4py import MPI

from linop.backends.mpi.control_channel import ALARM, ASK, NOTE, Channel
from linop.backends.together.counted_threads import is_of_python
from linop.backends.together.deadlock import Note
from linop.backends.together.detection import LONG, Detection
from linop.backends.together.recorder import at_place
from linop.backends.together.transport import ANY, Who, awaited, heard
from linop.backends.together.watchdog import WATCHDOG
from linop.errors import DeadlockError, LinopError

_SPINS = 50
"""Polls before a waiting rank yields its core between them, if each rank has a core of its own: a
yield costs little if no other process wants the core, and ranks that share one wait for each
other."""
_YIELDING = 5e-3
"""Seconds after which a waiting rank sleeps between its polls. Where other processes want its core,
as more ranks than there are cores, it has polled a few times until then."""
_NAP, _LONGEST_NAP, _SHARE = 50e-6, 2e-3, 0.02
"""Seconds of a sleep: a share of the time waited so far, within these bounds. At 50 µs a rank uses
8 to 17 % of a core."""
_PROGRESS = 16
"""Number of polls between calls of MPI, in which messages to other machines proceed while a rank
waits for one of its own."""
_CLOCK = 8
"""Number of yields between looks at the clock."""
_CALLS = 5e-4
"""Seconds between looks for alarms by calls of plans, on ranks without bells: each is two probes,
of 0.3 to 1 µs. A call that has to wait looks in its wait."""
_OFTEN, _LOOKS = 512, 20
"""Number of yields, and of sleeps, between checks for alarms, deadlock and the limit."""
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


class MPIWaits(Detection):
    """Waits of one rank.

    Args:
        limit: longest wait, in seconds.
    """

    def __init__(self, channel: Channel, limit: float) -> None:
        super().__init__(channel.comm.rank, channel.comm.size)
        self.channel = channel
        self._limit = limit
        self.bells: Mapping[int, memoryview] = {}
        self._bell: memoryview | None = None
        self._rung = 0
        self._heard = -math.inf
        self._probes = True  # some ranks have no bell here
        self._asked = self._answered = 0
        # Other threads may call MPI only at this thread level.
        self._multiple = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._stuck: list[Alarm] = []
        self._told = -math.inf
        self.spins = 0 if self.workers > (os.cpu_count() or 1) else _SPINS

    def listen_to(self, bells: Mapping[int, memoryview]) -> None:
        """Use bells, numbers in memory that some ranks share, to detect their alarms without
        probing."""
        self.bells = bells
        self._bell = bells[self.worker]
        self._probes = len(bells) < self.workers
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
        polls, naps = 0, False
        if is_of_python(thread := threading.current_thread()):
            self._threads.add(thread)
        try:
            while not done():
                polls += 1
                if naps:
                    time.sleep(wait.nap)
                    looks = polls % _LOOKS == 0
                else:
                    os.sched_yield()
                    looks = polls % _OFTEN == 0
                if naps or polls % _CLOCK == 0:
                    waited = time.monotonic() - wait.begun
                    naps = waited > _YIELDING
                    wait.nap = min(max(_NAP, _SHARE * waited), _LONGEST_NAP)
                if self._probes and (polls % _PROGRESS == 0 or wait.nap > _NAP):
                    self.channel.progress()
                if looks:
                    self._look(wait)
        finally:
            if self._member.told:
                self._stop_waiting()

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
        if waited > LONG and self.workers > 1 and self._is_alone():
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

    def _say_note(self, peer: int, note: Note) -> None:
        self.channel.say(peer, NOTE, note)

    def _next_note(self) -> tuple[int, Note] | None:
        said = self.channel.anyone(NOTE)
        return None if said is None else (said[0], said[2])

    def _is_alone(self) -> bool:
        """True if no other thread of this rank may do what others wait for."""
        alone = self._has_one_thread(threading.get_ident())
        if not alone:
            self._stop_waiting()
        return alone

    def _tell(self, wait: _Long) -> None:
        """Report this rank's wait, answer notes, and hold while the coordinator asks the others."""
        while True:
            state = None if wait.done() else self._state(wait.who, wait.busy)
            self._tell_wait()
            self._hear_notes(lambda state=state: state)  # type: ignore[misc]
            if not self._member.held:
                return
            time.sleep(_NAP)

    def _judge(self, busy: int) -> None:
        error = self._verdict(busy)
        if error is not None:
            self.channel.epoch += 1
            raise error

    def leaving(self, done: Callable[[], bool], who: Who) -> Callable[[], bool]:
        """Polling function for the end of the program, which reports to others that this rank has
        ended."""
        wait = _Long(done, who, self.busy)

        def poll() -> bool:
            if done():
                self._stop_waiting()
                return True
            WATCHDOG.looked = now = time.monotonic()
            waited = now - wait.begun
            if waited > LONG:
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
        self._told = time.monotonic()
        for peer in range(self.workers):
            if peer != self.worker:
                self.channel.say(peer, ALARM, alarm)
                if peer in self.bells:
                    self.bells[peer][_ALARMED] = time.monotonic_ns()

    def _hear_alarms(self) -> bool:
        """Process arrived alarms: each breaks its plan, unless broken already, and no other. True
        if any arrived."""
        any_came = False
        self._heard = time.perf_counter()
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
        if bell is not None and bell[_ALARMED] != self._rung:
            return True
        return self._probes and time.perf_counter() - self._heard > _CALLS

    def check(self, tag: int) -> None:
        if self._bell is None or self._bell[_ALARMED] == self._rung:
            for _ in range(2 * self.alarmed()):  # a probe may only progress what the next one finds
                self._hear_alarms()
        else:
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
            if peer in self.bells:
                self.bells[peer][_ASKED] = time.monotonic_ns()
            elif self._multiple:
                self.channel.say(peer, ASK, None)

    def stuck(self) -> str | None:
        """Report about this rank, or None. Called in the watchdog's thread; a report is due if
        others have asked, and the rank does not wait in linop, where it would answer itself."""
        bell = self._bell
        if bell is not None:
            self._asked, self._answered = bell[_ASKED], bell[_ANSWERED]
        if self._probes and self._multiple and self.channel.anyone(ASK) is not None:
            self._asked = time.monotonic_ns()
        # What MPI could not send at once it sends in later calls, of which this rank may make none.
        if self._multiple and time.monotonic() - self._told < _SENDING:
            self.channel.progress()
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
_SENDING = 60.0
"""Seconds after an alarm in which the watchdog lets MPI proceed."""


class _Long:
    """State of one wait."""

    def __init__(self, done: Callable[[], bool], who: Who, busy: int) -> None:
        self.done = done
        self.who = who
        self.busy = busy  # at the start of the wait: other threads may call other plans
        self.begun = time.monotonic()
        self.nap = _NAP
        self.next_words = _MINUTE

    def words(self) -> str:
        """Description of the wait, with the user's source line."""
        return at_place(awaited(self.who()).words)
