"""The control channel of one process over a `torch.distributed.TCPStore`: control messages, notes
about waits, and a log of alarms that all processes read in the same order.

The log is read by a thread of its own, which blocks in the store: waiting for a key with a timeout
that expires prints warnings, and costs a connection. Control messages and notes are polled instead
(`check`, one round trip). An error that ended the waits of all workers begins a new epoch, whose
keys differ.
"""

from __future__ import annotations

import ctypes
import pickle
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

from linop.errors import BackendError, LinopError

LONGEST = 20 * 24 * 3600.0
"""Seconds of the longest wait that torch's sockets can be given."""
_STOPS = 1.0
"""Longest wait for the thread to stop, in seconds."""


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


class StoreChannel:
    """Control messages between this worker and others.

    Args:
        store: a connection to a store that is used by these workers alone; worker 0 has the server.
        hear: called with each alarm, in the thread that reads the log.

    Attributes:
        epoch: number of errors so far that ended the waits of all workers.
        alarms: alarms of other workers that are not processed yet.
        ended: workers that have ended.
        lost: True if the server has ended.
    """

    def __init__(
        self, store: dist.Store, worker: int, workers: int, hear: Callable[[Alarm], None]
    ) -> None:
        self.worker = worker
        self.workers = workers
        self.epoch = 0
        self.alarms: deque[Alarm] = deque()
        self.ended: set[int] = set()
        self.lost = False
        self._store: Any = store
        self._hear = hear
        self._said: Counter[tuple[int, int]] = Counter()
        self._heard: Counter[tuple[int, int]] = Counter()
        self._met: Counter[int] = Counter()
        self._noted = 0
        # A connection serves one thread at a time. The server may look up the name of each.
        self._uses = threading.Lock()
        self._log: Any = store.clone()
        self._log.set_timeout(timedelta(seconds=LONGEST))
        self._failed = False
        self._thread = threading.Thread(target=self._listen, name="linop-alarms", daemon=True)
        self._thread.start()

    # Messages

    def say(self, peer: int, item: object) -> None:
        """Send a picklable item to a worker; returns at once."""
        self._said[self.epoch, peer] += 1
        number, data = self._said[self.epoch, peer], pickle.dumps(item)
        with self._kept():
            self._store.set(f"{self.epoch}/{self.worker}/{peer}/{number}", data)

    def heard(self, peer: int) -> tuple[Any] | None:
        """The next item from a worker, in a tuple; None if it has not arrived."""
        key = f"{self.epoch}/{peer}/{self.worker}/{self._heard[self.epoch, peer] + 1}"
        with self._kept():
            if not self._store.check([key]):
                return None
            self._heard[self.epoch, peer] += 1
            data = self._store.get(key)
            self._store.delete_key(key)
        return (pickle.loads(data),)

    def note(self, peer: int, item: object) -> None:
        """Send a picklable item to a worker, which gets those of all in one order; returns at
        once."""
        data = pickle.dumps((self.worker, item))
        with self._kept():
            self._store.set(f"note/{peer}/{self._store.add(f'notes/{peer}', 1)}", data)

    def noted(self) -> tuple[int, Any] | None:
        """The next item of `note` from any worker, with its sender; None if none has arrived."""
        key = f"note/{self.worker}/{self._noted + 1}"
        with self._kept():
            if not self._store.check([key]):
                return None
            self._noted += 1
            data = self._store.get(key)
            self._store.delete_key(key)
        sender, item = pickle.loads(data)
        return sender, item

    def meet(self, item: object) -> Callable[[], list[Any] | None]:
        """Begin an all-gather. Returns a function that returns all items, by worker; None while
        some have not arrived."""
        self._met[self.epoch] += 1
        number = self._met[self.epoch]
        keys, data = self._keys(number), pickle.dumps(item)
        with self._kept():
            self._store.set(keys[self.worker], data)

        def everyones() -> list[Any] | None:
            with self._kept():
                if not self._store.check(keys):
                    return None
                said = self._store.multi_get(keys)
                # All have come here, and so have read the items of the all-gather before.
                self._store.delete_key(self._keys(number - 1)[self.worker])
            return [pickle.loads(one) for one in said]

        return everyones

    def missing(self) -> list[int]:
        """Workers that have not come to the current all-gather."""
        keys = self._keys(self._met[self.epoch])
        with self._kept():
            return [w for w, key in enumerate(keys) if not self._store.check([key])]

    def _keys(self, number: int) -> list[str]:
        return [f"{self.epoch}/all/{number}/{worker}" for worker in range(self.workers)]

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Context of a use of the store, by one thread; its loss is an error of linop."""
        try:
            with self._uses:
                yield
        except dist.DistError as error:
            self._lose()
            text = str(error).partition("\n")[0]
            raise BackendError(
                f"worker 0, which keeps the control channel of backend 'torch', has ended ({text})"
            ) from None

    def _lose(self) -> None:
        self.lost = True
        self.ended.add(0)

    # The log

    def tell(self, said: Alarm | Ended) -> None:
        """Append to the log."""
        data = pickle.dumps(said)
        with self._kept():
            self._store.set(f"log/{self._store.add('log', 1)}", data)

    def _listen(self) -> None:
        number = 1
        while not self._is_over():
            try:
                said = pickle.loads(self._log.get(f"log/{number}"))
            except dist.DistStoreError:  # after `LONGEST`
                continue
            except dist.DistError:
                self._lose()
                return
            number += 1
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
        self._uses = threading.Lock()
        keep(self._store)
        keep(self._log)
        self._store = self._log = _Gone()


def keep(connection: object) -> None:
    """Keep an object of torch alive until the process ends: in a fork, which lacks the threads of
    its parent, its end is a crash."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))


class _Gone:
    """Replacement of the connections in a fork of the process."""

    def __getattr__(self, name: str) -> NoReturn:
        raise BackendError("backend 'torch' cannot be used in a fork of its process")
