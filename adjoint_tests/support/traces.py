"""Traces of calls, read back from their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def rows_of(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The complete events of a trace by the name of their row, in order, checked to nest."""
    found = json.loads(path.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in found if e["name"] == "process_name"}
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    for event in found:
        if event["ph"] == "X":
            rows[names[event["pid"]]].append(event)
    for row in rows.values():
        assert row == sorted(row, key=lambda event: event["ts"])
        open_until: list[float] = []
        for event in row:
            end = event["ts"] + event["dur"]
            while open_until and open_until[-1] <= event["ts"]:
                open_until.pop()
            assert event["ts"] >= 0
            assert not open_until or end <= open_until[-1] + 1e-3
            open_until.append(end)
    return rows
