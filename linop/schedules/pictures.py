"""Pictures of a simulated schedule: SVG, a line of text for each worker, and Chrome's trace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from linop import trace_events
from linop.schedules.actions import RECEIVES, SENDS, Action, Kind
from linop.svg import SOFT, Drawing, Picture

if TYPE_CHECKING:
    from linop.schedules.simulation import Simulation, Timed

COLOURS = {
    Kind.FORWARD: "#4e79a7",
    Kind.BACKWARD: "#59a14f",
    Kind.BACKWARD_INPUT: "#76b7b2",
    Kind.BACKWARD_WEIGHT: "#f28e2b",
    Kind.UPDATE: "#b07aa1",
}
"""Colours by kind, of Tableau's palette of ten; others are grey."""
OTHER = "#9c9c9c"
NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "gradient of input",
    Kind.BACKWARD_WEIGHT: "gradient of weights",
    Kind.UPDATE: "update",
}
_TEXTURES = {Kind.BACKWARD: 45, Kind.BACKWARD_INPUT: 135, Kind.BACKWARD_WEIGHT: 90, Kind.UPDATE: 0}
"""Angles of the white lines on boxes of a kind: forward has none."""
_LEFT, _TOP, _ROW, _BOX, _STRIP = 80, 34, 34, 24, 5
"""Pixels: names of workers, the title, a row, its boxes, and its messages below them."""
_SHORTEST, _LEAST, _MOST = 22, 480, 4000
"""Pixels: width of the shortest computation where the picture is not narrower or wider."""


def svg(simulation: Simulation) -> str:
    """A row for each worker, a box for each computation with its micro-batch, a strip below for
    each message that takes time. Later chunks of a worker are lighter. The same simulation gives
    the same text."""
    return str(picture(simulation))


def picture(simulation: Simulation) -> Picture:
    """The picture of `svg`."""
    boxes = list(_boxes(simulation))
    spans = [float(t.end - t.start) for _, t, _ in boxes if t.action.kind in COLOURS]
    time = float(simulation.time)
    wide = _SHORTEST * time / min(spans, default=1) if time else 0
    width = min(max(wide, _LEAST), _MOST)
    scale = width / time if time else 0
    drawn = Drawing()
    drawn.text(8, 20, title(simulation), size=13, weight="bold")
    for worker in range(len(simulation.workers)):
        y = _TOP + _ROW * worker
        drawn.text(8, y + 17, f"worker {worker}")
        drawn.rect(_LEFT, y, width, _BOX, fill="currentColor", opacity=0.06)
    for worker, (action, start, end), chunk in boxes:
        y, x, w = _TOP + _ROW * worker, _LEFT + float(start) * scale, float(end - start) * scale
        fill = colour(action.kind)
        opacity = 1 / (1 + chunk / 2)
        hint = f"{action}: {float(start):.6g} to {float(end):.6g}"
        if action.kind in SENDS:
            drawn.rect(x, y + _BOX + 1, w, _STRIP, fill=fill, hint=hint)
            continue
        drawn.rect(x, y, w, _BOX, fill=fill, opacity=opacity, hint=hint)
        _textured(drawn, x, y, w, action.kind)
        label = "" if action.micro_batch is None else str(action.micro_batch)
        if label and w >= 7 * len(label) + 2:
            ink = "white" if opacity == 1 else "currentColor"
            drawn.text(x + w / 2, y + 16, label, anchor="middle", fill=ink)
    below = _TOP + _ROW * len(simulation.workers)
    for k in range(5):
        anchor = "start" if k == 0 else "end" if k == 4 else "middle"
        at, said = _LEFT + width * k / 4, f"{time * k / 4:.4g}"
        drawn.text(at, below + 14, said, size=11, anchor=anchor, opacity=SOFT)
    _legend(drawn, simulation, below + 38)
    return drawn.picture(title(simulation))


def _textured(drawn: Drawing, x: float, y: float, w: float, kind: Kind) -> None:
    """A box's frame, and the lines of its kind."""
    texture = drawn.texture(_TEXTURES[kind]) if kind in _TEXTURES else "none"
    drawn.rect(x, y, w, _BOX, fill=texture, line="currentColor", thick=0.8)


def colour(kind: Kind) -> str:
    """Colour of the actions of a kind."""
    return COLOURS.get(kind, OTHER)


