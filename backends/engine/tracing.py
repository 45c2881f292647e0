"""Traces of all workers, as one file in Chrome's trace-event format, for Perfetto, chrome://tracing
or Speedscope."""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from linop import trace_events
from linop.backends.engine.execution.program import Program
from linop.backends.together.agreement import Talk
from linop.backends.together.transport import Awaited, Transport
from linop.errors import ArgumentError, BackendError
from linop.writing import target, write_text

Result = TypeVar("Result")


class Event(NamedTuple):
    """A timed event; `begun` is the machine's ``time.perf_counter``, in seconds."""

    name: str
    category: str
    thread: int
    begun: float
    seconds: float
    about: Mapping[str, Any]


class Recording:
    """Events of one process during a trace, by worker; None for events of all workers together."""

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
        """Run a function and record an event, even if it raises."""
        events = self.rows.setdefault(worker, [])
        begun = time.perf_counter()
        try:
            return work()
        finally:
            seconds = time.perf_counter() - begun
            events.append(Event(name, category, threading.get_ident(), begun, seconds, about))

    def steps(self, program: Program, operator: str) -> AbstractContextManager[None]:
        """Context in which every step of a program is recorded, with the operator's text."""

        def record(label: str, work: Callable[[], Any], about: Mapping[str, Any]) -> Any:
            about = {"operator": operator, **about}
            return self.timed(program.plan.worker, label, "step", about, work)

        return program.watched(record)


class Part(NamedTuple):
    """Events of one process, as sent to worker 0."""

    machine: str
    begun: float
    rows: dict[int | None, list[Event]]


class Traced(Protocol):
    """Interface of backends that the recorder uses."""

    worker: int | None
    tracing: Recording | None


@contextmanager
def traced(backend: Traced, path: Path, transport: Transport | None) -> Iterator[None]:
    """Context that records a trace; at its end worker 0 gathers and writes all workers' events.
    Collective at entry and exit.

    Raises:
        BackendError: a trace is being recorded already. ArgumentError: the file cannot be written.
            Both on every worker.
    """
    if backend.tracing is not None:
        raise BackendError(f"trace {path}: another trace is being recorded; end it first")
    writes = backend.worker in (None, 0)
    # Also synchronises the workers at the start of the trace.
    _first_does(
        transport, path, (lambda: target(path, streams=True).open("a").close()) if writes else None
    )
    recording = backend.tracing = Recording()
    try:
        yield
    finally:
        backend.tracing = None
    part = Part(_machine(), recording.begun, recording.rows)
    parts = [part] if transport is None else _gathered(transport, part)
    _first_does(transport, path, partial(_write, path, parts) if writes else None)


def _gathered(transport: Transport, mine: Part) -> list[Part]:
    """Events of all processes on worker 0; an empty list elsewhere."""

    def waits(peer: int) -> Awaited:
        return talk.awaited(f"worker {peer} to end its trace", peer, 1, 1)

    with Talk(transport, ("trace",)) as talk:
        if transport.worker:
            talk.say(0, mine)
            return []
        others = range(1, transport.workers)
        return [mine, *(talk.hear(peer, partial(waits, peer)) for peer in others)]


def _first_does(transport: Transport | None, path: Path, work: Callable[[], Any] | None) -> None:
    """File operation on worker 0; a failure is raised on every worker.

    Raises:
        ArgumentError: the operation failed.
    """
    problem = ""
    if work is not None:
        try:
            work()
        except OSError as error:
            problem = error.strerror or str(error)
        except ArgumentError as error:
            problem = str(error)
    if transport is not None:
        problem = transport.gather_all(problem)[0]
    if problem:
        raise ArgumentError(f"trace {path}: cannot be written: {problem}")


def _write(path: Path, parts: Sequence[Part]) -> None:
    write_text(path, trace_events.file(events(parts)))


def events(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Events of all processes in Chrome's format: times in microseconds since the trace began.

    Processes of one machine share a clock; machines are shifted so that the trace begins at 0 on
    each.
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
        found += trace_events.process(process, name, order)
        threads: dict[int, int] = {}
        for event in sorted(row, key=lambda event: (event.begun, -event.seconds)):
            found.append(
                trace_events.complete(
                    process,
                    threads.setdefault(event.thread, len(threads)),
                    event.name,
                    event.category,
                    event.begun - start[machine],
                    event.seconds,
                    event.about,
                )
            )
    return found


def _machine() -> str:
    """Identifier of this machine, and thus of its clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return platform.node()
