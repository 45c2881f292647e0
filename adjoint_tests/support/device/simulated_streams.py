"""Streams and events of the simulated device: queues of work, done as late as it can be."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import cache

import numpy as np

from support.device import simulated_nccl

_A_WHILE = 0.02
"""Seconds between two looks at what has not proceeded."""
LOCK = threading.RLock()
_HERE = threading.local()


class Counts:
    """Work done so far, and a flag: MPI may see arrays."""

    launches = 0
    waits = 0
    visible = True


class Stream:
    """A queue of work."""

    def __init__(self, null: bool = False, non_blocking: bool = False) -> None:
        self._queue: deque[Callable[[], object]] = deque()
        self.added = self.done = 0
        self._exchanged = 0
        self.pool: dict[int, list[np.ndarray]] = {}
        self.ptr = id(self)
        STREAMS[self.ptr] = self

    def add(self, work: Callable[[], object]) -> None:
        """Queue work; what returns False is not over, and is called again."""
        with LOCK:
            self._queue.append(work)
            self.added += 1

    def exchange(self, proceed: Callable[[], bool]) -> None:
        """Queue what proceeds by itself, as the work before it does then."""
        with LOCK:
            self.add(proceed)
            self._exchanged = self.added
        _start_proceeding()

    def run_to(self, number: int) -> None:
        begun = time.monotonic()
        while not self._runs_to(number):
            assert time.monotonic() - begun < simulated_nccl.PATIENCE, "the device hangs"
            time.sleep(1e-4)

    def _runs_to(self, number: int) -> bool:
        with LOCK, np.errstate(all="ignore"):
            while self.done < number:
                if self._queue[0]() is False:
                    return False
                self._queue.popleft()
                self.done += 1
        return True

    def reached(self, number: int) -> bool:
        """True if work is done; if not, what waits for an exchange may proceed."""
        if self.done < min(number, self._exchanged):
            self._runs_to(min(number, self._exchanged))
        return self.done >= number

    def synchronize(self) -> None:
        Counts.waits += 1
        self.run_to(self.added)

    def wait_event(self, event: Event) -> None:
        number, stream = event.number, event.stream
        self.add(lambda: stream._runs_to(number))

    def __enter__(self) -> Stream:
        _HERE.__dict__.setdefault("streams", []).append(self)
        return self

    def __exit__(self, *error: object) -> None:
        _HERE.streams.pop()


STREAMS: weakref.WeakValueDictionary[int, Stream] = weakref.WeakValueDictionary()
"""Streams by their addresses."""
NULL, TORCH = Stream(), Stream()


@cache
def _start_proceeding() -> None:
    """Start the thread that lets exchanges proceed."""
    threading.Thread(target=_proceed, daemon=True, name="the simulated device").start()


def _proceed() -> None:
    while True:
        time.sleep(_A_WHILE)
        for known in STREAMS.valuerefs():  # all at once: other threads make streams
            if (stream := known()) is not None:
                stream.reached(stream.added)


def current() -> Stream:
    streams: list[Stream] = _HERE.__dict__.get("streams", [])
    return streams[-1] if streams else NULL


class Event:
    def __init__(self, block: bool = False, disable_timing: bool = False) -> None:
        self.stream, self.number, self.recorded = NULL, 0, 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or current()
        self.number = self.stream.added
        self.recorded = time.perf_counter()

    @property
    def done(self) -> bool:
        return self.stream.reached(self.number)

    def synchronize(self) -> None:
        Counts.waits += 1
        self.stream.run_to(self.number)
