"""Pictures as SVG text: elements, hatches, and colours for light and dark. No layout, and no other
package.

A `Drawing` collects elements in pixels; its `picture` is the text. Ink is ``currentColor``, fills
are translucent, and what a colour says a hatch, a dash or a label says, too: a picture reads on
light and dark paper, and in grey. All texts are escaped.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import unicodedata
from collections.abc import Sequence
from html import escape
from typing import Any

from linop.errors import ArgumentError
from linop.writing import written

PALETTE = (
    "#4477cc",
    "#d9822b",
    "#2a9d6f",
    "#c2549d",
    "#8a63d2",
    "#1a9bb0",
    "#a98f14",
    "#d1495b",
)
"""Colours with a contrast of at least 2.5 to white and to the dark paper."""
SOFT = 0.62
"""Opacity of texts and lines that matter less."""
MARGIN = 14
"""Pixels around a picture."""

_ID = "linop-id"
"""In elements, stands for a digest of the picture: two pictures on a page share no name."""
_FONT = "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif"
_STYLE = (
    "svg.linop{color:#1f2328}.linop-paper{fill:#ffffff}.linop .linop-halo{stroke:#ffffff}"
    "@media (prefers-color-scheme:dark){svg.linop{color:#e6edf3}.linop-paper{fill:#14181d}"
    ".linop .linop-halo{stroke:#14181d}}"
)
"""Of pictures that are files; in a page, ink and paper are the page's."""
_NO_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
"""Characters that no XML may contain, escaped or not."""
_SCRIPT = re.compile(r"([_^])\{([^{}]*)\}")
_SMALL = 0.76
"""Size of subscripts, of that of their text."""
_NARROW, _BROAD = frozenset("iIjl.,:;|![]()'`/\\ tfr⟨⟩"), frozenset("mwMWΣ→←⊕@%—…")


def colour(number: int) -> str:
    """The colour of a number, as of a worker; those of eight consecutive ones differ."""
    return PALETTE[number % len(PALETTE)]


def escaped(text: str) -> str:
    """Text for the content or an attribute of an element; what XML excludes becomes "�"."""
    return escape(_NO_XML.sub("\ufffd", text), quote=True)


def short(text: str, most: int) -> str:
    """A text in one line of at most `most` characters."""
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 1] + "…"


def text_width(text: str, size: float = 12) -> float:
    """About how wide a text is drawn, in pixels; wide fonts are meant, such as DejaVu Sans."""
    wide = 0.0
    for c in text:
        if unicodedata.combining(c):
            continue
        if unicodedata.east_asian_width(c) in "WF":
            wide += 1.0
        elif c in _NARROW:
            wide += 0.37
        elif c in _BROAD or c.isupper():
            wide += 0.8
        else:
            wide += 0.62
    return wide * size


def math_width(text: str, size: float = 12) -> float:
    """As `text_width`, of a text whose ``_{…}`` and ``^{…}`` are subscripts and superscripts."""
    pieces = _levels(text)
    return sum(text_width(piece, size * (_SMALL if level else 1)) for piece, level in pieces)


def _levels(text: str) -> list[tuple[str, int]]:
    """(piece, 0; 1 of a subscript, -1 of a superscript), in order; the first one is of level 0."""
    found, end = list[tuple[str, int]](), 0
    for match in _SCRIPT.finditer(text):
        found.append((text[end : match.start()], 0))
        found.append((match[2], 1 if match[1] == "_" else -1))
        end = match.end()
    return [*found, (text[end:], 0)]


def _raised(text: str, size: float) -> str:
    """The content of a text's element."""
    (first, _), *rest = _levels(text)
    parts, at = [escaped(first)], 0.0
    for piece, level in rest:
        if piece:
            small = f' font-size="{number(size * _SMALL)}"' if level else ""
            y = 0.26 * size * level
            parts.append(f'<tspan dy="{number(y - at)}"{small}>{escaped(piece)}</tspan>')
            at = y
    return "".join(parts)


