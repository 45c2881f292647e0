"""The ``threads`` backend: one thread a worker, mailboxes in memory.

SPMD programs, notebooks and debuggers without ``mpiexec``. A deadlock is seen at once: it is there
when every worker that still runs waits for a message that nobody has sent. A worker whose program
has started threads waits when all of those wait that have called linop, and the first.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from linop.backends.arrays import NUMPY, Arrays, arrays_named
from linop.backends.base import Backend
from linop.backends.deadlock import Key as About
from linop.backends.deadlock import Point, is_of_python, who_waits
from linop.backends.device import DeviceArrays
from linop.backends.execute import Program
from linop.backends.handing import Handing
from linop.backends.messages import Messages
from linop.backends.proving import debugging, prove
from linop.backends.transport import (
    ANY,
    Alone,
    Plans,
    Who,
    awaited,
    check_doing,
    gathering,
    heard,
)
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
_AGAIN = 0.25
"""Seconds after which a thread looks again for a deadlock, where a worker has several."""
_LIMIT = 600.0
"""Seconds that a wait may take there: a thread may wait for another in ways that nobody sees."""

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
    main: Callable[[Backend], Any], workers: int | None = None, arrays: str | Arrays = NUMPY
) -> list[Any]:
    """Run ``main(backend)`` on so many threads; what each returned.

    Args:
        arrays: "numpy", or "cupy": then all begin on the GPU and the stream of this thread.

    Raises:
        Whatever `main` raised first, with the worker's number in a note.
    """

    kind = arrays_named(arrays)

    def work(mailbox: Mailbox) -> Any:
        _HERE.backend = Thread("threads", mailbox, arrays=kind)
        return main(_HERE.backend)

    return run(workers or 1, work, kind)


def alone() -> Backend:
    """A program of one worker, which this thread is."""
    return Worker("threads", Mailbox(Group(1), 0))


def run(workers: int, main: Callable[[Mailbox], Any], arrays: Arrays = NUMPY) -> list[Any]:
    """Run a function of a mailbox on so many threads."""
    group = Group(workers, arrays)
    threads = [
        threading.Thread(target=group.work, args=(w, main), name=f"linop-{w}", daemon=True)
        for w in range(workers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if group.failure is not None:
        raise group.failure
    return group.results


class Group:
    """The workers of one program: their mailboxes, and who waits for whom."""

    def __init__(self, workers: int, arrays: Arrays = NUMPY) -> None:
        self.workers = workers
        self.surroundings = [arrays.surroundings() for _ in range(workers)]
        self.results: list[Any] = [None] * workers
        self.failure: BaseException | None = None
        self._changed = threading.Condition()
        self._boxes: dict[Key, deque[Any]] = {}
        self._waiting: dict[tuple[int, int], tuple[Key, Who]] = {}
        """By worker and thread: the mailbox, and what it waits for."""
        self._threads: list[set[threading.Thread]] = [set() for _ in range(workers)]
        """The threads that have waited for a worker, and the one that runs its program."""
        self._ended: set[int] = set()
        self._alarms: dict[int, list[tuple[int, LinopError]]] = {}

    def work(self, worker: int, main: Callable[[Mailbox], Any]) -> None:
        """The life of one worker's thread."""
        self._threads[worker].add(threading.current_thread())
        try:
            with self.surroundings[worker]:
                self.results[worker] = main(Mailbox(self, worker))
        except BaseException as error:
            if not isinstance(error, AbortedError):
                error.add_note(f"raised on worker {worker} of {self.workers}")
                self._fail(error)
        finally:
            with self._changed:
                self._ended.add(worker)
                self._threads[worker].discard(threading.current_thread())
                self._detect_deadlock()

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
        receiver, here = key[1], threading.get_ident()
        with self._changed:
            self._register(receiver)
            late = time.monotonic() + _LIMIT
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
                self._waiting[receiver, here] = key, who
                self._detect_deadlock()
                if self.failure is None:
                    # Nobody says that another thread of a worker has ended.
                    self._changed.wait(_AGAIN if self._has_several() else None)
                    if time.monotonic() > late and self._has_several():
                        text = f"a wait took longer than {_LIMIT:g} s: {self._who_waits()}"
                        self.failure = DeadlockError(text)
                        self._changed.notify_all()
                del self._waiting[receiver, here]  # it may refer to a plan

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

    def _register(self, worker: int) -> None:
        """Take note of the thread that this is."""
        mine, thread = self._threads[worker], threading.current_thread()
        if thread not in mine and is_of_python(thread):
            mine.add(thread)
            self._changed.notify_all()

    def _has_several(self) -> bool:
        """True if some worker has several threads, or had: then a deadlock may not be known."""
        return any(len(threads) > 1 for threads in self._threads)

    def _detect_deadlock(self) -> None:
        """All threads of all workers wait that are known, or have ended: it is a deadlock."""
        if self.failure is not None or not self._waiting:
            return
        if any(self._boxes.get(key) for key, _ in self._waiting.values()):
            return
        waiting = Counter(worker for worker, _ in self._waiting)
        for worker, threads in enumerate(self._threads):
            alive = sum(thread.is_alive() for thread in threads)
            if alive > waiting[worker] or not (threads or worker in self._ended):
                return
        if any(self._alarms.get(worker) for worker in waiting):
            return  # they are about to hear of it
        self.failure = DeadlockError(f"deadlock: {self._who_waits()}")
        self._changed.notify_all()

    def _who_waits(self) -> str:
        words: dict[int, list[str]] = {}
        for (worker, _), (_, who) in self._waiting.items():
            words.setdefault(worker, []).append(awaited(who()).words)
        waits = {worker: " and ".join(said) for worker, said in words.items()}
        return who_waits(waits, self._ended.difference(waits))

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if self.failure is None:
                self.failure = error
            self._changed.notify_all()


class AbortedError(SystemExit):
    """Ends a worker whose group has failed, and the threads that it started, without a word; not to
    be caught by its program."""


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

    def gather_all(self, data: Any, doing: str = "meet", about: object = "") -> list[Any]:
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
