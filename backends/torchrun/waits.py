"""Waits of one process of torch.distributed, and what ends them: alarms, deadlocks, the limit.

A wait for a message blocks in gloo, and a wait for a control message polls the store. So two
threads look after them: one hears alarms; the other exchanges notes about long waits, as a rank of
MPI does in its wait. Either interrupts gloo's waits by closing this process's connections. A thread
whose wait is over while the coordinator asks holds at its end.
"""

from __future__ import annotations

import math
import os
import platform
import sys
import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from linop.backends.together.counted_threads import is_of_python
from linop.backends.together.deadlock import (
    COORDINATOR,
    Key,
    Note,
    State,
    Wait,
    who_waits,
)
from linop.backends.together.detection import LONG, Detection
from linop.backends.together.recorder import at_place
from linop.backends.together.transport import ANY, Who, awaited, heard
from linop.backends.together.watchdog import stacks
from linop.backends.torchrun.store_channel import Alarm, Ended, StoreChannel
from linop.errors import BackendError, DeadlockError, LinopError

_NAPS = 10e-6, 1e-3
"""Seconds between polls of a control wait: initially, and at most. A poll is a round trip to the
store."""
_PATIENCE = 1.0
"""Seconds to collect the descriptions of other workers' waits."""
_ALIVE = 0.3
"""Seconds in which a worker that does not wait in linop may begin to."""
_SOON = 1e-3
"""Seconds between looks for these."""
_END: Key = "end", 0
"""Key of the wait of a worker that has ended, for deadlock detection."""
_LOOKS = 0.25, 0.02
"""Seconds between looks of the thread that exchanges notes: without a long wait, and with one."""
_LIVES = "lives"
"""A note to worker 0, with the sender's machine and process. Worker 0 keeps the control channel for
all others as long as any lives, and says of one that was killed that it has ended."""
_OFTEN, _SILENT = 2.0, 10.0
"""Seconds between these notes, and without one until a worker counts as killed: at the end of
worker 0, or, before that, if there is no such process on its machine. One that has only stood still
finds no control channel after that end."""


class ThreadWait:
    """Context of a wait of one thread, at whose end a deadlock is raised.

    Attributes:
        busy: tag of the plan that was called when the wait began.
    """

    __slots__ = ("_waits", "begun", "busy", "who")

    def __init__(self, waits: ProcessGroupWaits, who: Who) -> None:
        self._waits = waits
        self.busy = waits.busy
        self.who = who
        self.begun = time.monotonic()

    def __enter__(self) -> ThreadWait:
        here = threading.get_ident()
        self._waits.idents.add(here)
        self._waits.waiting[here] = self
        return self

    def __exit__(self, *error: object) -> None:
        del self._waits.waiting[threading.get_ident()]
        if self._waits.told:
            self._waits.leave_wait(self.busy)


