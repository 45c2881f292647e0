"""Events of Chrome's trace-event format, of runs and of simulations alike: for Perfetto,
chrome://tracing or Speedscope."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from linop.errors import ArgumentError
from linop.text import read_text

SIMULATED = 1_000_000
"""First process number of simulated workers: beside real ones in one file."""
_NAME = 80
"""Longest name of an event, in characters; its arguments contain the whole text."""


def recorded(path: str | Path) -> list[Any]:
    """The events of a trace's file, as `linop.backends`' traces and simulations write it.

    Raises:
        ArgumentError: it cannot be read, or is no trace.
    """
    try:
        return list(json.loads(read_text(path))["traceEvents"])
    except OSError as error:
        raise ArgumentError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError):
        raise ArgumentError(f"{path}: no trace; expected a file of backend.trace") from None


def complete(
    process: int,
    thread: int,
    name: str,
    category: str,
    begun: float,
    seconds: float,
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """An event with a duration; `begun` is in seconds since the trace began."""
    return {
        "ph": "X",
        "pid": process,
        "tid": thread,
        "name": name[:_NAME],
        "cat": category,
        "ts": begun * 1e6,
        "dur": seconds * 1e6,
        "args": about,
    }


def flow(
    number: int, name: str, source: tuple[int, int, float], target: tuple[int, int, float]
) -> Iterator[dict[str, Any]]:
    """Two events: an arrow from one place to another, each (process, thread, seconds since the
    trace began). Viewers bind an end to the event that lasts at that time.

    Args:
        number: of the arrow, of its own in the file.
    """
    for phase, (process, thread, at) in (("s", source), ("f", target)):
        binding = {"bp": "e"} if phase == "f" else {}
        where = {"pid": process, "tid": thread, "ts": at * 1e6}
        yield {"ph": phase, "id": number, "name": name, "cat": "message", **where, **binding}


def process(number: int, name: str, order: int) -> list[dict[str, Any]]:
    """Events that name the rows of a process, and order it among the others."""
    return [
        _about(number, 0, "process_name", {"name": name}),
        _about(number, 0, "process_sort_index", {"sort_index": order}),
    ]


def thread(process: int, number: int, name: str) -> dict[str, Any]:
    """Event that names a row of a process."""
    return _about(process, number, "thread_name", {"name": name})


def file(events: Sequence[Mapping[str, Any]]) -> str:
    """Text of a file of events."""
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns"})


def _about(process: int, thread: int, what: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": what, "args": arguments}
