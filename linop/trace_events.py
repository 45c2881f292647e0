"""Events of Chrome's trace-event format, of runs and of simulations alike: for Perfetto,
chrome://tracing or Speedscope."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_NAME = 80
"""Longest name of an event, in characters; its arguments contain the whole text."""


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
