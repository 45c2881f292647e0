"""One rank's transport: buffers of bytes through mpi4py, alarms, and waits that end.

Whatever buffer mpi4py takes will do, an array of a device too, where the MPI library does.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI

from linop.backends.transport import ANY, Who, heard
from linop.errors import DeadlockError, LinopError
from linop.scalars import Array

_CALL, _ALARM, _OWN = 0, 1, 2
"""Tags of `post` and `alarm`, and how many there are; plans have the others."""
_GRACE = 5.0
"""Seconds to wait on where another plan has failed: its workers may come to this one."""
_QUIET = 3
"""Looks in a row that find no message, where none is on its way any more."""
_COMING = 2e-3
"""Seconds that an alarm may come later than its bell."""
_PATIENCE = 1.0
"""Seconds to wait for what others wait for."""
_SPINS = 50
"""Polls before a rank that waits yields its core between them, if every rank has one: a yield costs
little where nobody else wants it, and two ranks that share one wait for each other."""
_YIELDS = 20000
"""Polls after which it sleeps between them."""
_NAP = 50e-6
"""Seconds of such a sleep."""
_LOOKS = 20
"""Naps after which it looks for alarms, and at the clock."""


@dataclass(frozen=True)
class Alarm:
    """An error for all ranks: from which it is, the plan that it is about, and what that rank waits
    for, if it is stuck."""

    error: LinopError
    worker: int
    tag: int
    stuck: str | None = None


class Ranks:
    """One rank's transport (`linop.backends.transport.Transport`) over a communicator of our own.

    Args:
        limit: seconds that a wait may take.
    """

    name = "MPI"

    def __init__(self, comm: MPI.Intracomm, limit: float) -> None:
        self.comm = comm
        self._limit = limit
        self.worker: int = comm.rank
        self.workers: int = comm.size
        self._tags: int = (comm.Get_attr(MPI.TAG_UB) or 32767) - _OWN
        self._said: list[MPI.Request] = []
        self.bells: list[memoryview] | None = None
        self._bell: memoryview | None = None
        self.busy = ANY
        self._rung = 0
        self._heard: list[Alarm] = []
        self.spins = 0 if comm.size > (os.cpu_count() or 1) else _SPINS

    def listen_to(self, bells: list[memoryview]) -> None:
        """Learn of alarms by numbers in shared memory."""
        self.bells = bells
        self._bell = bells[self.worker]
        self._rung = bells[self.worker][0]

    def receiver(self, peer: int, tag: int, buffer: Array) -> MPI.Prequest:
        return self.comm.Recv_init([_bytes(buffer), MPI.BYTE], peer, self._tag(tag))

    def sender(self, peer: int, tag: int, buffer: Array) -> MPI.Prequest:
        return self.comm.Send_init([_bytes(buffer), MPI.BYTE], peer, self._tag(tag))

    def start(self, requests: list[MPI.Prequest]) -> None:
        MPI.Prequest.Startall(requests)

    def receive(self, peer: int, tag: int, buffer: Array) -> MPI.Request:
        return self.comm.Irecv([_bytes(buffer), MPI.BYTE], peer, self._tag(tag))

    def send(self, peer: int, tag: int, buffer: Array) -> MPI.Request:
        return self.comm.Isend([_bytes(buffer), MPI.BYTE], peer, self._tag(tag))

    def _tag(self, tag: int) -> int:
        return _OWN + tag % self._tags

    def test(self, pending: Sequence[MPI.Request]) -> bool:
        return MPI.Request.Testall(pending)

    def wait(self, pending: Sequence[MPI.Request], who: Who) -> None:
        testall = MPI.Request.Testall
        if not testall(pending):
            self.until(lambda: testall(pending), who)

    def until(self, done: Callable[[], bool], who: Who) -> None:
        """Poll until something is done. MPI's own wait may spin; ranks that share a core, or wait
        long, must let others run.

        Raises:
            LinopError: another rank raised an alarm. DeadlockError: the limit is reached.
        """
        for _ in range(self.spins):
            if done():
                return
        polls = 0
        begun = time.monotonic()
        while not done():
            polls += 1
            if polls < _YIELDS:
                os.sched_yield()
                continue
            time.sleep(_NAP)
            if polls % _LOOKS == 0:
                self._look(time.monotonic() - begun, who)

    def _look(self, waited: float, who: Who) -> None:
        """Raise what makes it useless to wait on: an alarm for the plan that is being called, or
        any for too long; or the limit."""
        alarm = self._alarm()
        if alarm is not None:
            self._heard.append(alarm)
        if waited > self._limit or any(alarm.stuck is not None for alarm in self._heard):
            raise heard(self._stuck(who), self.busy)
        for alarm in self._heard:
            if self.busy in (alarm.tag, ANY) or waited > _GRACE:
                self._heard.remove(alarm)
                raise heard(alarm.error, alarm.tag)

    def _stuck(self, who: Who) -> DeadlockError:
        """Tell the others what this rank waits for, and hear what they wait for."""
        mine = f"worker {self.worker} waits for {who()}"
        text = f"a wait took longer than {self._limit:g} s"
        waits = {self.worker: mine}
        self._tell_all(Alarm(DeadlockError(f"{text}: {mine}"), self.worker, self.busy, mine))
        begun = time.monotonic()
        while len(waits) < self.workers and time.monotonic() - begun < _PATIENCE:
            waits |= {a.worker: a.stuck for a in self._heard if a.stuck is not None}
            self._heard = [alarm for alarm in self._heard if alarm.stuck is None]
            time.sleep(_NAP)
            alarm = self._alarm()
            self._heard += [] if alarm is None else [alarm]
        for peer in range(self.workers):
            waits.setdefault(peer, f"worker {peer} does not wait in linop")
        return DeadlockError(f"{text}: {'; '.join(waits[peer] for peer in sorted(waits))}")

    def free(self, requests: Sequence[MPI.Prequest]) -> None:
        for request in requests if not MPI.Is_finalized() else ():
            if request.Test():
                request.Free()
            else:
                _keep(request)

    def abandon(self, receives: Sequence[MPI.Request], sends: Sequence[MPI.Request]) -> None:
        for request in receives:
            if not request.Test():
                request.Cancel()
                request.Wait()  # does not wait: a receive that is cancelled is over
        for request in sends:
            if not request.Test():
                _keep(request)

    def leave(self) -> None:
        """Free the communicator: collective. What was sent in calls that failed is received first,
        for MPI may give the same context to another communicator, whose plans have the same tags.
        """
        status = MPI.Status()
        quiet = 0
        while quiet < _QUIET:
            if self.comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
                data = bytearray(status.Get_count(MPI.BYTE))
                self.comm.Recv([data, MPI.BYTE], status.Get_source(), status.Get_tag())
            else:
                quiet += 1
        self.comm.Free()

    def gather_all(self, data: bytes) -> list[bytes]:
        gathered = bytearray(len(data) * self.workers)
        request = self.comm.Iallgather([data, MPI.BYTE], [gathered, MPI.BYTE])
        try:
            self.wait([request], lambda: "all others to compile, or to take an inner product")
        except BaseException:
            _keep(request)
            raise
        pieces = range(0, len(gathered), len(data)) if data else []
        return [bytes(gathered[k : k + len(data)]) for k in pieces]

    def post(self, peer: int, data: bytes) -> None:
        self._say(peer, _CALL, data)

    def fetch(self, peer: int, who: Who, patience: float | None = None) -> bytes | None:
        if patience is not None:
            begun = time.monotonic()
            while not self.comm.Iprobe(peer, _CALL):
                if time.monotonic() - begun > patience:
                    return None
                time.sleep(_NAP)
        return self._hear(peer, _CALL, who)

    def _say(self, peer: int, tag: int, data: bytes) -> None:
        self._said = [request for request in self._said if not request.Test()]
        self._said.append(self.comm.Isend([data, MPI.BYTE], peer, tag))

    def _hear(self, peer: int, tag: int, who: Who) -> bytes:
        status = MPI.Status()
        if not self.comm.Iprobe(peer, tag, status):
            self.until(lambda: self.comm.Iprobe(peer, tag, status), who)
        data = bytearray(status.Get_count(MPI.BYTE))
        self.comm.Recv([data, MPI.BYTE], status.Get_source(), tag)
        return bytes(data)

    def alarm(self, error: LinopError, tag: int) -> None:
        self._tell_all(Alarm(error, self.worker, tag))

    def _tell_all(self, alarm: Alarm) -> None:
        data = pickle.dumps(alarm)
        for peer in range(self.workers):
            if peer != self.worker:
                self._say(peer, _ALARM, data)
                if self.bells is not None:
                    self.bells[peer][0] = time.monotonic_ns()

    def _alarm(self) -> Alarm | None:
        """The next alarm that has come."""
        if not self.comm.Iprobe(MPI.ANY_SOURCE, _ALARM):
            return None
        alarm: Alarm = pickle.loads(self._hear(MPI.ANY_SOURCE, _ALARM, lambda: "an alarm"))
        return alarm

    def alarmed(self) -> bool:
        bell = self._bell
        return bell is None or bell[0] != self._rung or bool(self._heard)

    def check(self) -> None:
        alarm = None
        if self.bells is None:
            alarm = self._alarm() or self._alarm()  # one look may only bring what the next finds
        elif self.bells[self.worker][0] != self._rung:
            self._rung = self.bells[self.worker][0]
            begun = time.monotonic()
            # It was sent before the bell was rung; but maybe on another communicator.
            while alarm is None and time.monotonic() - begun < _COMING:
                alarm = self._alarm()
        if alarm is not None:
            self._heard.append(alarm)
        if self._heard:
            alarm = self._heard.pop(0)
            raise heard(alarm.error, alarm.tag)


def _keep(request: MPI.Request) -> None:
    """Keep a request, which keeps its buffer: MPI may use it as long as there is MPI."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(request))


def _bytes(buffer: Array) -> Array:
    """A contiguous array's memory, whatever its dtype: a movement does not look at values."""
    return buffer.reshape(-1).view(np.uint8)
