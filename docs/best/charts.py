"""Charts of docs/best.md, as pictures of `linop.svg`: they are read on light and dark paper, and
say by shapes, hatches and words what they say by colours."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from linop.svg import MARGIN, SOFT, Drawing, Picture, colour, number, text_width

WIDE = 430.0
"""Pixels of an axis."""
ROW = 26.0
SHAPES = ("circle", "triangle", "square", "diamond", "cross", "star")


def mark(drawn: Drawing, shape: int, x: float, y: float, size: float = 5.5, hint: str = "") -> None:
    """A mark around a point: its shape and its colour are those of a number."""
    name = SHAPES[shape % len(SHAPES)]
    corners = {"circle": 20, "triangle": 3, "square": 4, "diamond": 4, "cross": 12, "star": 10}
    turn = {"square": math.pi / 4}.get(name, -math.pi / 2)
    points = []
    for k in range(corners[name]):
        angle, r = turn + 2 * math.pi * k / corners[name], size * 1.15
        if name == "star":
            r *= 1.1 if k % 2 == 0 else 0.45
        elif name == "cross":
            angle += math.pi / 12
            r *= 0.42 if k % 3 == 1 else 1
        points.append((x + r * math.cos(angle), y + r * math.sin(angle)))
    drawn.polygon(points, fill=colour(shape), line="currentColor", thick=0.7, hint=hint)


def legend(drawn: Drawing, names: Sequence[str], x: float, y: float) -> None:
    """Shapes and what they stand for, in a line."""
    for k, name in enumerate(names):
        mark(drawn, k, x + 6, y - 4)
        drawn.text(x + 17, y, name, size=11, opacity=SOFT)
        x += 17 + text_width(name, 11) + 16


def _vertical(drawn: Drawing, x: float, y0: float, y1: float, opacity: float) -> None:
    drawn.path(f"M{number(x)} {number(y0)}V{number(y1)}", opacity=opacity)


def ratios(
    title: str,
    rows: Mapping[str, Sequence[float]],
    kinds: Sequence[str],
    ticks: Mapping[float, str],
    below: str,
    summary: str,
) -> Picture:
    """Ratios on a logarithmic axis, a row for each name, a shape for each kind.

    Args:
        rows: by name, one ratio for each kind.
        ticks: texts by their values, increasing; the line at 1 is drawn thicker.
        below: what the axis is.
    """
    drawn = Drawing()
    left = MARGIN + max(text_width(name) for name in rows) + 14
    low, high = min(ticks), max(ticks)
    unit = WIDE / math.log(high / low)
    drawn.text(MARGIN, 24, title, size=14, weight="bold")
    top = 42.0
    bottom = top + ROW * len(rows)
    for value, text in ticks.items():
        x = left + unit * math.log(value / low)
        _vertical(drawn, x, top, bottom, 0.8 if value == 1 else 0.16)
        drawn.text(x, bottom + 16, text, size=11, anchor="middle", opacity=SOFT)
    for k, (name, values) in enumerate(rows.items()):
        y = top + ROW * (k + 0.5)
        drawn.text(left - 12, y + 4, name, anchor="end")
        for shape, value in enumerate(values):
            hint = f"{name}, {kinds[shape]}: {value:g}"
            mark(drawn, shape, left + unit * math.log(value / low), y, hint=hint)
    drawn.text(left, bottom + 36, below, size=11, opacity=SOFT)
    legend(drawn, kinds, left, bottom + 58)
    return drawn.picture(summary)


def bars(
    title: str,
    rows: Mapping[str, Sequence[int]],
    kinds: Sequence[str],
    above: str,
    summary: str,
) -> Picture:
    """Numbers as bars, a group for each name, a hatch for each kind.

    Args:
        above: what the names are.
    """
    drawn = Drawing()
    left = MARGIN + max(text_width(name) for name in [*rows, above]) + 14
    most = max(value for values in rows.values() for value in values)
    high = 13.0
    drawn.text(MARGIN, 24, title, size=14, weight="bold")
    drawn.text(left - 12, 46, above, anchor="end", opacity=SOFT, size=11)
    y = 56.0
    for name, values in rows.items():
        drawn.text(left - 12, y + high * len(values) / 2 + 4, name, anchor="end")
        for k, value in enumerate(values):
            wide = WIDE * value / most
            if value:
                drawn.rect(left, y, wide, high, fill=drawn.hatch(k), line=colour(k), thick=0.8)
            shown = f"{value:,}"
            drawn.text(left + wide + 6, y + 11, shown, size=11, opacity=1 if value else SOFT)
            y += high
        y += 9
    x = left
    for k, kind in enumerate(kinds):
        drawn.rect(x, y + 3, 20, 12, fill=drawn.hatch(k), line=colour(k), thick=0.8)
        drawn.text(x + 27, y + 13, kind, size=11, opacity=SOFT)
        x += 27 + text_width(kind, 11) + 20
    return drawn.picture(summary)


def growth(
    title: str,
    lines: Mapping[str, Mapping[int, float]],
    below: str,
    beside: str,
    summary: str,
) -> Picture:
    """Lines on logarithmic axes, each with its name at its end.

    Args:
        lines: by name, values by what they grow with.
        below, beside: what the axes are.
    """
    drawn = Drawing()
    xs = sorted({x for line in lines.values() for x in line})
    values = [v for line in lines.values() for v in line.values()]
    first, last = (f(math.log10(g(values))) for f, g in ((math.floor, min), (math.ceil, max)))
    left, top, tall = MARGIN + 52.0, 58.0, 300.0
    across = WIDE / math.log(xs[-1] / xs[0])

    def at(x: int, value: float) -> tuple[float, float]:
        y = top + tall * (last - math.log10(value)) / (last - first)
        return left + across * math.log(x / xs[0]), y

    drawn.text(MARGIN, 24, title, size=14, weight="bold")
    drawn.text(MARGIN, 44, beside, size=11, opacity=SOFT)
    for power in range(first, last + 1):
        _, y = at(xs[0], 10.0**power)
        drawn.path(f"M{number(left)} {number(y)}h{number(WIDE)}", opacity=0.16)
        shown = f"{10.0**power:g}"
        drawn.text(left - 8, y + 4, shown, size=11, anchor="end", opacity=SOFT)
    for count in xs:
        place, _ = at(count, 1)
        _vertical(drawn, place, top, top + tall, 0.1)
        drawn.text(place, top + tall + 16, f"{count:,}", size=11, anchor="middle", opacity=SOFT)
    drawn.text(left + WIDE, top + tall + 34, below, size=11, anchor="end", opacity=SOFT)
    ends = []
    for k, (name, line) in enumerate(lines.items()):
        points = [at(count, line[count]) for count in sorted(line)]
        way = "L".join(f"{number(x)} {number(y)}" for x, y in points)
        drawn.path(f"M{way}", line=colour(k), thick=1.6)
        for (x, y), count in zip(points, sorted(line), strict=True):
            mark(drawn, k, x, y, hint=f"{name}, {count:,}: {line[count]:g}")
        ends.append((points[-1], k, name))
    below_last = top - 20
    for (x, y), k, name in sorted(ends, key=lambda end: end[0][1]):
        place = max(y, below_last + 18)
        below_last = place
        start, label = number(x + 8), left + WIDE + 22
        drawn.path(f"M{start} {number(y)}L{number(label - 2)} {number(place)}", opacity=0.35)
        mark(drawn, k, label + 6, place)
        drawn.text(label + 18, place + 4, name, size=11)
    return drawn.picture(summary)


def verdicts(
    title: str,
    rows: Mapping[str, Sequence[tuple[str, str]]],
    columns: Sequence[str],
    summary: str,
) -> Picture:
    """A table of words.

    Args:
        rows: by name, for each column "right", "wrong" or "raises", and the words.
    """
    drawn = Drawing()
    wide = 190.0
    left = MARGIN + max(text_width(name) for name in rows) + 14
    drawn.text(MARGIN, 24, title, size=14, weight="bold")
    for k, column in enumerate(columns):
        drawn.text(left + wide * (k + 0.5), 48, column, anchor="middle", weight="bold")
    y = 56.0
    for name, cells in rows.items():
        drawn.text(left - 12, y + 16, name, anchor="end")
        for k, (kind, words) in enumerate(cells):
            frame = left + wide * k, y, wide - 4, ROW - 4
            c = colour({"right": 2, "wrong": 7, "raises": 1}[kind])
            shade, thick, dashes = {
                "right": (0.12, 1, ""),
                "wrong": (0.34, 2.4, ""),
                "raises": (0.12, 1, "4 3"),
            }[kind]
            drawn.rect(*frame, fill=c, opacity=shade, line=c, thick=thick, dashes=dashes)
            middle = left + wide * (k + 0.5) - 2, y + 15
            bold = "bold" if kind == "wrong" else ""
            drawn.text(*middle, words, size=11, anchor="middle", weight=bold)
        y += ROW
    return drawn.picture(summary)
