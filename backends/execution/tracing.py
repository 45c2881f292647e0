"""What every worker did when, as one file for a timeline viewer: Perfetto, chrome://tracing or
Speedscope open it (Chrome's trace-event format).
"""

from __future__ import annotations

import json
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from linop.backends.execution.program import Program
from linop.backends.transports.transport import Awaited, Talk, Transport
from linop.errors import ArgumentError, BackendError

Result = TypeVar("Result")

_NAME = 80
"""Characters of an event's name; its arguments have an operator's whole text."""


class Event(NamedTuple):
    """Something that took time; `begun` by the machine's clock."""

    name: str
    category: str
    thread: int
    begun: float
    seconds: float
    about: Mapping[str, Any]


class Recording:
    """The events of one process while it traces: by worker, None for all workers together."""

    def __init__(self) -> None:
        self.begun = time.perf_counter()
        self.rows: dict[int | None, list[Event]] = {}

    def timed(
        self,
        worker: int | None,
        name: str,
        category: str,
        about: Mapping[str, Any],
        work: Callable[[], Result],
    ) -> Result:
        """Do something, and record it, whether it fails or not."""
        events = self.rows.setdefault(worker, [])
        begun = time.perf_counter()
        try:
            return work()
        finally:
            seconds = time.perf_counter() - begun
            events.append(Event(name, category, threading.get_ident(), begun, seconds, about))

    def steps(self, program: Program, operator: str) -> AbstractContextManager[None]:
        """Inside, every step of an operator's program is recorded."""

        def record(label: str, work: Callable[[], Any], about: Mapping[str, Any]) -> Any:
            about = {"operator": operator, **about}
            return self.timed(program.plan.worker, label, "step", about, work)

        return program.watched(record)


class Part(NamedTuple):
    """What one process has to say in the end."""

    machine: str
    begun: float
    rows: dict[int | None, list[Event]]


class Traced(Protocol):
    """What can be traced: every backend."""

    worker: int | None
    tracing: Recording | None


@contextmanager
def traced(backend: Traced, path: Path, transport: Transport | None) -> Iterator[None]:
    """Record what happens inside; then one process writes what all have recorded.

    Raises:
        BackendError: a trace is being recorded already. ArgumentError: the file cannot be written.
            Both on every worker.
    """
    if backend.tracing is not None:
        raise BackendError(f"trace {path}: another trace is being recorded; end it first")
    writes = backend.worker in (None, 0)
    # Also where all begin together.
    _first_does(transport, path, (lambda: path.open("a").close()) if writes else None)
    recording = backend.tracing = Recording()
    try:
        yield
    finally:
        backend.tracing = None
    part = Part(_machine(), recording.begun, recording.rows)
    parts = [part] if transport is None else _gathered(transport, part)
    _first_does(transport, path, partial(_write, path, parts) if writes else None)


def _gathered(transport: Transport, mine: Part) -> list[Part]:
    """All parts, on worker 0; elsewhere none."""

    def waits(peer: int) -> Awaited:
        return talk.awaited(f"worker {peer} to end its trace", peer, 1, 1)

    with Talk(transport, ("trace",)) as talk:
        if transport.worker:
            talk.say(0, mine)
            return []
        others = range(1, transport.workers)
        return [mine, *(talk.hear(peer, partial(waits, peer)) for peer in others)]


def _first_does(transport: Transport | None, path: Path, work: Callable[[], Any] | None) -> None:
    """Worker 0 works with a file, while the others wait; all hear if it fails."""
    problem = ""
    if work is not None:
        try:
            work()
        except OSError as error:
            problem = error.strerror or str(error)
    if transport is not None:
        problem = transport.gather_all(problem.encode())[0].decode()
    if problem:
        raise ArgumentError(f"trace {path}: cannot be written: {problem}")


def _write(path: Path, parts: Sequence[Part]) -> None:
    path.write_text(json.dumps({"traceEvents": events(parts), "displayTimeUnit": "ns"}))


def events(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """The events of all processes in Chrome's format: times in microseconds since the trace began.

    One clock is right for all processes of a machine; the machines are shifted to begin together.
    """
    start: dict[str, float] = {}
    for part in parts:
        start[part.machine] = min(part.begun, start.get(part.machine, part.begun))
    every = [(row, part.machine) for part in parts for row in part.rows.items()]
    last = max((worker for (worker, _), _ in every if worker is not None), default=-1)
    found: list[dict[str, Any]] = []
    for (worker, row), machine in every:
        process = last + 1 if worker is None else worker
        name = "all workers" if worker is None else f"worker {worker}"
        order = -1 if worker is None else worker
        found.append(_about(process, "process_name", name=name))
        found.append(_about(process, "process_sort_index", sort_index=order))
        threads: dict[int, int] = {}
        for event in sorted(row, key=lambda event: (event.begun, -event.seconds)):
            found.append(
                {
                    "ph": "X",
                    "pid": process,
                    "tid": threads.setdefault(event.thread, len(threads)),
                    "name": event.name[:_NAME],
                    "cat": event.category,
                    "ts": (event.begun - start[machine]) * 1e6,
                    "dur": event.seconds * 1e6,
                    "args": event.about,
                }
            )
    return found


def _about(process: int, what: str, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": 0, "name": what, "args": arguments}


def _machine() -> str:
    """What tells machines, and thus clocks, apart."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return platform.node()
