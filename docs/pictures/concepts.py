"""Draw the pictures of the front page and of docs/concepts.md: ``python docs/pictures/concepts.py``
writes ``*.svg`` beside this file. They say by words, dashes and arrows what they say by colours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from linop.svg import PALETTE, SOFT, Drawing, Picture, colour

FOLDER = Path(__file__).parent
SENT = PALETTE[0]
CELL = 30
"""Pixels of the side of an element."""


class Sketch(Drawing):
    """A drawing of boxes, each of a worker, and arrows."""

    def say(self, x: float, y: float, words: str, **how: Any) -> None:
        """A line of text that explains."""
        self.text(x, y, words, size=14, opacity=SOFT, **how)

    def head_line(self, words: str, x: float = 16, y: float = 26) -> None:
        self.text(x, y, words, size=14, weight="bold")

    def box(
        self,
        x: float,
        y: float,
        wide: float,
        high: float,
        words: str = "",
        worker: int | None = None,
        dashed: bool = False,
    ) -> None:
        """A rectangle in a worker's colour, with a text in its middle."""
        fill = "none" if worker is None else colour(worker)
        dashes = "4 3" if dashed else ""
        self.rect(x, y, wide, high, fill=fill, opacity=0.22, line=SENT, dashes=dashes, round=2)
        if words:
            self.text(x + wide / 2, y + high / 2 + 5, words, size=14, anchor="middle")

    def row(self, cells: Sequence[tuple[str, int, bool]], x: float, y: float) -> None:
        """Elements beside one another, each of a worker; dashed if they are a halo's."""
        for k, (words, worker, halo) in enumerate(cells):
            self.box(x + k * CELL, y, CELL, CELL, words, worker, halo)

    def arrow(self, x0: float, y0: float, x1: float, y1: float, stays: bool = False) -> None:
        """An arrow; what stays on its worker is dashed."""
        dashes = "4 3" if stays else ""
        self.straight((x0, y0), (x1, y1), line=SENT, thick=1.6, dashes=dashes)


def _centre(worker: int) -> float:
    """Of a worker's block, between halos or without."""
    return 128 + worker * 222


def _blocks(
    drawn: Sketch, y: float, worker: int, halos: bool, words: Callable[[int, bool], str]
) -> None:
    cells = [(words(4 * worker + k, False), worker, False) for k in range(4)]
    if halos and worker > 0:
        cells.insert(0, (words(4 * worker - 1, True), worker - 1, True))
    if halos and worker < 2:
        cells.append((words(4 * worker + 4, True), worker + 1, True))
    # The own elements stand below one another, whatever is beside them.
    drawn.row(cells, _centre(worker) - 2 * CELL - (CELL if halos and worker > 0 else 0), y)


def _ends(source: int, target: int) -> tuple[float, float]:
    """Across: the middle of the edge element of a worker, and of the halo at its neighbour."""
    side = 1 if target > source else -1
    return _centre(source) + side * 1.5 * CELL, _centre(target) - side * 2.5 * CELL


PAIRS = (0, 1), (1, 0), (1, 2), (2, 1)


def exchange() -> Picture:
    """A halo exchange of three workers, and its adjoint."""
    drawn = Sketch()
    drawn.head_line("H: each worker gets the edge of its neighbours' blocks")
    for w in range(3):
        drawn.say(_centre(w), 50, f"worker {w}", anchor="middle")
        _blocks(drawn, 58, w, False, lambda k, halo: f"x{_low(k)}")
        _blocks(drawn, 148, w, True, lambda k, halo: f"x{_low(k)}")
        drawn.arrow(_centre(w), 92, _centre(w), 144, True)
    for source, target in PAIRS:
        begin, end = _ends(source, target)
        drawn.arrow(begin, 91, end, 145)
    drawn.head_line("H*, derived: what was copied comes back, and is added", y=226)
    for w in range(3):
        _blocks(drawn, 240, w, True, lambda k, halo: f"y{_low(k)}" + ("′" if halo else ""))
        drawn.arrow(_centre(w), 274, _centre(w), 326, True)
        _blocks(drawn, 330, w, False, _sum)
    for source, target in PAIRS:
        end, begin = _ends(source, target)
        drawn.arrow(begin, 273, end, 327)
    drawn.arrow(16, 390, 48, 390)
    drawn.say(54, 395, "sent")
    drawn.arrow(110, 390, 142, 390, True)
    drawn.say(148, 395, "stays on its worker")
    drawn.box(310, 380, 20, 20, dashed=True)
    drawn.say(338, 395, "halo: an element of a neighbour's block")
    return drawn.picture(
        "A halo exchange H between three workers: each gets the edge elements of its neighbours' "
        "blocks. The adjoint sends what was copied back, and adds it to the element that it was "
        "copied from."
    )