class ProcessGroupWaits(Detection):
    """Waits of one process.

    Args:
        store, key: as of a `StoreChannel`.
        limit: longest wait, in seconds.

    Attributes:
        waiting: waits by thread.
        idents: identifiers of threads that have waited.
        told: True if others may have been told that this worker waits.
        generation: number of times that the connections were opened anew.
    """

    def __init__(self, store: Any, key: bytes, worker: int, workers: int, limit: float) -> None:
        super().__init__(worker, workers)
        self.waiting: dict[int, ThreadWait] = {}
        self.idents = {threading.get_ident()}
        self.told = False
        self._limit = limit
        self.generation = 0
        self._failed: dict[int, int] = {}
        """Generation of connections in which the plan of a tag failed on another worker."""
        self._stuck: list[Alarm] = []
        self._asked: tuple[float, Alarm] | None = None
        self._answered = -1
        self._noting = threading.Condition()
        self._told_life = -math.inf
        self._lives: dict[int, float] = {}
        """Times of the last notes of other workers."""
        self._processes: dict[int, tuple[str, int]] = {}
        """Machine and process of other workers, as far as they have said."""
        self._over = threading.Event()
        self.channel = StoreChannel(store, key, worker, workers, self._hear)
        self._thread = threading.Thread(target=self._look_on, name="linop-waits", daemon=True)
        if workers > 1:
            self._say_life()
            self._thread.start()

    @abstractmethod
    def _close(self, why: str = "") -> None:
        """Close the connections, after which others' waits for this worker end."""

    @abstractmethod
    def _interruption(self) -> Callable[[], object]:
        """Function that ends this process's waits in gloo on the connections that are open now."""

    def until(
        self,
        attempt: Callable[[], Any],
        who: Who,
        peer: int | None,
        patience: float | None = None,
    ) -> Any:
        """Poll until there is something else than None; then return that.

        Args:
            peer: the worker that is waited for; None for all.
            patience: seconds after which None is returned.
        """
        nap, why = _NAPS[0], ""
        if self.alarmed():  # what came before may end all waits
            self.check(self.busy)
        with ThreadWait(self, who) as wait:
            while (found := attempt()) is None:
                self._take_alarms(wait.busy)
                waited = time.monotonic() - wait.begun
                if patience is not None and waited > patience:
                    return None
                if self._is_lost(peer):
                    why = "deadlock"
                elif waited > self._limit:
                    why = f"a wait took longer than {self._limit:g} s"
                if why or self._stuck_now() or self._member.verdict is not None:
                    found = attempt()  # what it said before it ended
                    break
                time.sleep(nap)
                nap = min(2 * nap, _NAPS[1])
        if found is None:
            self._raise_stuck(who, why)
        return found

    def _is_lost(self, peer: int | None) -> bool:
        """True if a worker that is waited for has ended."""
        ended = self.channel.ended
        if peer is not None:
            return peer in ended
        return bool(ended) and not ended.isdisjoint(self.channel.missing())

    # Deadlocks

    def _say_note(self, peer: int, note: Note) -> None:
        self.channel.note(peer, note)

    def _next_note(self) -> tuple[int, Note] | None:
        # The coordinator hears all, the others the coordinator alone.
        senders = range(self.workers) if self.worker == COORDINATOR else (COORDINATOR,)
        while (said := self.channel.noted(senders)) is not None:
            self._lives[said[0]] = time.monotonic()
            if not (isinstance(said[1], tuple) and said[1][0] == _LIVES):
                break
            self._processes[said[0]] = said[1][1:]
        return said

    def _say_life(self) -> None:
        """Tell worker 0, once in a while, that this worker lives."""
        if self.worker and time.monotonic() - self._told_life > _OFTEN:
            self._told_life = time.monotonic()
            self.channel.note(0, (_LIVES, platform.node(), os.getpid()))

    def _say_deaths(self) -> None:
        """On worker 0: say of workers that were killed that they have ended."""
        for worker, (machine, process) in [*self._processes.items()]:  # another thread adds to it
            silent = time.monotonic() - self._lives[worker] > _SILENT
            if silent and worker not in self.channel.ended and machine == platform.node():
                if not _is_running(process):
                    self.channel.tell(Ended(worker, well=False))

    def leave_wait(self, busy: int) -> None:
        """End of a wait that others may have been told of.

        Raises:
            DeadlockError: the coordinator has found one.
        """
        with self._noting:
            while self._member.held and not self.channel.lost and not self.channel.tampered:
                self._noting.wait(_LOOKS[1])
            self.told = False
            with suppress(BackendError):  # the store has ended
                self._stop_waiting()
            error = self._verdict(busy)
        if error is not None:
            self._end_epoch(str(error))
            raise error

    def _look_on(self) -> None:
        """Exchange notes until this worker ends; in a thread of its own."""
        with suppress(BackendError):  # the store has ended
            while not self._over.wait(_LOOKS[self.told]):
                self._say_life()
                self._say_deaths()
                self.channel.audit()
                self._answer_late()
                with self._noting:
                    self._look()
                    self._noting.notify_all()

    def _look(self) -> None:
        long, member = self._long_wait(), self._member
        if member.verdict is not None:
            return  # about to be raised
        if long is None:
            if not member.held:
                self._stop_waiting()
                self.told = False
            if member.held or self.worker == COORDINATOR:
                self._hear_notes(lambda: None)
            return
        self.told = True  # from here on, a thread that leaves its wait waits for the lock
        (ident, wait), interrupt = long, self._interruption()
        if self.waiting.get(ident) is wait:
            self._tell_wait()
            self._hear_notes(cache(lambda: self._state(wait.who, wait.busy, ident)))
        if member.verdict is not None:
            interrupt()

    def _long_wait(self) -> tuple[int, ThreadWait] | None:
        """The wait of the only active thread of this worker, with the thread's identifier, if it
        has taken long; else None."""
        waits = [*self.waiting.items()]
        if len(waits) != 1 or time.monotonic() - waits[0][1].begun < LONG:
            return None
        known = (thread for thread in threading.enumerate() if thread.ident in self.idents)
        self._threads |= {*filter(is_of_python, known)}
        return waits[0] if self._has_one_thread(waits[0][0]) else None

    # Alarms

    def alarm(self, error: LinopError, tag: int, call: int) -> None:
        self._tell(Alarm(error, self.worker, tag, call, generation=self.generation))
        self._close(str(error))

    def alarmed(self) -> bool:
        return bool(self.channel.alarms or self._stuck or self.channel.tampered)

    def check(self, tag: int) -> None:
        self._take_alarms(tag)
        if self._stuck_now():
            self._raise_stuck(None)

    def _tell(self, alarm: Alarm) -> None:
        if self.workers > 1 and not self.channel.lost:
            with suppress(BackendError):  # the store has ended: so do connections
                self.channel.tell(alarm)

    def _take_alarms(self, tag: int) -> None:
        """Process the alarms that have arrived; raise the error of one about this plan."""
        self.channel.check_sound()
        while True:
            try:  # another thread may have taken it
                alarm = self.channel.alarms.popleft()
            except IndexError:
                break
            if alarm.stuck is None:
                self._failed[alarm.tag] = alarm.generation
                self.plans.hear(alarm.tag, alarm.error, alarm.call)
            elif alarm.epoch >= self.channel.epoch:
                self._stuck.append(alarm)
        error = self.plans.alarm(tag)
        if error is not None:
            if self._failed.get(tag) == self.generation:
                self._close(str(error))  # others may wait for this worker
            raise heard(error, tag)

    def _hear(self, alarm: Alarm) -> None:
        """End the waits in gloo that an alarm is about. In the thread that hears alarms."""
        interrupt = self._interruption()  # of connections that are not newer than what follows
        if alarm.stuck is not None:
            if not self._answer(alarm):
                self._asked = time.monotonic(), alarm
        elif alarm.tag == ANY:
            interrupt()
        elif any(wait.busy == alarm.tag for wait in [*self.waiting.values()]):
            if alarm.call <= self.plans.running(alarm.tag):
                interrupt()

    # Errors that end all waits

    def _stuck_now(self) -> list[Alarm]:
        """Alarms that end all waits of this epoch. A later one is about waits that this worker has
        not come to."""
        return [alarm for alarm in self._stuck if alarm.epoch == self.channel.epoch]

    def _answer(self, alarm: Alarm) -> bool:
        """Answer a worker whose wait ends all, if this one waits too, and end its wait."""
        interrupt = self._interruption()
        waits = [*self.waiting.items()]
        if not waits or alarm.epoch != self.channel.epoch:
            return False
        with suppress(LinopError):  # the store has ended, or has been left
            words = [at_place(awaited(wait.who()).words, thread) for thread, wait in waits]
            self._tell_stuck(alarm.epoch, alarm.why, " and ".join(words))
        interrupt()
        return True

    def _answer_late(self) -> None:
        """Report where this worker is, if it has not begun to wait since another one asked."""
        if self._asked is None or time.monotonic() - self._asked[0] < _ALIVE:
            return
        (_, alarm), self._asked = self._asked, None
        late = alarm.epoch == self.channel.epoch and self._answered < alarm.epoch
        if late and not self._answer(alarm):
            self._answered = alarm.epoch
            self._report(f"{alarm.why} elsewhere: this worker does not wait in linop", stacks())

    def _report(self, words: str, more: str = "") -> None:
        calls = f"its last calls, the oldest first:\n{self.plans.last_calls()}{more}"
        sys.stderr.write(f"linop: worker {self.worker}: {words}; {calls}")
        sys.stderr.flush()

    def _tell_stuck(self, epoch: int, why: str, words: str) -> None:
        """Tell others that this worker waits, and that all waits of an epoch end; once."""
        if self._answered < epoch:
            self._answered = epoch
            self._tell(Alarm(DeadlockError(why), self.worker, ANY, 0, words, why, epoch))

    def _raise_stuck(self, who: Who | None, why: str = "") -> NoReturn:
        """End the waits of all workers by one error, which says who waits for what.

        Args:
            who: this worker's wait; None if it does not wait.
            why: the reason; another worker's comes first.
        """
        busy, epoch, waits = self.busy, self.channel.epoch, dict[int, str]()
        for alarm in self._stuck_now()[:1]:
            why = alarm.why
        if who is not None:
            waits[self.worker] = at_place(awaited(who()).words)
            self._tell_stuck(epoch, why, waits[self.worker])
        begun = time.monotonic()
        while time.monotonic() - begun < _PATIENCE and not self.channel.lost:
            waits |= {a.worker: a.stuck for a in self._stuck_now() if a.stuck is not None}
            if len(self.channel.ended.union(waits, [self.worker])) == self.workers:
                break
            time.sleep(_SOON)
            with suppress(LinopError):  # another error, which came too late
                self._take_alarms(ANY)
        ended = self.channel.ended.difference(waits)
        rest = set(range(self.workers)).difference(waits, ended)
        if self.channel.lost:  # nor can the others say what they do
            rest &= {self.worker}
        text = f"{why}: {who_waits(waits, ended, dict.fromkeys(rest, 'does not wait in linop'))}"
        self._report(why)
        self._end_epoch(text)
        raise heard(DeadlockError(text), busy)

    def _end_epoch(self, why: str) -> None:
        self.channel.epoch += 1
        self._stuck = [alarm for alarm in self._stuck if alarm.epoch >= self.channel.epoch]
        self._close(why)

    # The end

    def leave(self, well: bool) -> None:
        """Announce this worker's end; worker 0 waits for the others', and looks on until then.
        Later uses raise."""
        if self._over.is_set():
            return
        with suppress(BackendError):  # the store has ended
            if self.workers > 1:
                last = Wait("", _END, (1, 0), (1, 0), (), ended=True)
                points = {**self.points, **self.plans.points()}
                with self._noting:
                    self._send(self._member.ends(State(last, points), time.monotonic()))
            self.channel.end(well)
        self._close("this worker has left its program")
        self._stay(well)
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(_PATIENCE)

    def _stay(self, well: bool) -> None:
        """Keep the control channel for workers that have not ended, if it is here, as long as one
        of them lives: one that was killed says no end."""
        begun = time.monotonic()
        while True:
            self.channel.stay(well, min(_OFTEN, self._limit))
            now = time.monotonic()
            left = {*range(self.workers)} - self.channel.ended - {self.worker}
            lives = any(now - self._lives.get(peer, begun) < _SILENT for peer in left)
            if self.worker or not well or not lives or now - begun > self._limit:
                return


def _is_running(process: int) -> bool:
    """True if there is such a process on this machine. One that has ended and that nobody has
    waited for still has a number, but no program."""
    try:
        os.kill(process, 0)
        status = Path(f"/proc/{process}/stat").read_text()
    except ProcessLookupError:
        return False
    except OSError:  # another user's, or a system without /proc
        return True
    return status.rpartition(")")[2].split()[0] not in "ZX"
