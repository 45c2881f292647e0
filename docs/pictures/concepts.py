"""Draw the pictures of the front page and of docs/concepts.md: ``python docs/pictures/concepts.py``
writes ``*.svg`` beside this file. They have a background of their own, for pages that are dark, and
say by words, dashes and arrows what they say by colours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent
INK, GREY, SENT = "#1b1b1b", "#555555", "#33658a"
FILLS = "#dbe7f3", "#fde8cf", "#dcefd9", "#eadcf0"
"""Of what belongs to workers 0, 1, 2, 3."""
CELL = 30
"""Pixels of the side of an element."""


def text(
    x: float, y: float, words: str, anchor: str = "start", color: str = INK, bold: bool = False
) -> str:
    """A line of text, at its baseline."""
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{color}"{weight}>'
        f"{escape(words)}</text>"
    )


def box(
    x: float,
    y: float,
    wide: float,
    high: float,
    words: str = "",
    fill: str = "white",
    dashed: bool = False,
) -> str:
    """A rectangle with a text in its middle."""
    dashes = ' stroke-dasharray="4 3"' if dashed else ""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{wide:g}" height="{high:g}" rx="2" fill="{fill}" '
        f'stroke="{SENT}"{dashes}/>'
    ) + (text(x + wide / 2, y + high / 2 + 5, words, "middle") if words else "")


def arrow(x0: float, y0: float, x1: float, y1: float, dashed: bool = False) -> str:
    """An arrow; dashed ones stay on their worker."""
    dashes = ' stroke-dasharray="4 3"' if dashed else ""
    return (
        f'<line x1="{x0:g}" y1="{y0:g}" x2="{x1:g}" y2="{y1:g}" stroke="{SENT}" '
        f'stroke-width="1.6"{dashes} marker-end="url(#head)"/>'
    )


def svg(wide: int, high: int, summary: str, parts: Iterable[str]) -> str:
    """The whole picture.

    Args:
        summary: for readers who do not see it.
    """
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" '
            f'height="{high}" font-family="sans-serif" font-size="14" role="img">',
            f"<title>{escape(summary)}</title>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{SENT}"/></marker>'
            "</defs>",
            '<rect width="100%" height="100%" rx="8" fill="#fcfcfa"/>',
            *parts,
            "</svg>\n",
        ]
    )


def _row(cells: Sequence[tuple[str, int, bool]], x: float, y: float) -> list[str]:
    """Elements beside one another, each of a worker; dashed if they are a halo's."""
    return [
        box(x + k * CELL, y, CELL, CELL, words, FILLS[worker], halo)
        for k, (words, worker, halo) in enumerate(cells)
    ]


OWN = [[f"{4 * w + k}" for k in range(4)] for w in range(3)]
"""Twelve elements in three blocks."""


def _centre(worker: int) -> float:
    """Of a worker's block, between halos or without."""
    return 128 + worker * 222


def _blocks(y: float, worker: int, halos: bool, words: Callable[[int, bool], str]) -> list[str]:
    cells = [(words(4 * worker + k, False), worker, False) for k in range(4)]
    if halos and worker > 0:
        cells.insert(0, (words(4 * worker - 1, True), worker - 1, True))
    if halos and worker < 2:
        cells.append((words(4 * worker + 4, True), worker + 1, True))
    # The own elements stand below one another, whatever is beside them.
    start = _centre(worker) - 2 * CELL - (CELL if halos and worker > 0 else 0)
    return _row(cells, start, y)


def _ends(source: int, target: int) -> tuple[float, float]:
    """Across: the middle of the edge element of a worker, and of the halo at its neighbour."""
    side = 1 if target > source else -1
    return _centre(source) + side * 1.5 * CELL, _centre(target) - side * 2.5 * CELL


PAIRS = (0, 1), (1, 0), (1, 2), (2, 1)


def exchange() -> str:
    """A halo exchange of three workers, and its adjoint."""
    parts = [text(16, 26, "H: each worker gets the edge of its neighbours' blocks", bold=True)]
    for w in range(3):
        parts.append(text(_centre(w), 50, f"worker {w}", "middle", GREY))
        parts += _blocks(58, w, False, lambda k, halo: f"x{_low(k)}")
        parts += _blocks(148, w, True, lambda k, halo: f"x{_low(k)}")
        parts.append(arrow(_centre(w), 92, _centre(w), 144, True))
    for source, target in PAIRS:
        begin, end = _ends(source, target)
        parts.append(arrow(begin, 91, end, 145))
    parts.append(text(16, 226, "H*, derived: what was copied comes back, and is added", bold=True))
    for w in range(3):
        parts += _blocks(240, w, True, lambda k, halo: f"y{_low(k)}" + ("′" if halo else ""))
        parts.append(arrow(_centre(w), 274, _centre(w), 326, True))
        parts += _sums(330, w)
    for source, target in PAIRS:
        end, begin = _ends(source, target)
        parts.append(arrow(begin, 273, end, 327))
    parts += [
        arrow(16, 390, 48, 390),
        text(54, 395, "sent", color=GREY),
        arrow(110, 390, 142, 390, True),
        text(148, 395, "stays on its worker", color=GREY),
        box(300, 380, 20, 20, dashed=True),
        text(328, 395, "halo: an element of a neighbour's block", color=GREY),
    ]
    return svg(
        700,
        412,
        "A halo exchange H between three workers: each gets the edge elements of its neighbours' "
        "blocks. The adjoint sends what was copied back, and adds it to the element that it was "
        "copied from.",
        parts,
    )