def title(simulation: Simulation) -> str:
    """Name, size, time and bubble of a simulated schedule."""
    schedule = simulation.schedule
    return (
        f"{schedule.name}: {schedule.stages} stages, {schedule.micro_batches} micro-batches, "
        f"time {float(simulation.time):.6g}, "
        f"bubble {float(simulation.bubble_of_total):.1%} of the total"
    )


def trace(simulation: Simulation, beside: str | Path | None = None, begun: float = 0.0) -> str:
    """Text of a trace in Chrome's format: a process for each worker, a row for what it computes and
    one for its messages.

    Raises:
        ArgumentError: `beside` cannot be read, or is no trace.
    """
    events = [] if beside is None else trace_events.recorded(beside)
    for worker, row in enumerate(simulation.workers):
        number = trace_events.SIMULATED + worker
        events += trace_events.process(number, f"worker {worker}, simulated", worker)
        events.append(trace_events.thread(number, 0, "computation"))
        events.append(trace_events.thread(number, 1, "messages"))
        for action, start, end in row:
            if action.kind in RECEIVES or end == start:
                continue
            message = action.kind in SENDS
            about = {"stage": action.stage, "micro-batch": action.micro_batch}
            events.append(
                trace_events.complete(
                    number,
                    int(message),
                    str(action),
                    "message" if message else "step",
                    begun + float(start),
                    float(end - start),
                    about,
                )
            )
    return trace_events.file(events)


def lines(simulation: Simulation, width: int) -> Iterator[list[tuple[str, Kind | None, int]]]:
    """For each worker, pieces of a line of text: (text, kind or None for idle time, chunk).

    Args:
        width: number of characters of a line.
    """
    time = simulation.time
    rows: list[list[tuple[Timed, int]]] = [[] for _ in simulation.workers]
    for worker, timed, chunk in _boxes(simulation):
        if timed.action.kind not in SENDS:
            rows[worker].append((timed, chunk))
    for row in rows:
        pieces: list[tuple[str, Kind | None, int]] = []
        at = 0
        for (action, start, end), chunk in row:
            first, last = (round(width * t / time) for t in (start, end))
            if first > at:
                pieces.append(("·" * (first - at), None, 0))
            if last > first:
                pieces.append((_label(action, last - first), action.kind, chunk))
            at = last
        if at < width:
            pieces.append(("·" * (width - at), None, 0))
        yield pieces


def fitting(simulation: Simulation, most: int) -> int:
    """Number of characters of a line in which each computation has room for its kind and
    micro-batch; at most `most`."""
    boxes = [t for _, t, _ in _boxes(simulation) if t.action.kind in COLOURS]
    shortest = min((t.end - t.start for t in boxes), default=1)
    digits = len(str(max(simulation.schedule.micro_batches - 1, 0)))
    return min(most, round((digits + 1) * simulation.time / shortest))


def _boxes(simulation: Simulation) -> Iterator[tuple[int, Timed, int]]:
    """(worker, action with its times, chunk) of all that takes time."""
    for worker, row in enumerate(simulation.workers):
        stages = sorted({timed.action.stage for timed in row})
        chunks = {stage: chunk for chunk, stage in enumerate(stages)}
        for timed in row:
            if timed.end > timed.start and timed.action.kind not in RECEIVES:
                yield worker, timed, chunks[timed.action.stage]


def _label(action: Action, width: int) -> str:
    number = "" if action.micro_batch is None else str(action.micro_batch)
    label = f"{action.kind}{number}"
    return label.ljust(width, "─") if len(label) <= width else str(action.kind)[:width].ljust(width)


def _legend(drawn: Drawing, simulation: Simulation, y: int) -> None:
    """Colours of the kinds that occur."""
    x = float(_LEFT)
    there = {timed.action.kind for _, timed, _ in _boxes(simulation)}
    names: list[tuple[Kind | None, str]] = [(k, NAMES[k]) for k in COLOURS if k in there]
    if there & SENDS:
        names.append((None, "message"))
    for kind, name in names:
        drawn.rect(x, y - 10, 12, 12, fill=OTHER if kind is None else COLOURS[kind])
        if kind in _TEXTURES:
            drawn.rect(x, y - 10, 12, 12, fill=drawn.texture(_TEXTURES[kind]))
        drawn.text(x + 17, y, name)
        x += 30 + 7 * len(name)
