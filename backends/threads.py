"""The ``threads`` backend: one thread a worker, mailboxes in memory.

SPMD programs, notebooks and debuggers without ``mpiexec``. A deadlock is seen at once: it is there
when every worker that still runs waits for a message that nobody has sent.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from linop.backends.arrays import NUMPY, Arrays, arrays_named
from linop.backends.base import Backend
from linop.backends.deadlock import Key as About
from linop.backends.deadlock import Point, who_waits
from linop.backends.device import DeviceArrays
from linop.backends.execute import Program
from linop.backends.handing import Handing
from linop.backends.messages import Messages
from linop.backends.proving import debugging, prove
from linop.backends.recorder import Recorder, at_place
from linop.backends.transport import (
    ANY,
    MEET,
    Alone,
    Plans,
    Who,
    awaited,
    check_doing,
    gathering,
    heard,
    limit_of,
)
from linop.backends.watchdog import stacks
from linop.backends.whole import Whole
from linop.backends.worker import Worker
from linop.errors import BackendError, DeadlockError, LinopError
from linop.lowering import lower, workers_of
from linop.operator import LinearOperator
from linop.plan import Plan
from linop.scalars import Array
from linop.space import Vector

_HERE = threading.local()
_AGREE, _CALL = -1, -2
"""The tags of `gather_all` and `post`; plans have tags from 2 on."""

Key = tuple[int, int, int]
"""Sender, receiver, tag."""


def get(workers: int | None = None, arrays: str | Arrays | None = None) -> Backend:
    """The backend of the worker whose thread this is; outside of `launch`, one that starts the
    threads itself, for vectors that hold all regions.

    Args:
        workers: how many; by default as many as are there, or as an operator needs.
        arrays: "numpy", or "cupy" for workers that share a GPU; inside `launch` those of the
            program.

    Raises:
        BackendError: inside `launch`, where there are others than `workers` or `arrays`; or there
            is no GPU. MissingExtraError: CuPy is not installed.
    """
    here: Worker | None = getattr(_HERE, "backend", None)
    if here is None:
        return Threads(workers, arrays_named(arrays or NUMPY))
    if arrays is not None and arrays_named(arrays).ndarray is not here.arrays.ndarray:
        wanted = arrays_named(arrays).name
        raise BackendError(f"arrays of {wanted} wanted; this program has {here.arrays.name}'s")
    if workers not in (None, here.workers):
        raise BackendError(f"{workers} workers wanted; this program has {here.workers}")
    return here


def launch(
    main: Callable[[Backend], Any],
    workers: int | None = None,
    arrays: str | Arrays = NUMPY,
    wait_limit: float | None = None,
) -> list[Any]:
    """Run ``main(backend)`` on so many threads; what each returned.

    Args:
        arrays: "numpy", or "cupy": then all begin on the GPU and the stream of this thread.
        wait_limit: seconds after which a wait becomes a `DeadlockError`, though some worker does
            not wait; by default LINOP_WAIT_LIMIT, else there is no limit, for a worker may be in a
            debugger.

    Raises:
        Whatever `main` raised first, with the worker's number in a note.
    """

    kind = arrays_named(arrays)

    def work(mailbox: Mailbox) -> Any:
        _HERE.backend = Thread("threads", mailbox, arrays=kind)
        return main(_HERE.backend)

    return run(workers or 1, work, kind, wait_limit)


def alone() -> Backend:
    """A program of one worker, which this thread is."""
    return Worker("threads", Mailbox(Group(1), 0))


def run(
    workers: int,
    main: Callable[[Mailbox], Any],
    arrays: Arrays = NUMPY,
    wait_limit: float | None = None,
) -> list[Any]:
    """Run a function of a mailbox on so many threads."""
    group = Group(workers, arrays, limit_of(wait_limit, math.inf))
    threads = [
        threading.Thread(target=group.work, args=(w, main), name=f"linop-{w}", daemon=True)
        for w in range(workers)
    ]
    for thread in threads:
        thread.start()
    group.join(threads)
    if group.failure is not None:
        raise group.failure
    return group.results


class Group:
    """The workers of one program: their mailboxes, and who waits for whom."""

    def __init__(self, workers: int, arrays: Arrays = NUMPY, limit: float = math.inf) -> None:
        self.workers = workers
        self._limit = limit
        self._running: dict[int, tuple[int, Mailbox]] = {}
        self._late: frozenset[int] = frozenset()
        self.surroundings = [arrays.surroundings() for _ in range(workers)]
        self.results: list[Any] = [None] * workers
        self.failure: BaseException | None = None
        self._changed = threading.Condition()
        self._boxes: dict[Key, deque[Any]] = {}
        self._waiting: dict[int, tuple[int, int]] = {}
        self._ended: set[int] = set()
        self._alarms: dict[int, list[tuple[int, LinopError]]] = {}
        self._doing: dict[int, Who] = {}

    def work(self, worker: int, main: Callable[[Mailbox], Any]) -> None:
        """The life of one worker's thread."""
        mailbox = Mailbox(self, worker)
        self._running[worker] = threading.get_ident(), mailbox
        try:
            with self.surroundings[worker]:
                self.results[worker] = main(mailbox)
        except BaseException as error:
            if not isinstance(error, AbortedError):
                error.add_note(f"raised on worker {worker} of {self.workers}")
                self._fail(error)
        finally:
            with self._changed:
                del self._running[worker]
                self._ended.add(worker)
                self._detect_deadlock()
                self._changed.notify_all()

    def join(self, threads: Sequence[threading.Thread]) -> None:
        """Wait for the workers' threads, but not for those that made others reach the limit."""
        if self._limit < math.inf:
            with self._changed:
                self._changed.wait_for(lambda: len(self._ended | self._late) == self.workers)
        for worker, thread in enumerate(threads):
            if worker not in self._late:
                thread.join()

    def put(self, key: Key, item: Any) -> None:
        """Leave an item in a mailbox."""
        with self._changed:
            self._boxes.setdefault(key, deque()).append(item)
            self._changed.notify_all()

    def has(self, key: Key) -> bool:
        """Whether there is an item in a mailbox."""
        return bool(self._boxes.get(key))

    def take(
        self, key: Key, plans: Plans, busy: int, who: Who, patience: float | None = None
    ) -> Any:
        """The next item of a mailbox; waits for it, or for so many seconds: then None.

        Args:
            plans: the receiver's, which hear alarms.
            busy: the tag of the plan that is being called.
            who: what it waits for.

        Raises:
            DeadlockError: nobody is going to send it. LinopError: another worker raised an alarm
                about the plan that is being called.
        """
        sender, receiver, tag = key
        until = 0.0
        with self._changed:
            while True:
                box = self._boxes.get(key)
                if box:
                    return box.popleft()
                if self.failure is not None:
                    raise AbortedError
                self.check(receiver, plans, busy)
                if patience is not None:
                    if not self._changed.wait(patience):
                        return None
                    continue
                self._waiting[receiver] = (sender, tag)
                self._doing[receiver] = who
                self._detect_deadlock()
                if self.failure is None:
                    until = until or time.monotonic() + self._limit
                    self._pause(until)
                self._waiting.pop(receiver, None)
                self._doing.pop(receiver, None)  # it may refer to a plan

    def message(self, key: Key, plans: Plans, size: int, dtype: np.dtype[Any], who: Who) -> Any:
        """The next message of a mailbox; waits for it.

        Raises:
            BackendError: it is another than was expected. And as `take`.
        """
        message = self.take(key, plans, key[2], who)
        if message.dtype != dtype or message.size != size:
            raise BackendError(
                f"worker {key[1]}: a message of {message.size} {message.dtype} came, "
                f"{size} {dtype} expected"
            )
        return message

    def alarm(self, worker: int, error: LinopError, tag: int) -> None:
        """Make every other worker raise an error: one that waits in this plan, at once; others when
        they call it next."""
        with self._changed:
            for other in range(self.workers):
                if other != worker:
                    self._alarms.setdefault(other, []).append((tag, error))
            self._changed.notify_all()

    def alarmed(self, worker: int) -> bool:
        """Whether there is an alarm for a worker."""
        return bool(self._alarms.get(worker))

    def check(self, worker: int, plans: Plans, tag: int) -> None:
        """Raise what another worker's alarm said of this plan, if there was one."""
        for plan, error in self._alarms.pop(worker, ()):
            plans.hear(plan, error)
        mine = plans.alarm(tag)
        if mine is not None:
            raise heard(mine, tag)

    def _detect_deadlock(self) -> None:
        stuck = [
            w for w, (peer, tag) in self._waiting.items() if not self._boxes.get((peer, w, tag))
        ]
        if not stuck or self.failure is not None:
            return
        if len(stuck) + len(self._ended) < self.workers:
            return
        if any(self._alarms.get(worker) for worker in stuck):
            return  # they are about to hear of it
        self.failure = DeadlockError(f"deadlock: {self._who_waits()}")
        self._changed.notify_all()

    def _who_waits(self) -> str:
        threads = {worker: thread for worker, (thread, _) in self._running.items()}
        waits = {
            worker: at_place(awaited(doing()).words, threads[worker])
            for worker, doing in self._doing.items()
        }
        busy = {w: at_place("does not wait in linop", threads[w]) for w in self._late}
        return who_waits(waits, self._ended, busy)

    def _pause(self, until: float) -> None:
        """Wait for something to change; no longer than to the limit, where all stop waiting."""
        if until == math.inf:
            self._changed.wait()
        elif not self._changed.wait(max(until - time.monotonic(), 0)):
            self._late = frozenset(self._running) - frozenset(self._waiting)
            text = f"a wait took longer than {self._limit:g} s: {self._who_waits()}"
            said = [f"linop: {text}\n"]
            for worker, (_, mailbox) in sorted(self._running.items()):
                calls = mailbox.plans.last_calls()
                said.append(f"worker {worker}, its last calls, the oldest first:\n{calls}")
            sys.stderr.write("".join(said) + stacks())
            self.failure = DeadlockError(text)
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if self.failure is None:
                self.failure = error
            self._changed.notify_all()