def _low(number: int) -> str:
    return "".join("₀₁₂₃₄₅₆₇₈₉"[int(digit)] for digit in str(number))


def _sums(y: float, worker: int) -> list[str]:
    """The adjoint's result: edge elements are sums."""
    parts = []
    start = _centre(worker) - 2 * CELL
    for k in range(4):
        edge = (k == 0 and worker > 0) or (k == 3 and worker < 2)
        parts.append(box(start + k * CELL, y, CELL, CELL, "+" if edge else "", FILLS[worker]))
    return parts


def spaces() -> str:
    """Regions on two workers, and the space of both."""
    parts = [
        text(16, 26, "two regions, and the space that they span", bold=True),
        box(16, 42, 190, 96, fill="#f1f1ee"),
        text(28, 62, "worker 0", color=GREY),
        *_row([("", 0, False)] * 4, 60, 84),
        text(48, 104, "a", "end"),
        box(230, 42, 190, 96, fill="#f1f1ee"),
        text(242, 62, "worker 1", color=GREY),
        *_row([("", 1, False)] * 3, 280, 84),
        text(268, 104, "b", "end"),
        text(440, 88, "Space([a, b]):"),
        text(440, 108, "vectors of 4 + 3 numbers", color=GREY),
    ]
    summary = "Worker 0 has the region a of 4 elements, worker 1 the region b of 3."
    return svg(640, 154, summary, parts)


def copies() -> str:
    """From a replicated tensor to independent copies, and back."""
    parts = [
        text(16, 26, "replicated", bold=True),
        text(16, 46, "one tensor that all hold: counts once", color=GREY),
        text(400, 26, "copies", bold=True),
        text(400, 46, "a tensor each: every one counts", color=GREY),
        text(250, 84, "nothing is sent", "middle", GREY),
        text(250, 196, "adjoint: sums over workers", "middle", GREY),
    ]
    for w in range(3):
        y = 96 + w * 28
        parts += [
            text(16, y + 17, f"worker {w}", color=GREY),
            box(80, y, 60, 24, "w", FILLS[3]),
            box(400, y, 60, 24, "w", FILLS[w]),
            arrow(146, y + 12, 394, y + 12, True),
        ]
        y = 208 + w * 28
        parts += [
            text(16, y + 17, f"worker {w}", color=GREY),
            box(80, y, 110, 24, "g₀ + g₁ + g₂", FILLS[3]),
            box(400, y, 60, 24, f"g{_low(w)}", FILLS[w]),
        ]
        parts += [arrow(394, y + 12, 196, 208 + v * 28 + 12, v == w) for v in range(3)]
    return svg(
        640,
        308,
        "From a replicated tensor to a copy on each worker nothing is sent; the adjoint is an "
        "all-reduce: every worker gets the sum of all gradients.",
        parts,
    )


def partition() -> str:
    """A matrix cut over grids: both dimensions, one, with copies."""
    parts = []
    grids = (
        ("Partition((2, 2))", "rows and columns are cut", 2, 2),
        ("Partition((4,))", "rows are cut", 4, 1),
        ("Partition((1, 4))", "columns are cut", 1, 4),
    )
    for k, (title, words, rows, columns) in enumerate(grids):
        x, y = 16 + k * 210, 62
        parts += [text(x, 26, title, bold=True), text(x, 46, words, color=GREY)]
        wide, high = 160 / columns, 120 / rows
        for w in range(4):
            i, j = divmod(w, columns)
            parts.append(box(x + j * wide, y + i * high, wide, high, str(w), FILLS[w]))
    summary = "The blocks of workers 0 to 3 of a matrix, for three grids of four workers."
    return svg(640, 198, summary, parts)


def plan() -> str:
    """The steps of two workers of a halo exchange in time."""
    parts = [text(16, 26, "what each worker does when the plan is called", bold=True)]
    steps = (
        ((90, 90, "pack edge"), (196, 120, "copy own block"), (440, 110, "put halo")),
        ((90, 90, "pack edge"), (196, 120, "copy own block"), (440, 110, "put halo")),
    )
    for w, line in enumerate(steps):
        y = 44 + w * 84
        parts.append(text(16, y + 20, f"worker {w}", color=GREY))
        parts += [box(x, y, wide, 30, words, FILLS[w]) for x, wide, words in line]
        parts.append(box(322, y, 112, 30, "wait", "white", True))
    parts += [
        arrow(180, 76, 436, 126),
        arrow(180, 126, 436, 76),
        text(102, 115, "messages", color=GREY),
        text(600, 168, "time →", "end", GREY),
    ]
    summary = (
        "Each of two workers packs its edge, sends it, copies its own block meanwhile, waits for "
        "the neighbour's message, and puts it where the halo is."
    )
    return svg(640, 178, summary, parts)


PICTURES = {
    "exchange": exchange,
    "spaces": spaces,
    "copies": copies,
    "partition": partition,
    "plan": plan,
}


def main() -> None:
    """Write all pictures."""
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
