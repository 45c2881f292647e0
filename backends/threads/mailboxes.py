"""Mailboxes: the transport between workers that are threads of a process; it detects deadlocks.

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
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from linop.backends.engine.arrays.interface import NUMPY, Arrays
from linop.backends.engine.roads.call_numbers import PACKED
from linop.backends.together.agreement import Gathering, gathering
from linop.backends.together.counted_threads import is_of_python, joins
from linop.backends.together.deadlock import Key as About
from linop.backends.together.deadlock import Point, who_waits
from linop.backends.together.matching import Matching
from linop.backends.together.messages import decoded, encoded
from linop.backends.together.recorder import Recorder, at_place
from linop.backends.together.transport import ANY, Alone, Item, Plans, Who, awaited, heard
from linop.backends.together.turns import given_up, has_turns
from linop.backends.together.watchdog import stacks
from linop.errors import BackendError, DeadlockError, LinopError
from linop.spaces.scalars import Array

_AGREE, _CALL = -1, -2
"""Tags of `gather_all` and `post`; plans have tags from 2 on."""
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


class Group:
    """The workers of one program: mailboxes, threads, waits, alarms."""

    def __init__(self, workers: int, arrays: Arrays = NUMPY, limit: float = math.inf) -> None:
        self.workers = workers
        self.limit = limit
        """Seconds that a wait may take."""
        self._running: dict[int, tuple[int, Mailbox]] = {}
        self._late: frozenset[int] = frozenset()
        self.surroundings = [arrays.surroundings() for _ in range(workers)]
        self.results: list[Any] = [None] * workers
        self.failure: BaseException | None = None
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

    def work(self, worker: int, main: Callable[[Mailbox], Any]) -> None:
        """Body of a worker's thread: run the program, and record its result or failure."""
        mailbox = Mailbox(self, worker)
        with self._lock:
            self._running[worker] = threading.get_ident(), mailbox
            self._threads[worker].add(threading.current_thread())
        try:
            with self.surroundings[worker]:
                self.results[worker] = main(mailbox)
        except BaseException as error:
            if not isinstance(error, AbortedError):
                error.add_note(f"raised on worker {worker} of {self.workers}")
                self._fail(error)
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

    def _aborted(self, worker: int) -> type[SystemExit]:
        """Exception that ends this thread: in a user's own thread, Python prints no traceback for
        SystemExit only."""
        own = self._running.get(worker, (0,))[0] == threading.get_ident()
        return AbortedError if own or not is_of_python(threading.current_thread()) else SystemExit

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

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if self.failure is None:
                self.failure = error
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


