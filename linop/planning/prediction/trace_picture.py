"""Pictures of traces, recorded or predicted: a row for each worker, boxes over time, and arrows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from linop.svg import SOFT, Drawing, Picture, colour, number, text_width

ROWS, EVENTS, ARROWS = 32, 4000, 600
"""Workers, boxes and arrows up to which all are drawn."""
_LEFT, _TOP, _ROW, _HIGH, _WIDE = 14.0, 44.0, 52.0, 22.0, 820.0
_KINDS = ("send", "wait", "copy", "add", "local map", "other")
_SHAPE = {"send": 0, "copy": 2, "add": 3, "local map": 1, "other": 6}
"""Colours of boxes by kind; waits are empty."""

Trace = Sequence[Mapping[str, Any]]


def kind_of(name: str) -> str:
    """The kind of a trace's event, by its name: "send", "wait", "copy", "add", "local map" or
    "other"."""
    first = name.split(" ", 1)[0]
    if first == "wait":
        return "wait"
    if first in ("send", "pack", "write", "tell") or name.startswith(("begin the", "post")):
        return "send"
    if first in ("add", "sum") or " += " in name:
        return "add"
    if first in ("copy", "clear", "make"):
        return "copy"
    if " = " in name:
        return "local map" if "(" in name.split(" = ", 1)[1] else "copy"
    return "other"


def trace_picture(events: Trace, title: str, more: str = "") -> Picture:
    """The picture of a trace's events, in Chrome's format.

    Args:
        title: of the picture. more: a sentence about what the events leave out.
    """
    names = {e["pid"]: str(e["args"]["name"]) for e in events if e.get("name") == "process_name"}
    order = {
        e["pid"]: e["args"]["sort_index"] for e in events if e.get("name") == "process_sort_index"
    }
    rows = sorted(names, key=lambda pid: (order.get(pid, 0), pid))
    left_out = [more] if more else []
    if len(rows) > ROWS:
        left_out.append(f"{len(rows) - ROWS:,} more rows are not drawn.")
        rows = rows[:ROWS]
    boxes = [e for e in events if e.get("ph") == "X" and e["pid"] in set(rows)]
    if len(boxes) > EVENTS:
        left_out.append(f"{len(boxes) - EVENTS:,} more events are not drawn.")
        boxes = boxes[:EVENTS]
    first = min((e["ts"] for e in boxes), default=0.0)
    last = max((e["ts"] + e["dur"] for e in boxes), default=0.0)
    drawn = Drawing()
    drawn.text(_LEFT, 24, title, size=14, weight="bold")
    wide = max((text_width(names[pid]) for pid in rows), default=0.0)
    picture = _Rows(drawn, rows, _LEFT + wide + 14, first, max(last - first, 1e-9))
    for pid in rows:
        picture.row(pid, names[pid])
    for event in _outer_first(boxes):
        picture.box(event)
    flows = _flows(events, set(rows))
    if len(flows) > ARROWS:
        left_out.append(f"{len(flows) - ARROWS:,} more arrows are not drawn.")
    for source, target in flows[:ARROWS]:
        picture.arrow(source, target)
    y = picture.axis()
    y = _legend(drawn, {kind_of(e["name"]) for e in boxes}, bool(flows), picture.x, y + 30)
    for said in left_out:
        drawn.text(_LEFT, y, said, size=11, opacity=SOFT)
        y += 16
    return drawn.picture(f"{title}: events of {len(rows)} workers over time")


class _Rows:
    """Rows over time."""

    def __init__(
        self, drawn: Drawing, rows: Sequence[Any], x: float, first: float, span: float
    ) -> None:
        self.drawn, self.x, self.first = drawn, x, first
        self.y = {pid: _TOP + _ROW * k for k, pid in enumerate(rows)}
        self.scale = _WIDE / span
        self.span = span

    def row(self, pid: Any, name: str) -> None:
        y = self.y[pid]
        self.drawn.text(_LEFT, y + 15, name)
        self.drawn.rect(self.x, y, _WIDE, _HIGH, fill="currentColor", opacity=0.05)

    def box(self, event: Mapping[str, Any]) -> None:
        x = self.x + (event["ts"] - self.first) * self.scale
        y, wide = self.y[event["pid"]], event["dur"] * self.scale
        name, kind = str(event["name"]), kind_of(str(event["name"]))
        about = event.get("args", {})
        size = f", {about['bytes']} bytes" if "bytes" in about and "bytes" not in name else ""
        hint = f"{name}{size}: {duration(event['ts'])}, takes {duration(event['dur'])}"
        c = colour(_SHAPE.get(kind, 0))
        frame = x, y, max(wide, 0.5), _HIGH
        if event.get("cat") not in (None, "step", "message"):  # a call, around its steps
            self.drawn.rect(x, y - 3, max(wide, 0.5), _HIGH + 6, line="currentColor", hint=hint)
            return
        if kind == "wait":
            line = "currentColor"
            self.drawn.rect(*frame, line=line, thick=0.8, dashes="2 2", hint=hint)
        elif kind in ("copy", "add"):
            fill = self.drawn.hatch(_SHAPE[kind])
            self.drawn.rect(*frame, fill=fill, line=c, thick=0.8, hint=hint)
        else:
            self.drawn.rect(*frame, fill=c, opacity=0.35, line=c, thick=0.8, hint=hint)
        for text in (name, kind):
            if text_width(text, 10) + 6 <= wide:
                middle = x + wide / 2
                self.drawn.text(middle, y + 15, text, size=10, anchor="middle", halo=kind != "wait")
                break

    def arrow(self, source: Mapping[str, Any], target: Mapping[str, Any]) -> None:
        """From a send to the wait that it ends."""
        x0, x1 = (self.x + (e["ts"] - self.first) * self.scale for e in (source, target))
        a, b = self.y[source["pid"]], self.y[target["pid"]]
        down = b >= a
        begin, end = (a + _HIGH, b) if down else (a, b + _HIGH)
        stop = end - 6 if down else end + 6
        bend = (stop - begin) / 2
        points = (x0, begin, x0, begin + bend, x1, stop - bend, x1, stop)
        p = [number(value) for value in points]
        path = f"M{p[0]} {p[1]}C{p[2]} {p[3]} {p[4]} {p[5]} {p[6]} {p[7]}"
        hint = str(source.get("name", ""))
        self.drawn.path(path, thick=1.3, opacity=0.7, hint=hint)
        self.drawn.head(x1, end, "down" if down else "up", "currentColor", 6)

    def axis(self) -> float:
        """Times below the rows; returns where they end."""
        y = _TOP + _ROW * len(self.y)
        step = _nice(self.span / 6)
        for k in range(int(self.span / step + 1e-9) + 1):
            x = self.x + k * step * self.scale
            self.drawn.path(f"M{number(x)} {number(_TOP - 6)}V{number(y)}", opacity=0.14)
            self.drawn.text(x, y + 14, duration(k * step), size=11, anchor="middle", opacity=SOFT)
        return y + 16


def _outer_first(boxes: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return sorted(boxes, key=lambda e: (e["ts"], -e["dur"]))


def _flows(events: Trace, rows: set[Any]) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """The two ends of each arrow."""
    begun = {e["id"]: e for e in events if e.get("ph") == "s" and e["pid"] in rows}
    ended = [e for e in events if e.get("ph") == "f" and e["pid"] in rows]
    return [(begun[e["id"]], e) for e in ended if e["id"] in begun]


def _nice(least: float) -> float:
    """1, 2 or 5 times a power of ten, from a number on."""
    power = 10.0 ** math.floor(math.log10(least))
    return next((m * power for m in (1, 2, 5) if m * power >= least), 10 * power)


def duration(micro: float) -> str:
    """A time of a trace, which is in microseconds."""
    for unit, factor in (("s", 1e6), ("ms", 1e3), ("µs", 1.0)):
        if micro >= factor:
            return f"{micro / factor:.4g} {unit}"
    return f"{micro * 1e3:.4g} ns" if micro else "0"


def _legend(drawn: Drawing, kinds: set[str], flows: bool, x: float, y: float) -> float:
    for kind in (k for k in _KINDS if k in kinds):
        c = colour(_SHAPE.get(kind, 0))
        if kind == "wait":
            drawn.rect(x, y - 10, 18, 12, line="currentColor", thick=0.8, dashes="2 2")
        elif kind in ("copy", "add"):
            drawn.rect(x, y - 10, 18, 12, fill=drawn.hatch(_SHAPE[kind]), line=c, thick=0.8)
        else:
            drawn.rect(x, y - 10, 18, 12, fill=c, opacity=0.35, line=c, thick=0.8)
        drawn.text(x + 24, y, kind, size=11, opacity=SOFT)
        x += 24 + text_width(kind, 11) + 20
    if flows:
        drawn.path(f"M{number(x)} {number(y - 4)}h16", thick=1.3, opacity=0.7)
        drawn.head(x + 22, y - 4, "right", "currentColor", 6)
        drawn.text(x + 28, y, "a message", size=11, opacity=SOFT)
    return y + 22
