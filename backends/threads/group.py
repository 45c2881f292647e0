"""The workers of a program that are threads of a process: their mailboxes, waits and alarms. It
detects deadlocks.

There is a deadlock when every running worker waits for a message that no worker has sent. A worker
whose program starts threads waits when its first thread and all others that have called linop wait,
or join a waiting one.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from linop.backends.engine.arrays.interface import NUMPY, Arrays
from linop.backends.together.counted_threads import is_of_python, joins
from linop.backends.together.deadlock import who_waits
from linop.backends.together.recorder import at_place
from linop.backends.together.transport import ANY, Plans, Who, awaited, heard
from linop.backends.together.turns import given_up, has_turns
from linop.backends.together.watchdog import stacks
from linop.errors import BackendError, DeadlockError, LinopError

_AGAIN = 0.25
"""Seconds between checks for a deadlock if a worker has several threads."""
_LIMIT = 600.0
"""Longest wait in seconds if a worker has several threads, which may wait for each other
unobserved."""


_TO_END = 10.0
"""Longest wait in seconds for the end of a thread that has run its program."""

Key = tuple[int, ...]
"""Sender, receiver, tag, and the number of the part of the workers that talk (empty for all)."""
Address = tuple[int, ...]
"""A worker, and the number of the part."""


class HasPlans(Protocol):
    """A worker's transport."""

    plans: Plans


Mine = TypeVar("Mine", bound=HasPlans)