def number(value: float) -> str:
    """A coordinate, in hundredths of a pixel."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text in ("", "-0") else text


class Picture:
    """An SVG picture: ``str(picture)`` is its text, a notebook shows it.

    Args:
        body: the elements, one a line.
        width, height: in pixels.
        summary: one sentence, for readers who do not see it.

    Example:
        >>> picture = linop.shift(linop.TensorSpace((4,), linop.Partition(2)), 1).draw()
        >>> picture.width > 0, str(picture).startswith("<svg"), "<script" in str(picture)
        (True, True, False)
    """

    def __init__(self, body: str, width: float, height: float, summary: str) -> None:
        digest = hashlib.sha256(body.encode("utf-8", "replace")).hexdigest()[:8]
        self._body = body.replace(_ID, f"linop-{digest}")
        self.width, self.height, self.summary = round(width), round(height), summary

    def __str__(self) -> str:
        """The text of a file: on its own paper, in the reader's choice of light or dark."""
        paper = '<rect class="linop-paper" width="100%" height="100%" rx="8" fill="#ffffff"/>'
        return self._svg("linop", f"<style>{_STYLE}</style>\n{paper}\n") + "\n"

    def _svg(self, kind: str, before: str, more: str = "") -> str:
        size = f'width="{self.width}" height="{self.height}"'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="{kind}" {size} '
            f'viewBox="0 0 {self.width} {self.height}" role="img" '
            f'aria-label="{escaped(self.summary)}" font-family="{_FONT}" font-size="12"{more}>\n'
            f"{before}{self._body}\n</svg>"
        )

    def __repr__(self) -> str:
        return f"<Picture of {self.width}x{self.height} pixels: {self.summary}>"

    def _repr_svg_(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        """The picture inside a page, in the page's ink."""
        svg = self._svg("linop-inline", "", ' style="max-width:100%;height:auto"')
        return f'<div style="overflow-x:auto">{svg}</div>'

    def save(self, path: str | os.PathLike[Any]) -> None:
        """Write the picture to a file, ``….svg``; every browser opens it.

        Raises:
            ArgumentError: the file cannot be written, or is not to be of SVG.
        """
        if not os.fspath(path).endswith(".svg"):
            raise ArgumentError(
                f"save: pictures are SVG, so a name that ends in .svg expected, given "
                f"{os.fspath(path)!r}; rsvg-convert and browsers make other formats of it"
            )
        written(path, str(self))


class Drawing:
    """Elements of a picture, in pixels; later ones cover earlier ones. It grows as far as they
    go."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._hatches: dict[int, str] = {}
        self.right = self.bottom = 0.0

    def picture(self, summary: str) -> Picture:
        """The picture of all elements, with a margin."""
        hatches = [self._hatches[k] for k in sorted(self._hatches)]
        defs = [f"<defs>{''.join(hatches)}</defs>"] if hatches else []
        body = "\n".join([*defs, *self._parts])
        return Picture(body, self.right + MARGIN, self.bottom + MARGIN, summary)

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str = "none",
        opacity: float = 1,
        line: str = "",
        thick: float = 1,
        dashes: str = "",
        round: float = 0,
        hint: str = "",
    ) -> None:
        """A rectangle; `hint` is shown where the pointer rests on it."""
        self._reach(x + width, y + height)
        clear = "" if opacity == 1 else f' fill-opacity="{number(opacity)}"'
        corner = f' rx="{number(round)}"' if round else ""
        self._add(
            f'<rect x="{number(x)}" y="{number(y)}" width="{number(width)}" '
            f'height="{number(height)}"{corner} fill="{fill}"{clear}'
            f"{_stroke(line, thick, dashes)}",
            "rect",
            hint,
        )

    def polygon(
        self,
        points: Sequence[tuple[float, float]],
        *,
        fill: str = "none",
        opacity: float = 1,
        line: str = "",
        thick: float = 1,
        dashes: str = "",
        hint: str = "",
    ) -> None:
        """A closed polygon."""
        for x, y in points:
            self._reach(x, y)
        clear = "" if opacity == 1 else f' fill-opacity="{number(opacity)}"'
        corners = " ".join(f"{number(x)},{number(y)}" for x, y in points)
        self._add(
            f'<polygon points="{corners}" fill="{fill}"{clear}{_stroke(line, thick, dashes)} '
            f'stroke-linejoin="round"',
            "polygon",
            hint,
        )

    def path(
        self,
        d: str,
        *,
        line: str = "currentColor",
        thick: float = 1,
        dashes: str = "",
        opacity: float = 1,
        hint: str = "",
    ) -> None:
        """A line, as the attribute ``d`` of a path; where it goes is not counted."""
        clear = "" if opacity == 1 else f' stroke-opacity="{number(opacity)}"'
        self._add(f'<path d="{d}" fill="none"{_stroke(line, thick, dashes)}{clear}', "path", hint)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 12,
        anchor: str = "start",
        weight: str = "",
        fill: str = "currentColor",
        opacity: float = 1,
        halo: bool = False,
        math: bool = False,
        hint: str = "",
    ) -> None:
        """A line of text, whose baseline is at `y`; `halo` keeps lines below it away; with `math`,
        ``_{…}`` and ``^{…}`` are subscripts and superscripts."""
        wide = math_width(text, size) if math else text_width(text, size)
        share = {"start": 1.0, "middle": 0.5, "end": 0.0}[anchor]
        self._reach(x + wide * share, y + 0.3 * size)
        told = f' text-anchor="{anchor}"' if anchor != "start" else ""
        told += f' font-size="{number(size)}"' if size != 12 else ""
        told += f' font-weight="{weight}"' if weight else ""
        told += f' fill-opacity="{number(opacity)}"' if opacity != 1 else ""
        if halo:
            told += ' class="linop-halo" paint-order="stroke" stroke-width="3"'
            told += ' stroke-linejoin="round"'
        inner = f"<title>{escaped(hint)}</title>" if hint else ""
        self._parts.append(
            f'<text x="{number(x)}" y="{number(y)}" fill="{fill}"{told}>'
            f"{_raised(text, size) if math else escaped(text)}{inner}</text>"
        )

    def hatch(self, k: int) -> str:
        """The fill that is hatched in the colour of a number. Angles and dashes of eight
        consecutive numbers differ, so that they are told apart without colours."""
        k %= len(PALETTE)
        if k not in self._hatches:
            c, angle, dashed = PALETTE[k], (45, 135, 0, 90)[k % 4], k >= 4
            dash = ' stroke-dasharray="4 2"' if dashed else ""
            self._hatches[k] = (
                f'<pattern id="{_ID}-{k}" width="6" height="6" patternUnits="userSpaceOnUse" '
                f'patternTransform="rotate({angle})"><rect width="6" height="6" fill="{c}" '
                f'fill-opacity="0.14"/><path d="M3 0V6" stroke="{c}" stroke-width="1.8"{dash}/>'
                f"</pattern>"
            )
        return f"url(#{_ID}-{k})"

    def crossed(self) -> str:
        """The fill that is crosswise hatched in ink: of several colours together."""
        self._hatches.setdefault(
            len(PALETTE),
            f'<pattern id="{_ID}-x" width="6" height="6" patternUnits="userSpaceOnUse" '
            f'patternTransform="rotate(45)"><path d="M3 0V6M0 3H6" stroke="currentColor" '
            f'stroke-opacity="0.4" stroke-width="1"/></pattern>',
        )
        return f"url(#{_ID}-x)"

    def texture(self, angle: int) -> str:
        """The fill of white lines at an angle, in degrees, over a colour."""
        k = -1 - angle
        self._hatches.setdefault(
            k,
            f'<pattern id="{_ID}-{angle}deg" width="5" height="5" patternUnits="userSpaceOnUse" '
            f'patternTransform="rotate({angle})"><path d="M2.5 0V5" stroke="#ffffff" '
            f'stroke-opacity="0.3" stroke-width="1.2"/></pattern>',
        )
        return f"url(#{_ID}-{angle}deg)"

    def head(
        self, x: float, y: float, way: str, fill: str, size: float = 7, opacity: float = 1
    ) -> None:
        """An arrow's head, whose tip is at (x, y).

        Args:
            way: where it points: "up", "down", "left" or "right".
        """
        a, b = size, size * 0.5
        ends = {
            "down": ((-b, -a), (b, -a)),
            "up": ((-b, a), (b, a)),
            "right": ((-a, -b), (-a, b)),
            "left": ((a, -b), (a, b)),
        }[way]
        self.polygon([(x, y), *((x + dx, y + dy) for dx, dy in ends)], fill=fill, opacity=opacity)

    def straight(
        self,
        begin: tuple[float, float],
        end: tuple[float, float],
        *,
        line: str = "currentColor",
        thick: float = 1,
        dashes: str = "",
        size: float = 8,
    ) -> None:
        """A straight arrow between two different points."""
        (x0, y0), (x1, y1) = begin, end
        long = math.hypot(x1 - x0, y1 - y0)
        a, b = (x1 - x0) / long, (y1 - y0) / long
        x, y = x1 - size * a, y1 - size * b
        d = f"M{number(x0)} {number(y0)}L{number(x)} {number(y)}"
        self.path(d, line=line, thick=thick, dashes=dashes)
        across = size * 0.45
        sides = [(x - across * b, y + across * a), (x + across * b, y - across * a)]
        self.polygon([end, *sides], fill=line)

    def plus(self, x: float, y: float, line: str, size: float = 5.5) -> None:
        """A ⊕ around (x, y)."""
        r = size
        self._add(
            f'<circle class="linop-paper" cx="{number(x)}" cy="{number(y)}" r="{number(r)}" '
            f'fill="none"{_stroke(line, 1.4, "")}',
            "circle",
            "added to what arrives from others",
        )
        t = r - 2
        self.path(
            f"M{number(x - t)} {number(y)}H{number(x + t)}M{number(x)} {number(y - t)}"
            f"V{number(y + t)}",
            line=line,
            thick=1.4,
        )

    def _reach(self, x: float, y: float) -> None:
        self.right, self.bottom = max(self.right, x), max(self.bottom, y)

    def _add(self, opened: str, tag: str, hint: str) -> None:
        title = f"><title>{escaped(hint)}</title></{tag}>" if hint else "/>"
        self._parts.append(opened + title)


def _stroke(line: str, thick: float, dashes: str) -> str:
    if not line:
        return ""
    broken = f' stroke-dasharray="{dashes}"' if dashes else ""
    width = "" if thick == 1 else f' stroke-width="{number(thick)}"'
    return f' stroke="{line}"{width}{broken}'
