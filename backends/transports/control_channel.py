"""The control channel of one rank: small things that ranks tell each other, apart from messages.

Between two ranks they arrive in the order sent for a kind. What was said before an error that ended
the waits of all ranks is dropped: each rank counts these, and says how many it has seen.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

from mpi4py import MPI

from linop.errors import LinopError

CALL, ALARM, NOTE, ALL, ASK = range(5)
"""Kinds of what is said, which are tags; plans have the tags from `OWN` on."""
OWN = 5

Box = deque[tuple[int, Any]]
Until = Callable[[Callable[[], bool]], None]


class Ended:
    """In the place of a communicator that cannot be used any more: asked for anything, it raises
    the reason."""

    def __init__(self, error: LinopError) -> None:
        self._error = error

    def __getattr__(self, name: str) -> NoReturn:
        raise type(self._error)(str(self._error))


_kept: list[list[MPI.Request]] = []
"""Sends not yet done when a channel ended: MPI may read the buffers of requests until then."""


class Channel:
    """A rank's messages to others, and theirs to it.

    Attributes:
        epoch: how many errors have ended the waits of all ranks.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.epoch = 0
        self._said: list[MPI.Request] = []
        self._boxes: dict[tuple[int, int], Box] = {}

    def say(self, peer: int, kind: int, item: Any) -> None:
        """Say something; it leaves when it can."""
        self._said = [request for request in self._said if not request.Test()]
        data = pickle.dumps((self.epoch, item))
        self._said.append(self.comm.Isend([data, MPI.BYTE], peer, kind))

    def end(self, error: LinopError) -> Any:
        """Raise an error in place of whatever is tried from here on. What there is in place of the
        communicator."""
        _kept.append(self._said)
        self._said = []
        self.comm = Ended(error)  # type: ignore[assignment]
        return self.comm

    def heard(self, peer: int, kind: int) -> bool:
        """True if a rank has said something more, after the errors that this one knows of."""
        box = self._boxes.setdefault((peer, kind), deque())
        while not box or box[0][0] < self.epoch:
            if box:
                box.popleft()
            elif self.comm.Iprobe(peer, kind):
                box.append(self._received(peer, kind)[1])
            else:
                return False
        return box[0][0] == self.epoch

    def next(self, peer: int, kind: int) -> Any:
        """The next thing that it said, once it is `heard`."""
        return self._boxes[peer, kind].popleft()[1]

    def anyone(self, kind: int) -> tuple[int, int, Any] | None:
        """The next thing that somebody said: who, in which epoch, and what; None if nobody did."""
        if not self.comm.Iprobe(MPI.ANY_SOURCE, kind):
            return None
        peer, (epoch, item) = self._received(MPI.ANY_SOURCE, kind)
        return peer, epoch, item

    def _received(self, peer: int, kind: int) -> tuple[int, tuple[int, Any]]:
        status = MPI.Status()
        self.comm.Probe(peer, kind, status)  # does not wait: it is there
        data = bytearray(status.Get_count(MPI.BYTE))
        self.comm.Recv([data, MPI.BYTE], status.Get_source(), kind)
        return status.Get_source(), pickle.loads(data)