class AbortedError(BaseException):
    """Ends a worker whose group has failed; not to be caught by its program."""


class Mailbox:
    """One worker's transport (`linop.backends.transport.Transport`)."""

    name = "mailboxes in memory"

    def __init__(self, group: Group, worker: int) -> None:
        self._group = group
        self.worker = worker
        self.workers = group.workers
        self.busy = ANY
        self.plans: Plans = Alone()
        self.points: dict[About, Point] = {}
        self.recorder = Recorder()

    def receiver(self, peer: int, tag: int, buffer: Array) -> _Receive:
        return _Receive(self, peer, tag, buffer)

    def sender(self, peer: int, tag: int, buffer: Array) -> _Send:
        return _Send(self._group, (self.worker, peer, tag), buffer)

    def start(self, requests: list[_Receive | _Send]) -> None:
        for request in requests:
            request.start()

    def receive(self, peer: int, tag: int, buffer: Array) -> _Receive:
        request = self.receiver(peer, tag, buffer)
        request.start()
        return request

    def send(self, peer: int, tag: int, buffer: Array) -> _Send:
        request = self.sender(peer, tag, buffer)
        request.start()
        return request

    def hand(self, peer: int, tag: int, message: Any) -> None:
        """Give a message away."""
        self._group.put((self.worker, peer, tag), message)

    def has(self, peer: int, tag: int) -> bool:
        """Whether one has come."""
        return self._group.has((peer, self.worker, tag))

    def take(self, peer: int, tag: int, size: int, dtype: np.dtype[Any]) -> Any:
        """The next one; waits for it."""
        who = f"a message from worker {peer} of plan {tag // 2}"
        return self.message(peer, tag, size, dtype, lambda: who)

    def message(self, peer: int, tag: int, size: int, dtype: np.dtype[Any], who: Who) -> Any:
        return self._group.message((peer, self.worker, tag), self.plans, size, dtype, who)

    def test(self, pending: Sequence[_Receive | _Send]) -> bool:
        return all(request.ready() for request in pending)

    def wait(self, pending: Sequence[_Receive | _Send], who: Who) -> None:
        for request in pending:
            request.wait(who)

    def free(self, requests: Sequence[_Receive | _Send]) -> None:
        """Nothing is held."""

    def abandon(self, receives: Sequence[_Receive | _Send], sends: Sequence[_Send]) -> None:
        """Nothing is written to a buffer but by `wait`."""

    def gather_all(self, data: Any, doing: str = MEET, about: object = "") -> list[Any]:
        if doing != MEET:
            self.recorder.meets(doing, about)
        said = self._gathered((doing, data), doing, about)
        if len({one for one, _ in said}) > 1:
            check_doing(self._gathered((doing, about), doing, about))
        return [one for _, one in said]

    def _gathered(self, mine: Any, doing: str, about: object) -> list[Any]:
        everybody = range(self.workers)
        for peer in everybody:
            if peer != self.worker:
                self._group.put((self.worker, peer, _AGREE), mine)

        def taken(peer: int) -> Any:
            key = peer, self.worker, _AGREE
            who = partial(gathering, peer, doing, about)
            return self._group.take(key, self.plans, ANY, who)

        return [mine if peer == self.worker else taken(peer) for peer in everybody]

    def post(self, peer: int, data: bytes) -> None:
        self._group.put((self.worker, peer, _CALL), data)

    def fetch(self, peer: int, who: Who, patience: float | None = None) -> bytes | None:
        key = peer, self.worker, _CALL
        data: bytes | None = self._group.take(key, self.plans, self.busy, who, patience)
        return data

    def alarm(self, error: LinopError, tag: int) -> None:
        self._group.alarm(self.worker, error, tag)

    def alarmed(self) -> bool:
        return self._group.alarmed(self.worker)

    def check(self, tag: int) -> None:
        self._group.check(self.worker, self.plans, tag)


