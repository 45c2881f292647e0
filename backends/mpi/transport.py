"""Transport over MPI: buffers as bytes through mpi4py, and collective gathering over the control
channel.

Device arrays are accepted if mpi4py and the MPI library accept them.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from mpi4py import MPI

from linop.backends.engine.roads.call_numbers import PACKED
from linop.backends.mpi.control_channel import ALL, CALL, OWN, Channel
from linop.backends.mpi.waits import MPIWaits
from linop.backends.together.agreement import ALL as EVERYBODY
from linop.backends.together.agreement import Gathering, gathering
from linop.backends.together.matching import Matching
from linop.backends.together.transport import ANY, Awaited, Item, Who
from linop.backends.together.watchdog import WATCHDOG
from linop.errors import (
    BackendError,
    DeadlockError,
    LinopError,
    communication,
    has_interrupted,
)
from linop.planning import collective_selection
from linop.spaces.scalars import Array

_QUIET = 3
"""Consecutive probes without a message after which none is in flight."""
_NAP = 50e-6
"""Seconds of a sleep between polls."""
_PACKED_FAR = 128 * 1024
"""`packed` for peers on other machines: the number as a message of its own took 10 µs over TCP, two
copies of 64 KiB less; inside a machine it took less than copies of 16 KiB."""
_FEW = 4
"""Number of requests up to which a test of each is faster than one of all, which mpi4py copies."""


class Ranks(MPIWaits, Gathering):
    """One rank's transport (`linop.backends.together.transport.Transport`) over a private
    communicator.

    Args:
        limit: longest wait, in seconds.
    """

    name = "MPI"

    def __init__(self, comm: MPI.Intracomm, limit: float) -> None:
        super().__init__(Channel(comm), limit)
        self.comm = comm
        self.limit = limit
        self.matching = Matching(self.workers)
        self.out_of_step = False
        self.eager: dict[int, int] = {}
        self._over = False
        self._tags: int = (comm.Get_attr(MPI.TAG_UB) or 32767) - OWN

    def packed(self, peer: int) -> int:
        return _PACKED_FAR if peer in self.eager else PACKED

    def receiver(self, peer: int, tag: int, buffer: Array) -> MPI.Prequest:
        return self.comm.Recv_init(_message(buffer), peer, self._tag(tag))

    def sender(self, peer: int, tag: int, buffer: Array) -> MPI.Prequest:
        return self.comm.Send_init(_message(buffer), peer, self._tag(tag))

    def starter(self, requests: list[MPI.Prequest]) -> Callable[[], object]:
        if len(requests) == 1:
            return requests[0].Start  # half of the time of Startall
        return partial(MPI.Prequest.Startall, requests)

    def receive(self, peer: int, tag: int, buffer: Array) -> MPI.Request:
        return self.comm.Irecv(_message(buffer), peer, self._tag(tag))

    def send(self, peer: int, tag: int, buffer: Array) -> MPI.Request:
        return self.comm.Isend(_message(buffer), peer, self._tag(tag))

    def _tag(self, tag: int) -> int:
        return OWN + tag % self._tags

    def test(self, pending: Sequence[MPI.Request]) -> bool:
        return MPI.Request.Testall(pending)

    def tests(self, pending: Sequence[Any]) -> Sequence[Callable[[], bool]]:
        if len(pending) <= _FEW and None not in pending:
            return [request.Test for request in pending]
        return [partial(MPI.Request.Testall, pending)]

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
                request.Wait()  # does not wait: the receive is cancelled
        for request in sends if self.usable else ():
            if not request.Test():
                keep(request)

    @property
    def usable(self) -> bool:
        """True if requests may be passed to MPI."""
        return not (self._over or MPI.Is_finalized())

    def end(self, error: LinopError) -> None:
        """Make every later use raise an error; pending requests are left."""
        WATCHDOG.forget(self)
        self._over = True
        self.comm = self.channel.end(error)

    def leave(self) -> None:
        """Free the communicator; collective. Unreceived messages of failed calls are received
        first: MPI may reuse the context for another communicator, whose plans have the same
        tags."""
        WATCHDOG.forget(self)  # its thread must not receive messages drained below
        status = MPI.Status()
        quiet = 0
        while quiet < _QUIET:
            if self.comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
                data = bytearray(status.Get_count(MPI.BYTE))
                self.comm.Recv([data, MPI.BYTE], status.Get_source(), status.Get_tag())
            else:
                quiet += 1
        self.comm.Free()

    def give_up(self, error: BaseException) -> None:
        """End before a backend is made. The communicator is freed only after an error that all
        ranks raise together: else others may still send, and MPI aborts the job if a message
        arrives for a later, smaller communicator of the same context."""
        told = error if isinstance(error, LinopError) else None
        if told and not (isinstance(told, DeadlockError) or has_interrupted(told)):
            self.leave()
        self.end(told or BackendError(f"the backend could not be made: {error}"))

    @communication()
    def _exchanged(self, mine: Item, doing: str, about: object) -> list[Item]:
        """The all-gather of Bruck et al. (1997), in ⌈log₂ n⌉ rounds."""
        n, me, say = self.workers, self.worker, self.channel.say
        self.busy = ANY
        number = self._number(self.channel.epoch)
        items, step = [mine], 1
        while step < n:
            peer = (me + step) % n
            say((me - step) % n, ALL, items[: n - step])
            self._hear(peer, ALL, partial(_waits, peer, doing, about, len(items), number))
            items += self.channel.next(peer, ALL)
            step *= 2
        self._gathered(number)
        return items[n - me :] + items[: n - me]

    def post(self, peer: int, item: object) -> None:
        self.channel.say(peer, CALL, item)

    def fetch(self, peer: int, who: Who, patience: float | None = None) -> Any:
        if patience is not None:
            begun = time.monotonic()
            while not self.channel.heard(peer, CALL):
                if time.monotonic() - begun > patience:
                    return None
                time.sleep(_NAP)
        self._hear(peer, CALL, who)
        return self.channel.next(peer, CALL)

    def _hear(self, peer: int, kind: int, who: Who) -> None:
        heard = partial(self.channel.heard, peer, kind)
        if not heard():
            self.until(heard, who)


def _waits(peer: int, doing: str, about: object, at: int, number: int) -> Awaited:
    return Awaited(gathering(peer, doing, about), (peer,), at, key=EVERYBODY, number=number)


def keep(request: MPI.Request) -> None:
    """Keep a request and its buffer alive until the process ends: MPI may still use them."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(request))


def _message(buffer: Array) -> list[Any]:
    """Buffer specification of a contiguous array for mpi4py: its bytes, since a movement does not
    depend on values."""
    size = buffer.nbytes
    return (
        [buffer, size, MPI.BYTE]
        if size <= collective_selection.LARGE
        else [buffer, 1, _large(size)]
    )


@cache
def _large(size: int) -> MPI.Datatype:
    """Derived MPI datatype of a number of bytes beyond the range of a count; cached by size."""
    piece = collective_selection.LARGE // 2 + 1
    whole = MPI.BYTE.Create_contiguous(piece)
    count, rest = divmod(size, piece)
    large = MPI.Datatype.Create_struct([count, rest], [0, count * piece], [whole, MPI.BYTE])
    whole.Free()
    return large.Commit()