def _low(number: int) -> str:
    return "".join("₀₁₂₃₄₅₆₇₈₉"[int(digit)] for digit in str(number))


def _sum(k: int, halo: bool) -> str:
    """Of the adjoint's result: edge elements beside another worker's are sums."""
    return "+" if k in (3, 4, 7, 8) else ""


def spaces() -> Picture:
    """Regions on two workers, and the space of both."""
    drawn = Sketch()
    drawn.head_line("two regions, and the space that they span")
    for w, (name, n) in enumerate((("a", 4), ("b", 3))):
        x = 16 + 214 * w
        drawn.rect(x, 42, 190, 96, fill="currentColor", opacity=0.05, round=2)
        drawn.say(x + 12, 62, f"worker {w}")
        drawn.row([("", w, False)] * n, x + 44, 84)
        drawn.text(x + 32, 104, name, size=14, anchor="end")
    drawn.text(440, 88, "Space([a, b]):", size=14)
    drawn.say(440, 108, "vectors of 4 + 3 numbers")
    return drawn.picture("Worker 0 has the region a of 4 elements, worker 1 the region b of 3.")


def copies() -> Picture:
    """From a replicated tensor to independent copies, and back."""
    drawn = Sketch()
    drawn.head_line("replicated")
    drawn.say(16, 46, "one tensor that all hold: counts once")
    drawn.head_line("copies", 400)
    drawn.say(400, 46, "a tensor each: every one counts")
    drawn.say(270, 84, "nothing is sent", anchor="middle")
    drawn.say(296, 196, "adjoint: sums over workers", anchor="middle")
    for w in range(3):
        y = 96 + w * 28
        drawn.say(16, y + 17, f"worker {w}")
        drawn.box(90, y, 60, 24, "w", 3)
        drawn.box(400, y, 60, 24, "w", w)
        drawn.arrow(156, y + 12, 394, y + 12, True)
        y = 208 + w * 28
        drawn.say(16, y + 17, f"worker {w}")
        drawn.box(90, y, 110, 24, "g₀ + g₁ + g₂", 3)
        drawn.box(400, y, 60, 24, f"g{_low(w)}", w)
        for v in range(3):
            drawn.arrow(394, y + 12, 206, 208 + v * 28 + 12, v == w)
    return drawn.picture(
        "From a replicated tensor to a copy on each worker nothing is sent; the adjoint is an "
        "all-reduce: every worker gets the sum of all gradients."
    )


def partition() -> Picture:
    """A matrix cut over grids: both dimensions, one, with copies."""
    drawn = Sketch()
    grids = (
        ("Partition((2, 2))", "rows and columns are cut", 2, 2),
        ("Partition((4,))", "rows are cut", 4, 1),
        ("Partition((1, 4))", "columns are cut", 1, 4),
    )
    for k, (title, words, rows, columns) in enumerate(grids):
        x, y = 16 + k * 210, 62
        drawn.head_line(title, x)
        drawn.say(x, 46, words)
        wide, high = 160 / columns, 120 / rows
        for w in range(4):
            i, j = divmod(w, columns)
            drawn.box(x + j * wide, y + i * high, wide, high, str(w), w)
    return drawn.picture(
        "The blocks of workers 0 to 3 of a matrix, for three grids of four workers."
    )


def plan() -> Picture:
    """The steps of two workers of a halo exchange in time."""
    drawn = Sketch()
    drawn.head_line("what each worker does when the plan is called")
    steps = (90, 90, "pack edge"), (196, 120, "copy own block"), (440, 110, "put halo")
    for w in range(2):
        y = 44 + w * 84
        drawn.say(16, y + 20, f"worker {w}")
        for x, wide, words in steps:
            drawn.box(x, y, wide, 30, words, w)
        drawn.box(322, y, 112, 30, "wait", dashed=True)
    drawn.arrow(180, 76, 436, 126)
    drawn.arrow(180, 126, 436, 76)
    drawn.say(102, 106, "messages")
    drawn.say(600, 182, "time →", anchor="end")
    return drawn.picture(
        "Each of two workers packs its edge, sends it, copies its own block meanwhile, waits for "
        "the neighbour's message, and puts it where the halo is."
    )


PICTURES: dict[str, Callable[[], Picture]] = {
    "exchange": exchange,
    "spaces": spaces,
    "copies": copies,
    "partition": partition,
    "plan": plan,
}


def main() -> None:
    """Write all pictures."""
    for name, draw in PICTURES.items():
        draw().save(FOLDER / f"{name}.svg")


if __name__ == "__main__":
    main()