class Thread(Worker):
    """One worker of a program, in a thread."""

    transport: Mailbox

    def program(
        self, plan: Plan, group: Sequence[int], tag: int, about: Callable[[], str]
    ) -> Program:
        del group
        return bound(plan, self.transport, tag, about, self.arrays)


def bound(
    plan: Plan, mailbox: Mailbox, tag: int, about: Callable[[], str], arrays: Arrays
) -> Program:
    """A plan whose messages go through mailboxes."""
    if isinstance(arrays, DeviceArrays):
        return Handing(plan, mailbox, tag, about, arrays)
    return Messages(plan, mailbox, tag, about, arrays)


class _Send:
    """A message that is handed over when it is started."""

    def __init__(self, group: Group, key: Key, buffer: Array) -> None:
        self._group, self._key = group, key
        self._copied = buffer.copy

    def start(self) -> None:
        self._group.put(self._key, self._copied())

    def ready(self) -> bool:
        return True

    def wait(self, who: Who) -> None:
        """Nothing: it is gone."""


class _Receive:
    """A message that is awaited once it is started."""

    def __init__(self, mailbox: Mailbox, peer: int, tag: int, buffer: Array) -> None:
        self._mailbox, self._peer, self._tag, self._buffer = mailbox, peer, tag, buffer
        self._due = False

    def start(self) -> None:
        self._due = True

    def ready(self) -> bool:
        return not self._due or self._mailbox.has(self._peer, self._tag)

    def wait(self, who: Who) -> None:
        if not self._due:
            return
        buffer = self._buffer
        message = self._mailbox.message(self._peer, self._tag, buffer.size, buffer.dtype, who)
        buffer[...] = message.reshape(buffer.shape)
        self._due = False


