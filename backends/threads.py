"""The ``threads`` backend: one thread a worker, mailboxes in memory.

SPMD programs, notebooks and debuggers without ``mpiexec``. A deadlock is seen at once: it is there
when every worker that still runs waits for a message that nobody has sent.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from linop.backends.base import Backend, Worker
from linop.backends.execute import Execution
from linop.backends.whole import Whole
from linop.errors import BackendError, DeadlockError
from linop.lowering import lower, workers_of
from linop.operator import LinearOperator
from linop.scalars import Array
from linop.space import Vector

_HERE = threading.local()
_AGREE = -1
"""The tag of `gather_all`; plans have tags from 2 on."""


def get(workers: int | None = None) -> Backend:
    """The backend of the worker whose thread this is; outside of `launch`, one that starts the
    threads itself, for vectors that hold all regions.

    Args:
        workers: how many; by default as many as are there, or as an operator needs.

    Raises:
        BackendError: inside `launch`, where there are others than `workers`.
    """
    here: Worker | None = getattr(_HERE, "backend", None)
    if here is None:
        return Threads(workers)
    if workers not in (None, here.workers):
        raise BackendError(f"{workers} workers wanted; this program has {here.workers}")
    return here


def launch(main: Callable[[Backend], Any], workers: int | None = None) -> list[Any]:
    """Run ``main(backend)`` on so many threads; what each returned.

    Raises:
        Whatever `main` raised first, with the worker's number in a note.
    """

    def work(mailbox: Mailbox) -> Any:
        _HERE.backend = Worker("threads", mailbox)
        return main(_HERE.backend)

    return run(workers or 1, work)


def run(workers: int, main: Callable[[Mailbox], Any]) -> list[Any]:
    """Run a function of a mailbox on so many threads."""
    group = Group(workers)
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

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.results: list[Any] = [None] * workers
        self.failure: BaseException | None = None
        self._changed = threading.Condition()
        self._boxes: dict[tuple[int, int, int], deque[Any]] = {}
        self._waiting: dict[int, tuple[int, int]] = {}
        self._ended: set[int] = set()

    def work(self, worker: int, main: Callable[[Mailbox], Any]) -> None:
        """The life of one worker's thread."""
        try:
            mailbox = Mailbox(self, worker)
            self.results[worker] = main(mailbox)
        except BaseException as error:
            if not isinstance(error, _AbortedError):
                error.add_note(f"raised on worker {worker} of {self.workers}")
                self._fail(error)
        finally:
            with self._changed:
                self._ended.add(worker)
                self._detect_deadlock()

    def put(self, sender: int, receiver: int, tag: int, item: Any) -> None:
        """Leave an item in a mailbox."""
        with self._changed:
            self._boxes.setdefault((sender, receiver, tag), deque()).append(item)
            self._changed.notify_all()

    def take(self, sender: int, receiver: int, tag: int) -> Any:
        """The next item of a mailbox; waits for it.

        Raises:
            DeadlockError: nobody is going to send it.
        """
        with self._changed:
            while True:
                box = self._boxes.get((sender, receiver, tag))
                if box:
                    return box.popleft()
                if self.failure is not None:
                    raise _AbortedError
                self._waiting[receiver] = (sender, tag)
                self._detect_deadlock()
                if self.failure is None:
                    self._changed.wait()
                self._waiting.pop(receiver, None)

    def _detect_deadlock(self) -> None:
        stuck = [
            w for w, (peer, tag) in self._waiting.items() if not self._boxes.get((peer, w, tag))
        ]
        if stuck and self.failure is None and len(stuck) + len(self._ended) >= self.workers:
            waits = [self._describe(w) for w in sorted(stuck)]
            self.failure = DeadlockError("deadlock: " + "; ".join(waits))
            self._changed.notify_all()

    def _describe(self, worker: int) -> str:
        peer, tag = self._waiting[worker]
        doing = "its compile" if tag == _AGREE else f"its message of plan {tag // 2}"
        gone = ", which has ended" if peer in self._ended else ""
        return f"worker {worker} waits for worker {peer}{gone}: {doing}"

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if self.failure is None:
                self.failure = error
            self._changed.notify_all()


class _AbortedError(BaseException):
    """Ends a worker whose group has failed; not to be caught by its program."""


class Mailbox:
    """One worker's transport (`linop.backends.base.Transport`)."""

    def __init__(self, group: Group, worker: int) -> None:
        self._group = group
        self.worker = worker
        self.workers = group.workers

    def receive(self, peer: int, tag: int, buffer: Array) -> Any:
        return lambda: self._fill(buffer, self._group.take(peer, self.worker, tag))

    def _fill(self, buffer: Array, message: Array) -> None:
        if message.dtype != buffer.dtype or message.shape != buffer.shape:
            raise BackendError(
                f"worker {self.worker}: a message of {message.size} {message.dtype} came, "
                f"{buffer.size} {buffer.dtype} expected"
            )
        buffer[...] = message

    def send(self, peer: int, tag: int, buffer: Array) -> Any:
        # The buffer was packed for this message, so it can be handed over as it is.
        self._group.put(self.worker, peer, tag, buffer)
        return None

    def wait(self, pending: Sequence[Any]) -> None:
        for receive in pending:
            if receive is not None:
                receive()

    def gather_all(self, data: Any) -> list[Any]:
        everybody = range(self.workers)
        for peer in everybody:
            if peer != self.worker:
                self._group.put(self.worker, peer, _AGREE, data)
        return [
            data if p == self.worker else self._group.take(p, self.worker, _AGREE)
            for p in everybody
        ]


class Threads(Whole):
    """The backend outside of `launch`: all workers in this process, a thread each while it runs."""

    name = "threads"

    def bind(self, op: LinearOperator) -> Callable[[Vector], Vector]:
        needed = workers_of(op.stages)
        plans = [lower(op.stages, worker) for worker in range(max(needed, default=0) + 1)]

        def apply(x: Vector) -> Vector:
            def main(mailbox: Mailbox) -> dict[str, Array]:
                plan = plans[mailbox.worker]
                given = {region.name: x[region.name] for region in plan.inputs}
                return Execution(plan, mailbox, 0, given).to_end()

            results: dict[str, Array] = {}
            for part in run(len(plans), main):
                for name, array in part.items():
                    results.setdefault(name, array)
            return Vector(op.codomain, results)

        return apply