class Group:
    """The workers of one program: mailboxes, threads, waits, alarms."""

    def __init__(self, workers: int, arrays: Arrays = NUMPY, limit: float = math.inf) -> None:
        self.workers = workers
        self.limit = limit
        """Seconds that a wait may take."""
        self._running: dict[int, tuple[int, HasPlans]] = {}
        self._late: frozenset[int] = frozenset()
        self.surroundings = [arrays.surroundings() for _ in range(workers)]
        self.results: list[Any] = [None] * workers
        self.failure: BaseException | None = None
        self._failed: int | None = None
        """The worker that raised it, if one did."""
        self._lock = threading.RLock()
        self._ends = threading.Condition(self._lock)
        """Notified when a worker has ended."""
        self._woken: dict[Key, list[threading.Condition]] = {}
        """By mailbox: a condition for each thread that waits for it. Waking all threads for each
        message would take time in proportion to the cube of the number of workers."""
        self._boxes: dict[Key, deque[Any]] = {}
        self._waiting: dict[tuple[int, int], tuple[Key, Who]] = {}
        """Waits by worker and thread: the mailbox, and a description."""
        self._threads: list[set[threading.Thread]] = [set() for _ in range(workers)]
        """By worker: the threads that have waited in linop, and the one that runs its program."""
        self._has_several = False
        """True if some worker has, or had, several threads: a deadlock may then go undetected."""
        self._ended: set[int] = set()
        self._alarms: dict[Address, list[tuple[int, LinopError, int]]] = {}

    def work(
        self, worker: int, joined: Callable[[Group, int], Mine], main: Callable[[Mine], Any]
    ) -> None:
        """Body of a worker's thread: run the program, and record its result or failure.

        Args:
            joined: ``joined(group, worker)`` makes the worker's transport, in its thread.
            main: the program, of that.
        """
        mailbox = joined(self, worker)
        with self._lock:
            self._running[worker] = threading.get_ident(), mailbox
            self._threads[worker].add(threading.current_thread())
        try:
            with self.surroundings[worker]:
                self.results[worker] = main(mailbox)
        except BaseException as error:
            if not isinstance(error, AbortedError):
                error.add_note(f"raised on worker {worker} of {self.workers}")
                self._fail(error, worker)
        finally:
            with self._lock:
                del self._running[worker]
                self._ended.add(worker)
                self._threads[worker].discard(threading.current_thread())
                self._detect_deadlock()
                self._wake_all()

    def join(self, threads: Sequence[threading.Thread]) -> None:
        """Join the workers' threads, except those that were still busy when a wait reached its
        limit."""
        if self.limit < math.inf:
            with self._lock:
                self._ends.wait_for(lambda: len(self._ended | self._late) == self.workers)
        for worker, thread in enumerate(threads):
            if worker not in self._late:
                thread.join()
                _wait_for_its_end(thread)

    def put(self, key: Key, item: Any) -> None:
        """Append an item to a mailbox."""
        with self._lock:
            self._boxes.setdefault(key, deque()).append(item)
            for woken in self._woken.get(key, ()):
                woken.notify()

    def has(self, key: Key) -> bool:
        """True if a mailbox is not empty."""
        return bool(self._boxes.get(key))

    def take(
        self, key: Key, plans: Plans, busy: int, who: Who, patience: float | None = None
    ) -> Any:
        """Remove and return the next item of a mailbox; wait for it, at most `patience` seconds
        (then None).

        Args:
            plans: the receiver's plans, which take alarms.
            busy: tag of the plan that is being called.
            who: describes the wait.

        Raises:
            DeadlockError: no worker will send it. LinopError: another worker's alarm about the plan
                that is being called.
        """
        if has_turns() and not self.has(key):
            with given_up():
                return self.take(key, plans, busy, who, patience)
        receiver, here = key[1], threading.get_ident()
        with self._lock:
            self._register(receiver)
            begun = 0.0
            while True:
                box = self._boxes.get(key)
                if box:
                    return box.popleft()
                if self.failure is not None:
                    raise self._aborted(receiver)
                self.check(key, plans, busy)
                if patience is not None:
                    if not self._wait(key, patience):
                        return None
                    continue
                self._waiting[receiver, here] = key, who
                self._detect_deadlock()
                if self.failure is None:
                    begun = begun or time.monotonic()
                    self._pause(key, begun)
                del self._waiting[receiver, here]  # its description may refer to a plan

    def message(self, key: Key, plans: Plans, size: int, dtype: np.dtype[Any], who: Who) -> Any:
        """Remove and return the next message of a mailbox; wait for it.

        Raises:
            BackendError: its size or dtype is not the expected one. Others as `take`.
        """
        message = self.take(key, plans, key[2], who)
        if message.dtype != dtype or message.size != size:
            raise BackendError(
                f"worker {key[1]}: a message of {message.size} {message.dtype} came, "
                f"{size} {dtype} expected"
            )
        return message

    def alarm(self, others: Sequence[Address], error: LinopError, tag: int, call: int) -> None:
        """Raise an error on other workers: at once if they wait in this call of the plan, else when
        they make the call."""
        with self._lock:
            for other in others:
                self._alarms.setdefault(other, []).append((tag, error, call))
            self._wake_all()

    def alarmed(self, address: Address) -> bool:
        """True if a worker has a pending alarm."""
        return bool(self._alarms.get(address))

    def check(self, key: Key, plans: Plans, tag: int) -> None:
        """Deliver pending alarms of a mailbox's receiver to the plans, and raise the error of one
        about this plan, if there is one."""
        if self._alarms:
            for plan, error, call in self._alarms.pop((key[1], *key[3:]), ()):
                plans.hear(plan, error, call)
        mine = plans.alarm(tag)
        if mine is not None:
            raise heard(mine, tag)

    def look(self, key: Key, plans: Plans) -> None:
        """End a wait outside of mailboxes if the program has failed; else `check` for alarms."""
        with self._lock:
            if self.failure is not None:
                raise self._aborted(key[1])
            self.check(key, plans, ANY)

    def _aborted(self, worker: int) -> SystemExit:
        """Exception that ends this thread: in a user's own thread, Python prints no traceback for
        SystemExit only."""
        own = self._running.get(worker, (0,))[0] == threading.get_ident()
        kind = AbortedError if own or not is_of_python(threading.current_thread()) else SystemExit
        who = "the workers" if self._failed is None else f"worker {self._failed}"
        error = self.failure
        return kind(f"worker {worker} ends, as {who} failed: {type(error).__name__}: {error}")

    def _register(self, worker: int) -> None:
        """Register this thread with its worker."""
        mine, thread = self._threads[worker], threading.current_thread()
        if thread not in mine and is_of_python(thread):
            mine.add(thread)
            self._has_several = self._has_several or len(mine) > 1
            self._wake_all()

    def _wait(self, key: Key, seconds: float | None) -> bool:
        """Wait until something is put into a mailbox or all threads are woken; False if neither is
        done in time."""
        woken = threading.Condition(self._lock)
        waiting = self._woken.setdefault(key, [])
        waiting.append(woken)
        try:
            return woken.wait(seconds)
        finally:
            waiting.remove(woken)
            if not waiting:
                self._woken.pop(key, None)

    def _wake_all(self) -> None:
        self._ends.notify_all()
        for waiting in self._woken.values():
            for woken in waiting:
                woken.notify()

    def _detect_deadlock(self) -> None:
        """Record a deadlock if all known threads of all workers wait or have ended."""
        if self.failure is not None or not self._waiting:
            return
        if len(self._waiting) < len(self._running) and not self._has_several:
            return
        if any(self._boxes.get(key) for key, _ in self._waiting.values()):
            return
        waiting = Counter(worker for worker, _ in self._waiting)
        for worker, threads in enumerate(self._threads):
            # The program's own thread is alive until it says that it has ended.
            own = self._running[worker][0] if worker in self._running else None
            alive = [thread for thread in threads if thread.ident == own or thread.is_alive()]
            if len(alive) > max(1, waiting[worker]):
                idents = {thread for _, thread in self._waiting}
                alive = [thread for thread in alive if not joins(thread, idents)]
            if len(alive) > waiting[worker] or not (threads or worker in self._ended):
                return
        if any(self._alarms.get((key[1], *key[3:])) for key, _ in self._waiting.values()):
            return  # a waiting worker has an alarm to raise
        self.failure = DeadlockError(f"deadlock: {self._who_waits()}")
        self._wake_all()

    def _who_waits(self) -> str:
        words: dict[int, list[str]] = {}
        for (worker, thread), (_, who) in self._waiting.items():
            words.setdefault(worker, []).append(at_place(awaited(who()).words, thread))
        waits = {worker: " and ".join(said) for worker, said in words.items()}
        running = {worker: thread for worker, (thread, _) in self._running.items()}
        busy = {w: at_place("does not wait in linop", running[w]) for w in self._late}
        return who_waits(waits, self._ended.difference(waits), busy)

    def _pause(self, key: Key, begun: float) -> None:
        """Wait for a change, at most until the limit; at the limit, end all waits with a report."""
        several = self._has_several
        limit = min(self.limit, _LIMIT) if several else self.limit
        left = begun + limit - time.monotonic()
        if left > 0:
            # No notification comes when another thread of a worker ends.
            pause = min(left, _AGAIN) if several else left
            self._wait(key, None if pause == math.inf else pause)
            return
        self._late = frozenset(self._running).difference(worker for worker, _ in self._waiting)
        text = f"a wait took longer than {limit:g} s: {self._who_waits()}"
        said = [f"linop: {text}\n"]
        for worker, (_, mailbox) in sorted(self._running.items()):
            calls = mailbox.plans.last_calls()
            said.append(f"worker {worker}, its last calls, the oldest first:\n{calls}")
        sys.stderr.write("".join(said) + stacks())
        self.failure = DeadlockError(text)
        self._wake_all()

    def _fail(self, error: BaseException, worker: int | None = None) -> None:
        with self._lock:
            if self.failure is None:
                self.failure, self._failed = error, worker
            self._wake_all()


def _wait_for_its_end(thread: threading.Thread) -> None:
    """Wait until the system has ended a thread that has run its Python program.

    Before Python 3.13 `join` returns earlier, and what is local to the thread in C++ is destroyed
    after it: of torch, the part of a graph that a failed backward has left, which takes the GIL.
    Where the interpreter ends meanwhile, that ends the process: "terminate called without an active
    exception".
    """
    task = Path(f"/proc/self/task/{thread.native_id}")
    last = time.monotonic() + _TO_END
    while task.exists() and time.monotonic() < last:
        time.sleep(1e-4)


class AbortedError(SystemExit):
    """Ends a worker whose group has failed; not to be caught by its program."""
