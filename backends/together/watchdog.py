"""Watchdog thread of a process: it reports for a worker that others wait for in vain, while the
worker is in user code, or stuck.

Several times a second it checks for workers that others have reached their limit for, and then
writes the stacks of all threads of this process and the worker's last calls to stderr. C code that
never releases the interpreter lock blocks it, like every thread.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
import weakref
from textwrap import indent
from typing import Protocol

from linop.backends.together.counted_threads import frames

_EVERY = 0.25
"""Seconds between checks; a rank at its limit waits longer than that for others' reports."""
_STOPS = 1.0
"""Longest wait for the thread to stop, in seconds."""


class Watched(Protocol):
    """Interface of workers that the watchdog uses."""

    def stuck(self) -> str | None:
        """Report about the worker, if others asked for one and it does not answer itself; else
        None."""


class Watchdog:
    """The watchdog of this process. It holds a lock during a check, which never waits.

    Attributes:
        looked: last check for alarms by a wait in linop (`time.monotonic`).
    """

    def __init__(self) -> None:
        self.looked = 0.0
        self._watched: list[weakref.ref[Watched]] = []
        self._looking = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, one: Watched) -> None:
        """Watch a worker until it is forgotten or garbage-collected."""
        with self._looking:
            alive = [ref for ref in self._watched if ref() is not None]
            self._watched = [*alive, weakref.ref(one)]
        self.start()

    def forget(self, one: Watched) -> None:
        """Stop watching a worker, whose communicator is about to end."""
        with self._looking:
            self._watched = [ref for ref in self._watched if ref() not in (one, None)]

    def start(self) -> None:
        """Start the thread, if there are workers to watch."""
        if self._watched and self._thread is None:
            self._over.clear()
            self._thread = threading.Thread(target=self._work, name="linop-watchdog", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop the thread, before MPI ends or the process forks."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._over.set()
            thread.join(_STOPS)

    def forked(self) -> None:
        """Reset in a forked child, which has none of its parent's workers."""
        self.__init__()  # type: ignore[misc]

    def _work(self) -> None:
        while not self._over.wait(_EVERY):
            with self._looking:
                found = [one.stuck() for ref in self._watched if (one := ref()) is not None]
            for words in filter(None, found):
                sys.stderr.write(f"{words}{stacks()}")
                sys.stderr.flush()


def stacks() -> str:
    """Stacks of all threads of this process except the current one."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for ident, frame in frames().items():
        if ident != threading.get_ident():
            lines.append(f"thread {names.get(ident, ident)}:\n")
            lines += traceback.format_stack(frame)
    return indent("".join(lines), "  ")


WATCHDOG = Watchdog()
os.register_at_fork(
    before=WATCHDOG.stop, after_in_parent=WATCHDOG.start, after_in_child=WATCHDOG.forked
)
