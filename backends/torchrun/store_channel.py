"""The control channel of one process over a `torch.distributed.TCPStore`: control messages, notes
about waits, and a log of alarms that all processes read in the same order.

The log is read by a thread of its own, which blocks in the store: waiting for a key with a timeout
that expires prints warnings, and costs a connection. Control messages and notes are polled instead
(one round trip). An error that ended the waits of all workers begins a new epoch, whose names
differ. Messages that were forged, repeated or deleted (`linop.backends.torchrun.signed_store`)
end every use of the channel, on all workers.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch.distributed as dist

from linop.backends.together.transport import ANY
from linop.backends.torchrun.signed_store import LONGEST, SignedStore, TamperedError
from linop.errors import BackendError, LinopError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_STOPS = 1.0
"""Longest wait for the thread to stop, in seconds."""
_AUDIT = 0.25
"""Seconds between looks for what others have done to messages, at least."""


@dataclass(frozen=True)
class Alarm:
    """An error sent to all workers.

    Args:
        worker: its origin.
        tag, call: the plan and the call that failed.
        stuck: the origin's wait, if all waits end; `why`, the opening of the error's text.
        epoch, generation: the origin's, of control messages and of connections.
    """

    error: LinopError
    worker: int
    tag: int
    call: int = 0
    stuck: str | None = None
    why: str = ""
    epoch: int = 0
    generation: int = 0


@dataclass(frozen=True)
class Ended:
    """A worker's end.

    Args:
        well: False if its process ends by an exception, or with a nonzero status.
    """

    worker: int
    well: bool


@dataclass(frozen=True)
class Tampered:
    """A worker's word that somebody else writes to the store, or deletes messages in it."""

    worker: int
    words: str