class Mailbox(Gathering):
    """One worker's transport (`linop.backends.together.transport.Transport`).

    Args:
        worker: its number among the members.
        members: workers of the group, by default all.
        part: number of this part of the workers; no other part of a member has it.
    """

    name = "mailboxes in memory"
    spins = 0

    def __init__(
        self,
        group: Group,
        worker: int,
        members: Sequence[int] | None = None,
        part: tuple[int, ...] = (),
    ) -> None:
        self._group = group
        self._members = range(group.workers) if members is None else members
        self._part = part
        self._parts = 0
        self.worker = worker
        self.workers = len(self._members)
        self.limit = group.limit
        self.matching = Matching(self.workers)
        self._address = self._members[worker], *part
        self.busy = ANY
        self.plans: Plans = Alone()
        self.points: dict[About, Point] = {}
        self.recorder = Recorder()
        self.out_of_step = False
        self.eager: dict[int, int] = {}

    def packed(self, peer: int) -> int:
        del peer
        return PACKED

    def part(self, workers: Sequence[int]) -> Mailbox:
        """Transport between some of the workers, numbered in ascending order. All workers call this
        in the same order, each with its own part."""
        self._parts += 1
        members = [self._members[worker] for worker in workers]
        me = workers.index(self.worker)
        return Mailbox(self._group, me, members, (*self._part, self._parts))

    def _to(self, peer: int, tag: int) -> Key:
        return self._members[self.worker], self._members[peer], tag, *self._part

    def _from(self, peer: int, tag: int) -> Key:
        return self._members[peer], self._members[self.worker], tag, *self._part

    def _told(self, who: Who) -> Who:
        """Description of a wait, for a report about all workers of the group."""
        if not self._part:
            return who
        members = ", ".join(map(str, self._members))
        return lambda: f"{awaited(who()).words} (of workers {members}, numbered from 0)"

    def receiver(self, peer: int, tag: int, buffer: Array) -> _Receive:
        return _Receive(self, peer, tag, buffer)

    def sender(self, peer: int, tag: int, buffer: Array) -> _Send:
        return _Send(self._group, self._to(peer, tag), buffer)

    def starter(self, requests: list[_Receive | _Send]) -> Callable[[], object]:
        if len(requests) == 1:
            return requests[0].start

        def start() -> None:
            for request in requests:
                request.start()

        return start

    def receive(self, peer: int, tag: int, buffer: Array) -> _Receive:
        request = self.receiver(peer, tag, buffer)
        request.start()
        return request

    def send(self, peer: int, tag: int, buffer: Array) -> _Send:
        request = self.sender(peer, tag, buffer)
        request.start()
        return request

    def hand(self, peer: int, tag: int, message: Any) -> None:
        """Send an object without a copy."""
        self._group.put(self._to(peer, tag), message)

    def has(self, peer: int, tag: int) -> bool:
        """True if a message has arrived."""
        return self._group.has(self._from(peer, tag))

    def take(self, peer: int, tag: int, size: int, dtype: np.dtype[Any]) -> Any:
        """Next message; wait for it."""
        who = f"a message from worker {peer} of plan {tag // 2}"
        return self.message(peer, tag, size, dtype, lambda: who)

    def message(self, peer: int, tag: int, size: int, dtype: np.dtype[Any], who: Who) -> Any:
        key = self._from(peer, tag)
        return self._group.message(key, self.plans, size, dtype, self._told(who))

    def test(self, pending: Sequence[_Receive | _Send]) -> bool:
        return all(request.ready() for request in pending)

    def tests(self, pending: Sequence[_Receive | _Send | None]) -> Sequence[Callable[[], bool]]:
        del pending
        return ()

    def wait(self, pending: Sequence[_Receive | _Send], who: Who) -> None:
        for request in pending:
            request.wait(who)

    def free(self, requests: Sequence[_Receive | _Send]) -> None:
        """Nothing to release."""

    def abandon(self, receives: Sequence[_Receive | _Send], sends: Sequence[_Send]) -> None:
        """Nothing to do: only `wait` writes to buffers."""

    def _exchanged(self, mine: Item, doing: str, about: object) -> list[Item]:
        everybody, data = range(self.workers), encoded(mine)
        for peer in everybody:
            if peer != self.worker:
                self._group.put(self._to(peer, _AGREE), data)

        def taken(peer: int) -> Item:
            key, who = self._from(peer, _AGREE), self._told(partial(gathering, peer, doing, about))
            said = self._group.take(key, self.plans, ANY, who)
            item: Item = mine if said == data else decoded(said)  # items are immutable
            return item

        return [mine if peer == self.worker else taken(peer) for peer in everybody]

    def post(self, peer: int, item: object) -> None:
        self._group.put(self._to(peer, _CALL), encoded(item))

    def fetch(self, peer: int, who: Who, patience: float | None = None) -> Any:
        key = self._from(peer, _CALL)
        data = self._group.take(key, self.plans, self.busy, self._told(who), patience)
        return None if data is None else decoded(data)

    def alarm(self, error: LinopError, tag: int, call: int) -> None:
        others = [(w, *self._part) for k, w in enumerate(self._members) if k != self.worker]
        self._group.alarm(others, error, tag, call)

    def alarmed(self) -> bool:
        return self._group.alarmed(self._address)

    def check(self, tag: int) -> None:
        self._group.check(self._from(self.worker, tag), self.plans, tag)

    def _end_if_told(self) -> None:
        self._group.look(self._from(self.worker, ANY), self.plans)


class _Send:
    """Send request: `start` puts a copy of the buffer into the receiver's mailbox."""

    def __init__(self, group: Group, key: Key, buffer: Array) -> None:
        self._group, self._key = group, key
        self._copied = buffer.copy

    def start(self) -> None:
        self._group.put(self._key, self._copied())

    def ready(self) -> bool:
        return True

    def wait(self, who: Who) -> None:
        """Nothing to wait for: `start` copied the buffer."""


class _Receive:
    """Receive request: `wait` takes the message from the mailbox and copies it to the buffer."""

    def __init__(self, mailbox: Mailbox, peer: int, tag: int, buffer: Array) -> None:
        self._mailbox, self._key, self._buffer = mailbox, mailbox._from(peer, tag), buffer
        self._group = mailbox._group
        self._due = False

    def start(self) -> None:
        self._due = True

    def ready(self) -> bool:
        return not self._due or self._group.has(self._key)

    def wait(self, who: Who) -> None:
        if not self._due:
            return
        buffer, mailbox = self._buffer, self._mailbox
        told = mailbox._told(who) if mailbox._part else who
        message = self._group.message(self._key, mailbox.plans, buffer.size, buffer.dtype, told)
        buffer[...] = message.reshape(buffer.shape)
        self._due = False
