"""One rank's transport: buffers of bytes through mpi4py, alarms, and waits that end.

Whatever buffer mpi4py takes will do, an array of a device too, where the MPI library does.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import numpy as np
from mpi4py import MPI

from linop.backends.transports.control_channel import ALL, CALL, OWN, Channel
from linop.backends.transports.deadlock import Key
from linop.backends.transports.transport import ANY, MEET, Awaited, Who, check_doing, gathering
from linop.backends.transports.waiting import Waits
from linop.backends.transports.watchdog import WATCHDOG
from linop.errors import LinopError, communication
from linop.planning import collective_selection
from linop.spaces.scalars import Array

_QUIET = 3
"""Looks in a row that find no message, where none is on its way any more."""
_NAP = 50e-6
"""Seconds of a sleep between looks."""
_BITS = 40
_ALL: Key = "all", 0
"""The conversations of all ranks."""


class Ranks(Waits):
    """One rank's transport (`linop.backends.transports.transport.Transport`) over a communicator of
    our own.

    Args:
        limit: seconds that a wait may take.
    """

    name = "MPI"

    def __init__(self, comm: MPI.Intracomm, limit: float) -> None:
        super().__init__(Channel(comm), limit)
        self.comm = comm
        self._over = False
        self._gatherings = 0
        self._tags: int = (comm.Get_attr(MPI.TAG_UB) or 32767) - OWN

    def receiver(self, peer: int, tag: int, buffer: Array) -> MPI.Prequest:
        return self.comm.Recv_init(_message(buffer), peer, self._tag(tag))

    def sender(self, peer: int, tag: int, buffer: Array) -> MPI.Prequest:
        return self.comm.Send_init(_message(buffer), peer, self._tag(tag))

    def start(self, requests: list[MPI.Prequest]) -> None:
        MPI.Prequest.Startall(requests)

    def receive(self, peer: int, tag: int, buffer: Array) -> MPI.Request:
        return self.comm.Irecv(_message(buffer), peer, self._tag(tag))

    def send(self, peer: int, tag: int, buffer: Array) -> MPI.Request:
        return self.comm.Isend(_message(buffer), peer, self._tag(tag))

    def _tag(self, tag: int) -> int:
        return OWN + tag % self._tags

    def test(self, pending: Sequence[MPI.Request]) -> bool:
        return MPI.Request.Testall(pending)

    def wait(self, pending: Sequence[MPI.Request], who: Who) -> None:
        testall = MPI.Request.Testall
        if not testall(pending):
            self.until(lambda: testall(pending), who)

    def free(self, requests: Sequence[MPI.Prequest]) -> None:
        for request in requests if self.usable else ():
            if request.Test():
                request.Free()
            else:
                keep(request)

    def abandon(self, receives: Sequence[MPI.Request], sends: Sequence[MPI.Request]) -> None:
        for request in receives if self.usable else ():
            if not request.Test():
                request.Cancel()
                request.Wait()  # does not wait: a receive that is cancelled is over
        for request in sends if self.usable else ():
            if not request.Test():
                keep(request)

    @property
    def usable(self) -> bool:
        """True if MPI may be called for requests."""
        return not (self._over or MPI.Is_finalized())

    def end(self, error: LinopError) -> None:
        """Raise an error in place of whatever is tried from here on; what is pending is left."""
        WATCHDOG.forget(self)
        self._over = True
        self.comm = self.channel.end(error)

    def leave(self) -> None:
        """Free the communicator: collective. What was sent in calls that failed is received first,
        for MPI may give the same context to another communicator, whose plans have the same tags.
        """
        WATCHDOG.forget(self)  # its thread must not receive what is received here
        status = MPI.Status()
        quiet = 0
        while quiet < _QUIET:
            if self.comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
                data = bytearray(status.Get_count(MPI.BYTE))
                self.comm.Recv([data, MPI.BYTE], status.Get_source(), status.Get_tag())
            else:
                quiet += 1
        self.comm.Free()

    def gather_all(self, data: bytes, doing: str = MEET, about: object = "") -> list[bytes]:
        if doing != MEET:
            self.recorder.meets(doing, about)
        said = self._gathered((doing, data), doing, about)
        if len({one for one, _ in said}) > 1:
            check_doing(self._gathered((doing, str(about)), doing, about))
        return [one for _, one in said]

    @communication()
    def _gathered(self, mine: Any, doing: str, about: object) -> list[Any]:
        """Everybody's item, by worker: the algorithm of Bruck et al. (1997), in ⌈log₂ n⌉ rounds."""
        n, me, say = self.workers, self.worker, self.channel.say
        self.busy = ANY
        # Errors that ended the waits of all may have ended them in different gatherings.
        number = max(self._gatherings, self.channel.epoch << _BITS) + 1
        items, step = [mine], 1
        while step < n:
            peer = (me + step) % n
            say((me - step) % n, ALL, items[: n - step])
            self._hear(peer, ALL, partial(_waits, peer, doing, about, len(items), number))
            items += self.channel.next(peer, ALL)
            step *= 2
        self._gatherings, self.points[_ALL] = number, (number, math.inf)
        return items[n - me :] + items[: n - me]

    def post(self, peer: int, data: bytes) -> None:
        self.channel.say(peer, CALL, data)

    def fetch(self, peer: int, who: Who, patience: float | None = None) -> bytes | None:
        if patience is not None:
            begun = time.monotonic()
            while not self.channel.heard(peer, CALL):
                if time.monotonic() - begun > patience:
                    return None
                time.sleep(_NAP)
        self._hear(peer, CALL, who)
        data: bytes = self.channel.next(peer, CALL)
        return data

    def _hear(self, peer: int, kind: int, who: Who) -> None:
        heard = partial(self.channel.heard, peer, kind)
        if not heard():
            self.until(heard, who)


def _waits(peer: int, doing: str, about: object, at: int, number: int) -> Awaited:
    return Awaited(gathering(peer, doing, about), (peer,), at, key=_ALL, number=number)


def keep(request: MPI.Request) -> None:
    """Keep a request, which keeps its buffer: MPI may use it as long as there is MPI."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(request))


def _message(buffer: Array) -> list[Any]:
    """A contiguous array's memory, as mpi4py takes it."""
    data = _bytes(buffer)
    return (
        [data, MPI.BYTE]
        if data.nbytes <= collective_selection.LARGE
        else [data, 1, _large(data.nbytes)]
    )


@cache
def _large(size: int) -> MPI.Datatype:
    """A datatype of so many bytes, too many to be counted. It is kept, as messages of a size come
    again."""
    piece = collective_selection.LARGE // 2 + 1
    whole = MPI.BYTE.Create_contiguous(piece)
    count, rest = divmod(size, piece)
    large = MPI.Datatype.Create_struct([count, rest], [0, count * piece], [whole, MPI.BYTE])
    whole.Free()
    return large.Commit()


def _bytes(buffer: Array) -> Array:
    """A contiguous array's memory, whatever its dtype: a movement does not look at values."""
    return buffer.reshape(-1).view(np.uint8)