class StoreChannel:
    """Control messages between this worker and others.

    Args:
        store: a connection to a store that is used by these workers alone; worker 0 has the server.
        key: as of a `SignedStore`.
        hear: called with each alarm, in the thread that reads the log.

    Attributes:
        epoch: number of errors so far that ended the waits of all workers.
        alarms: alarms of other workers that are not processed yet.
        ended: workers that have ended.
        lost: True if the server has ended.
        tampered: the error of every use, once somebody else has used the store; None before.
    """

    def __init__(
        self,
        store: Store,
        key: bytes,
        worker: int,
        workers: int,
        hear: Callable[[Alarm], None],
    ) -> None:
        self.worker = worker
        self.workers = workers
        self.epoch = 0
        self.alarms: deque[Alarm] = deque()
        self.ended: set[int] = set()
        self.lost = False
        self.tampered: TamperedError | None = None
        self._store = SignedStore(store, key, self._lose)
        self._hear = hear
        self._said: Counter[str] = Counter()
        self._heard: Counter[str] = Counter()
        self._met: Counter[int] = Counter()
        self._next = 1
        """Number of the first message of the log that was not read."""
        self._audited = time.monotonic()
        self._failed = False
        self._thread = threading.Thread(target=self._listen, name="linop-alarms", daemon=True)
        self._thread.start()

    # Messages

    def say(self, peer: int, item: object) -> None:
        """Send an item to a worker; returns at once."""
        self._post(f"{self.epoch}/{self.worker}/{peer}", item)

    def heard(self, peer: int) -> tuple[Any] | None:
        """The next item from a worker, in a tuple; None if it has not arrived."""
        return self._next_of(f"{self.epoch}/{peer}/{self.worker}")

    def note(self, peer: int, item: object) -> None:
        """Send an item of another kind to a worker; returns at once."""
        self._post(f"note/{self.worker}/{peer}", item)

    def noted(self, senders: Iterable[int]) -> tuple[int, Any] | None:
        """The next item of `note` from one of some workers, with its sender; None if none has
        arrived."""
        for sender in senders:
            found = self._next_of(f"note/{sender}/{self.worker}")
            if found is not None:
                return sender, found[0]
        return None

    def _post(self, series: str, item: object) -> None:
        with self._sound():
            self._said[series] += 1
            self._store.put(f"{series}/{self._said[series]}", item, f"received/{series}")

    def _next_of(self, series: str) -> tuple[Any] | None:
        number = self._heard[series] + 1
        with self._sound():
            found = self._store.take(f"{series}/{number}", f"received/{series}", number)
        if found is not None:
            self._heard[series] = number
        return found

    def meet(self, item: object) -> Callable[[], list[Any] | None]:
        """Begin an all-gather. Returns a function that returns all items, by worker; None while
        some have not arrived."""
        self._met[self.epoch] += 1
        number = self._met[self.epoch]
        names = self._names(number)
        with self._sound():
            self._store.put(names[self.worker], item)

        def everyones() -> list[Any] | None:
            with self._sound():
                said = self._store.all_of(names)
                if said is not None:
                    # All have come here, and so have read the items of the all-gather before.
                    self._store.delete(self._names(number - 1)[self.worker])
            return said

        return everyones

    def missing(self) -> list[int]:
        """Workers that have not come to the current all-gather."""
        with self._sound():
            names = self._names(self._met[self.epoch])
            return [w for w, name in enumerate(names) if not self._store.has(name)]

    def _names(self, number: int) -> list[str]:
        return [f"{self.epoch}/all/{number}/{worker}" for worker in range(self.workers)]

    def _lose(self) -> None:
        self.lost = True
        self.ended.add(0)

    # Others who use the store

    def check_sound(self) -> None:
        """Raise the error of somebody else who has used the store."""
        if self.tampered is not None:
            raise TamperedError(str(self.tampered))

    @contextmanager
    def _sound(self) -> Iterator[None]:
        self.check_sound()
        try:
            yield
        except TamperedError as error:
            self._is_tampered(str(error), told=False)
            raise

    def audit(self) -> None:
        """Look, now and then, for what others have done to this worker's messages.

        Raises:
            TamperedError: somebody else has deleted or written some.
        """
        if time.monotonic() - self._audited >= _AUDIT:
            with self._sound():
                self._store.audit()
            self._audited = time.monotonic()

    def _is_tampered(self, words: str, told: bool) -> None:
        """Remember the error, interrupt the waits of this worker, and tell the others.

        Args:
            told: True if the others know.
        """
        if self.tampered is not None:
            return
        self.tampered = TamperedError(words)
        if not told:
            with suppress(LinopError):
                self._store.append("log", self._next, Tampered(self.worker, words))
        self._hear(Alarm(self.tampered, self.worker, ANY))

    # The log

    def tell(self, said: Alarm | Ended) -> None:
        """Append to the log."""
        with self._sound():
            self._store.append("log", self._next, said)

    def _listen(self) -> None:
        while not self._is_over():
            try:
                said = self._store.following("log", self._next)
            except dist.DistStoreError:  # after `LONGEST`
                continue
            except dist.DistError:
                self._lose()
                return
            except BackendError as error:  # all read the same
                self._is_tampered(str(error), told=True)
                return
            self._next += 1
            if isinstance(said, Tampered):
                self._is_tampered(f"worker {said.worker}: {said.words}", told=True)
                return
            self._read(said)

    def _read(self, said: Alarm | Ended) -> None:
        if isinstance(said, Ended):
            self.ended.add(said.worker)
            self._failed |= said.worker == self.worker and not said.well
        elif said.worker != self.worker:
            self.alarms.append(said)
            self._hear(said)

    def _is_over(self) -> bool:
        """True if this worker has ended, and no other needs its server."""
        last = self.worker != 0 or self._failed or len(self.ended) == self.workers
        return self.worker in self.ended and last

    def end(self, well: bool) -> None:
        """Announce this worker's end."""
        if not self.lost:
            self.tell(Ended(self.worker, well))

    def stay(self, well: bool, patience: float) -> None:
        """Wait for the thread to end. That of worker 0, which has the server, waits for the others'
        ends, at most `patience` seconds, unless it has failed."""
        self._thread.join(min(patience, LONGEST) if well and self.worker == 0 else _STOPS)

    def forked(self) -> None:
        """Make every use raise."""
        self.lost = True
        for connection in self._store.forked(_Gone()):
            keep(connection)


def keep(connection: object) -> None:
    """Keep an object of torch alive until the process ends: in a fork, which lacks the threads of
    its parent, its end is a crash."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))


class _Gone:
    """Replacement of the connections in a fork of the process."""

    def __getattr__(self, name: str) -> NoReturn:
        raise BackendError("backend 'torch' cannot be used in a fork of its process")
