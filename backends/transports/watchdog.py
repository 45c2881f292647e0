"""The watchdog of a process: a thread that speaks for a worker that others wait for in vain, while
the worker is in its own code, or stuck.

It looks a few times a second whether another worker has reached its limit, and then writes to
stderr where all threads of this process are, and what the worker called last. C code that never
gives back Python's lock keeps it from that, as it keeps every thread.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
import weakref
from textwrap import indent
from typing import Protocol

_EVERY = 0.25
"""Seconds between looks; who has reached the limit waits longer than that for others' words."""
_STOPS = 1.0
"""Seconds to wait for the thread to stop."""


class Watched(Protocol):
    """One worker."""

    def stuck(self) -> str | None:
        """Words about it, if it was asked for, and does not say so itself."""


class Watchdog:
    """The thread of this process. It holds a lock while it looks, in which it never waits.

    Attributes:
        looked: when a wait in linop last looked for alarms (`time.monotonic`).
    """

    def __init__(self) -> None:
        self.looked = 0.0
        self._watched: list[weakref.ref[Watched]] = []
        self._looking = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, one: Watched) -> None:
        """Speak for a worker from here on, until it is forgotten, or gone."""
        with self._looking:
            alive = [ref for ref in self._watched if ref() is not None]
            self._watched = [*alive, weakref.ref(one)]
        self.start()

    def forget(self, one: Watched) -> None:
        """Look no more after a worker, whose communicator is about to end."""
        with self._looking:
            self._watched = [ref for ref in self._watched if ref() not in (one, None)]

    def start(self) -> None:
        """Start the thread, where there is somebody to watch."""
        if self._watched and self._thread is None:
            self._over.clear()
            self._thread = threading.Thread(target=self._work, name="linop-watchdog", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop it: MPI ends, or the process is about to fork, which only one thread survives."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._over.set()
            thread.join(_STOPS)

    def forked(self) -> None:
        """This is the child, whose workers are its parent's."""
        self.__init__()  # type: ignore[misc]

    def _work(self) -> None:
        while not self._over.wait(_EVERY):
            with self._looking:
                found = [one.stuck() for ref in self._watched if (one := ref()) is not None]
            for words in filter(None, found):
                sys.stderr.write(f"{words}{stacks()}")
                sys.stderr.flush()


def stacks() -> str:
    """The stacks of all threads of this process but this one."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            lines.append(f"thread {names.get(ident, ident)}:\n")
            lines += traceback.format_stack(frame)
    return indent("".join(lines), "  ")


WATCHDOG = Watchdog()
os.register_at_fork(
    before=WATCHDOG.stop, after_in_parent=WATCHDOG.start, after_in_child=WATCHDOG.forked
)