class Threads(Whole):
    """The backend outside of `launch`: all workers in this process, a thread each while it runs."""

    name = "threads"

    def way(self, program: Program | None = None) -> str:
        del program
        return f"messages over {Mailbox.name}"

    def bind(self, op: LinearOperator) -> tuple[Callable[[Vector], Vector], Sequence[Plan]]:
        if debugging():
            prove(op, lambda plan: plan)
        needed = workers_of(op.stages)
        plans = [lower(op.stages, worker) for worker in range(max(needed, default=0) + 1)]

        def apply(x: Vector) -> Vector:
            tracing, name = self.tracing, str(op) if self.tracing else ""

            def main(mailbox: Mailbox) -> Sequence[Array]:
                plan = plans[mailbox.worker]
                program = bound(plan, mailbox, 0, op.__repr__, self.arrays)
                arrays = [x[r.name] for r in plan.inputs]
                if tracing is None:
                    return program.run(arrays)
                about = {"operator": name, "messages": len(plan.sends), "bytes": plan.bytes_sent}
                with tracing.steps(program, name):
                    work = partial(program.run, arrays)
                    return tracing.timed(mailbox.worker, name, "plan", about, work)

            results: dict[str, Array] = {}
            for plan, part in zip(plans, run(len(plans), main, self.arrays), strict=True):
                for region, array in zip(plan.outputs, part, strict=True):
                    results.setdefault(region.name, array)
            return Vector(op.codomain, results)

        return apply, plans
