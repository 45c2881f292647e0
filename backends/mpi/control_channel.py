"""The control channel of one rank: control messages (`linop.backends.together.messages`), with
tags that plans' messages never have.

Between two ranks they arrive in the order sent, for each kind. An error that ends the waits of all
ranks begins a new epoch; control messages of earlier epochs are dropped.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

from mpi4py import MPI

from linop.backends.together.messages import decoded, encoded
from linop.errors import LinopError

CALL, ALARM, NOTE, ALL, ASK = range(5)
"""Kinds of control messages, as MPI tags; plans have tags from `OWN` on."""
OWN = 5

Box = deque[tuple[int, Any]]
Until = Callable[[Callable[[], bool]], None]


class Ended:
    """Replacement of an unusable communicator: any attribute access raises the reason."""

    def __init__(self, error: LinopError) -> None:
        self._error = error

    def __getattr__(self, name: str) -> NoReturn:
        raise type(self._error)(str(self._error))


_kept: list[list[MPI.Request]] = []
"""Unfinished sends of ended channels: MPI may still read their buffers."""


class Channel:
    """Control messages between this rank and others.

    Attributes:
        epoch: number of errors so far that ended the waits of all ranks.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.epoch = 0
        self._said: list[MPI.Request] = []
        self._boxes: dict[tuple[int, int], Box] = {}
        self._takes = threading.RLock()
        """Held from a probe to the receive of what it found: another thread might take that."""

    def say(self, peer: int, kind: int, item: Any) -> None:
        """Send an item; returns at once."""
        self._said = [request for request in self._said if not request.Test()]
        data = encoded((self.epoch, item))
        self._said.append(self.comm.Isend([data, MPI.BYTE], peer, kind))

    def end(self, error: LinopError) -> Any:
        """Make every later use raise an error. Returns the replacement of the communicator."""
        _kept.append(self._said)
        self._said = []
        self.comm = Ended(error)  # type: ignore[assignment]
        return self.comm

    def heard(self, peer: int, kind: int) -> bool:
        """True if a control message of the current epoch has arrived from a rank."""
        box = self._boxes.setdefault((peer, kind), deque())
        while not box or box[0][0] < self.epoch:
            if box:
                box.popleft()
            elif not self._take(peer, kind, box):
                return False
        return box[0][0] == self.epoch

    def _take(self, peer: int, kind: int, box: Box) -> bool:
        """Append the next control message from a rank, if one has arrived."""
        with self._takes:
            if not self.comm.Iprobe(peer, kind):
                return False
            box.append(self._received(peer, kind)[1])
            return True

    def next(self, peer: int, kind: int) -> Any:
        """The next control message from a rank, once `heard` is true."""
        return self._boxes[peer, kind].popleft()[1]

    def progress(self) -> None:
        """Let MPI proceed with messages."""
        self.comm.Iprobe(MPI.ANY_SOURCE, ALARM)

    def anyone(self, kind: int) -> tuple[int, int, Any] | None:
        """The next control message from any rank, as (rank, epoch, item); None if none has
        arrived."""
        with self._takes:
            if not self.comm.Iprobe(MPI.ANY_SOURCE, kind):
                return None
            peer, (epoch, item) = self._received(MPI.ANY_SOURCE, kind)
        return peer, epoch, item

    def _received(self, peer: int, kind: int) -> tuple[int, tuple[int, Any]]:
        status = MPI.Status()
        self.comm.Probe(peer, kind, status)  # does not wait: a message has arrived
        data = bytearray(status.Get_count(MPI.BYTE))
        self.comm.Recv([data, MPI.BYTE], status.Get_source(), kind)
        return status.Get_source(), decoded(data)
