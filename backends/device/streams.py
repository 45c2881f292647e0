"""Streams and events of a device, and objects that outlive the work queued on them.

Operations are queued on the stream that is current in the calling thread (`cupy.cuda.Stream`), and
run in its order; exceptions are documented here. The host waits in these cases only: for an event
before MPI reads a packed message (`linop.backends.mpi.device.staging`), for copies from and to
regions in host memory (`linop.backends.device.host_transfer`), and for messages of other threads to
such regions (`linop.backends.threads.device_messages`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any


class Streams:
    """Streams of the device that is current in each thread.

    Args:
        cuda: CuPy's submodule of that name.
    """

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self._kept: deque[tuple[Any, Any]] = deque()
        self._lock = threading.Lock()

    @property
    def current(self) -> Any:
        """Current stream of this thread."""
        return self._cuda.get_current_stream()

    def mark(self, stream: Any = None) -> Any:
        """Event after all operations queued so far on a stream, by default the current one:
        ``.done``, ``.synchronize()``."""
        event = self._cuda.Event(disable_timing=True)
        event.record(self.current if stream is None else stream)
        return event

    def following(self) -> Callable[[], None]:
        """As `linop.backends.engine.arrays.interface.Arrays.following`."""
        last: list[Any] = [self.current]

        def follow() -> None:
            stream = self.current
            if stream != last[0]:
                stream.wait_event(self.mark(last[0]))
                last[0] = stream

        return follow

    @contextmanager
    def entered(self, device: Any, stream: Any) -> Iterator[None]:
        """Context in which a device and one of its streams are current."""
        with device, stream:
            yield

    def hold(self, read: Iterable[tuple[Any, Any]]) -> None:
        """Keep objects alive until an event is done; takes pairs of event and object. Safe in
        finalizers: it neither waits nor takes a lock."""
        self._kept.extend(read)

    def let_go(self) -> None:
        """Release the objects whose events are done."""
        with self._lock:
            while self._kept and self._kept[0][0].done:
                self._kept.popleft()
