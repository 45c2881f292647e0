"""All-gathers of several threads of a worker, matched by their labels.

All workers exchange items one all-gather at a time. Where threads come to it in another order than
on other workers, an item waits here for those of the same label. All workers see the same items in
the same order, so each finds the same all-gathers complete, and the same ones impossible.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from linop.backends.together.counted_threads import is_of_python, joins
from linop.backends.together.turns import given_up, has_turns
from linop.errors import LinopError

Label = tuple[str, int]
"""An operation, and a number that tells it from others of its kind; equal on all workers."""
_OWN = "linop-"
"""First letters of the names of linop's own threads."""


class Matching:
    """The all-gathers of one worker that are not complete.

    Args:
        workers: number of workers.

    Attributes:
        is_empty: True if no item waits.
    """

    def __init__(self, workers: int) -> None:
        self._turn = threading.Lock()
        self.is_empty = True
        self._came: list[dict[Label, deque[Any]]] = [{} for _ in range(workers)]
        self._complete: dict[Label, deque[list[Any]]] = {}
        self._waiting: dict[int, Label] = {}
        self._dropped: dict[int, LinopError] = {}
        """Errors that end the waits of threads."""
        self._changed = threading.Condition()
        self._known = {threading.current_thread()}
        self._first = threading.get_ident()
        self._before = {*threading.enumerate()}

    def __enter__(self) -> None:
        """Begin an all-gather: one thread at a time."""
        thread = threading.current_thread()
        if thread not in self._known and is_of_python(thread):
            self._known.add(thread)
        if not self._turn.acquire(False):
            with given_up():
                self._turn.acquire()

    def __exit__(self, *error: object) -> None:
        self._turn.release()

    def add(self, said: Sequence[tuple[Label, Any]]) -> None:
        """Add the items of one all-gather, by worker."""
        for came, (label, item) in zip(self._came, said, strict=True):
            came.setdefault(label, deque()).append(item)
        for label in {label: None for label, _ in said}:
            if all(label in came for came in self._came):
                items = [_popped(came, label) for came in self._came]
                with self._changed:
                    self._complete.setdefault(label, deque()).append(items)
                    self._changed.notify_all()
        self.is_empty = not any(self._came)

    def take(self, label: Label) -> list[Any] | None:
        """The items of a complete all-gather, by worker; None without one."""
        with self._changed:
            return _popped(self._complete, label) if label in self._complete else None

    def begin(self, label: Label) -> None:
        """Record that this thread waits."""
        with self._changed:
            self._waiting[threading.get_ident()] = label

    def wait(self, seconds: float) -> LinopError | None:
        """Wait for a change; returns the error that ends this thread's wait, if there is one."""
        if has_turns():
            with given_up():
                return self.wait(seconds)
        here = threading.get_ident()
        with self._changed:
            if here not in self._dropped and self._waiting[here] not in self._complete:
                self._changed.wait(seconds)
            return self._dropped.get(here)

    def end(self) -> None:
        """Record that this thread waits no more."""
        with self._changed:
            del self._waiting[threading.get_ident()]
            self._dropped.pop(threading.get_ident(), None)

    def drop(self, error: LinopError) -> None:
        """Forget all items, and end the waits for others by an error."""
        for came in self._came:
            came.clear()
        self.is_empty = True
        with self._changed:
            self._dropped = dict.fromkeys(self._waiting, error)
            self._changed.notify_all()

    def others_may_come(self, label: Label) -> bool:
        """True if a thread of this worker may bring what others wait for: one that has taken part,
        or that somebody has started beside such, unless it waits or joins one that does.

        Args:
            label: that of this thread's all-gather.
        """
        if label in self._complete:
            return True  # this thread
        self._known = {thread for thread in self._known if thread.is_alive()}
        here, current = threading.get_ident(), threading.current_thread()
        with self._changed:
            left = [thread for thread, its in self._waiting.items() if its not in self._complete]
        waiting, candidates = [*left, here], [*self._known]
        if len(self._known) > 1 or (here != self._first and is_of_python(current)):
            new = {*threading.enumerate()} - self._before - self._known
            candidates += [thread for thread in new if _is_users(thread)]
        free = sum(
            thread.ident not in waiting and not joins(thread, waiting) for thread in candidates
        )
        # A thread that Python has not started works for another one, which waits for it.
        return free > (not is_of_python(current))


def _is_users(thread: threading.Thread) -> bool:
    return is_of_python(thread) and not thread.name.startswith(_OWN)


def _popped(boxes: dict[Label, deque[Any]], label: Label) -> Any:
    box = boxes[label]
    item = box.popleft()
    if not box:
        del boxes[label]
    return item
