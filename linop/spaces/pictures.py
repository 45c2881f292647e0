"""Pictures of tensors in blocks, in one, two and three dimensions; and the box drawing that
pictures of halos share. Of many blocks a few are drawn, and only those are looked at."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import TYPE_CHECKING

import numpy as np

from linop.spaces.decomposition import COPIES, REPLICATED, Bounds
from linop.svg import MARGIN, SOFT, Drawing, Picture, colour, text_width

if TYPE_CHECKING:
    from linop.spaces.tensor import TensorSpace
    from linop.spaces.vector import Vector

CUTS, FIRST = 8, 6
"""Blocks along a dimension up to which all are drawn; of more, how many first ones, before the
last."""
SIDES = (110.0, 210.0, 420.0)
"""Pixels that the dimensions of a tensor take at most: backwards, downwards, across."""
_CELL, _LEAST, _TIGHT, _APART = 26.0, 16.0, 0.0, 10.0
"""Pixels: of an element at most, of a block at least; between blocks that fit together, and between
those that overlap or leave gaps."""
_VALUES, _VALUES_ACROSS = 144, 24
"""Numbers of a vector up to which they are drawn, in all and along a dimension."""
SLANT = (0.62, 0.42)
"""Pixels to the right and upwards of a pixel backwards."""


@dataclass(frozen=True)
class Cut:
    """A block along a dimension: its number, where it is drawn, and its indices. Number None is of
    those that are left out."""

    number: int | None
    at: float
    long: float
    start: int = 0
    stop: int = 0


def drawn_dims(X: TensorSpace, most: int = 3) -> tuple[int, ...]:
    """The dimensions of a tensor that are drawn, at most `most`: those that are cut first, then the
    last ones."""
    if X.ndim <= most:
        return tuple(range(X.ndim))
    split = [d for d in range(X.ndim) if len(X.bounds[d]) > 1][-most:]
    rest = [d for d in reversed(range(X.ndim)) if d not in split]
    return tuple(sorted([*split, *rest[: most - len(split)]]))


def cuts_of(bounds: Bounds, unit: float, least: float, gap: float) -> list[Cut]:
    """The blocks along a dimension that are drawn, one after another.

    Args:
        unit: pixels of an element. least: pixels of a block. gap: pixels between two.
    """
    many = len(bounds)
    some: list[int | None] = [*range(many)]
    if many > CUTS:
        some = [*range(FIRST), None, many - 1]
    found, at = [], 0.0
    for k in some:
        if k is None:
            found.append(Cut(None, at, 26.0))
        else:
            start, stop = bounds[k]
            found.append(Cut(k, at, max(least, unit * (stop - start)), start, stop))
        at += found[-1].long + gap
    return found


def length(cuts: Sequence[Cut]) -> float:
    """Pixels that blocks along a dimension take."""
    return cuts[-1].at + cuts[-1].long if cuts else 0.0


def unit_of(extents: Sequence[float], sides: Sequence[float] = SIDES) -> float:
    """Pixels of an element for which all dimensions fit; (n,) elements of the dimensions drawn."""
    rooms = sides[len(sides) - len(extents) :]
    fits = [room / n for room, n in zip(rooms, extents, strict=True) if n]
    return min([_CELL, *fits])


def holders(X: TensorSpace, grid: np.ndarray, dims: Sequence[int], at: Sequence[int]) -> np.ndarray:
    """The workers that hold the block at these coordinates of the drawn dimensions, and the first
    one of the dimensions that are not drawn.

    Args:
        grid: that of the partition of X, made once for all blocks.
    """
    where = dict(zip(dims, at, strict=True))
    index = tuple(where.get(axis, 0) if isinstance(axis, int) else slice(None) for axis in X.axes)
    found: np.ndarray = np.asarray(grid[index]).reshape(-1)
    return found


def blocks_picture(X: TensorSpace) -> Picture:
    """A tensor in its blocks, each with the workers that hold it."""
    drawn = Drawing()
    drawn.text(MARGIN, 24, _title(X), size=14, weight="bold")
    dims = drawn_dims(X)
    bounds = [X.bounds[d] for d in dims] or [((0, 1),)]
    apart = any(a[1] != b[0] for cuts in bounds for a, b in pairwise(cuts))
    unit = unit_of([sum(b - a for a, b in cuts[:CUTS]) for cuts in bounds])
    gap = _APART if apart else _TIGHT
    axes = [cuts_of(cuts, unit, _LEAST, gap) for cuts in bounds]
    y = 40.0
    draw = _cuboid if len(axes) == 3 else _rectangle
    y = draw(drawn, X, dims, axes, y)
    for said in _notes(X, dims):
        drawn.text(MARGIN, y, said, size=11, opacity=SOFT)
        y += 16
    return drawn.picture(f"{_title(X)}, in {len(X)} blocks on {X.partition.size} workers")


def _title(X: TensorSpace) -> str:
    shape = " × ".join(map(str, X.global_shape)) or "a number"
    return f"{X.name}: {shape} on {X.partition} workers"


def _notes(X: TensorSpace, dims: Sequence[int]) -> Iterator[str]:
    for axis, many in zip(X.axes, X.partition.shape, strict=True):
        if axis is COPIES:
            yield f"Each block is there {many} times: independent copies."
        elif axis is REPLICATED:
            yield f"Each block is held by {many} workers: identical copies, which count once."
        elif axis not in dims:
            yield f"Dimension {axis}, in {many} parts, is not drawn: these are the first."
    for d in range(X.ndim):
        if d in dims and len(X.bounds[d]) > CUTS:
            yield f"Dimension {d}: {len(X.bounds[d]) - CUTS + 1:,} more parts are not drawn."
        elif d not in dims and d not in X.axes:
            yield f"Dimension {d}, of extent {X.global_shape[d]}, is not drawn."


def _names(workers: np.ndarray, wide: float) -> str:
    """As many workers as fit, in words."""
    names = [str(w) for w in workers[:6].tolist()]
    for k in range(len(names), 0, -1):
        text = ", ".join(names[:k]) + ("" if k == len(workers) else ", …")
        if k == 1 or text_width(text) <= wide - 4:
            return text if text_width(text) <= wide - 2 else ""
    return ""


def _rectangle(
    drawn: Drawing, X: TensorSpace, dims: Sequence[int], axes: list[list[Cut]], top: float
) -> float:
    """Blocks in one or two dimensions, with their indices at the edges; returns where it ends."""
    *downs, across = axes
    down = downs[0] if downs else [Cut(0, 0.0, 34.0)]
    left = float(MARGIN)
    if downs:
        left += max(text_width(f"{c.start}:{c.stop}", 11) for c in down) + 8
    top, grid = top + 16, X.partition.grid
    for cut in across:
        text = "…" if cut.number is None else f"{cut.start}:{cut.stop}"
        if dims and text_width(text, 11) <= cut.long + 8:
            middle = left + cut.at + cut.long / 2
            drawn.text(middle, top - 5, text, size=11, anchor="middle", opacity=SOFT)
    for cut in down if downs else ():
        text = "…" if cut.number is None else f"{cut.start}:{cut.stop}"
        middle = top + cut.at + cut.long / 2 + 4
        drawn.text(left - 6, middle, text, size=11, anchor="end", opacity=SOFT)
    for row, column in product(down, across):
        frame = left + column.at, top + row.at, column.long, row.long
        centre = frame[0] + column.long / 2, frame[1] + row.long / 2 + 4
        if row.number is None or column.number is None:
            drawn.text(*centre, "…", anchor="middle", opacity=SOFT)
            continue
        at = [*([row.number] if downs else []), *([column.number] if dims else [])]
        workers = holders(X, grid, dims, at)
        c = colour(int(workers[0]))
        dashes = "5 3" if REPLICATED in X.axes else ""
        hint = f"worker {', '.join(map(str, workers[:8].tolist()))}"
        drawn.rect(*frame, fill=c, opacity=0.16, line=c, thick=1.5, dashes=dashes, hint=hint)
        drawn.text(*centre, _names(workers, column.long), anchor="middle")
    return top + length(down) + 22


def values_picture(X: TensorSpace, vector: Vector) -> Picture | None:
    """The numbers of a vector, where they are in the tensor and on which worker; None of vectors
    with many or complex ones, of which some are elsewhere, in copies, or in more than two
    dimensions."""
    many = X.size == 0 or X.size > _VALUES or max(X.global_shape, default=0) > _VALUES_ACROSS
    here = len(vector.arrays) == len(X) and all(
        isinstance(array, np.ndarray) for array in vector.arrays.values()
    )
    if many or not here or X.ndim not in (1, 2) or COPIES in X.axes or X.whole is None:
        return None
    if X.dtype.kind == "c" or X.size != math.prod(X.global_shape):
        return None
    drawn = Drawing()
    texts = {r.name: _texts(vector.arrays[r.name]) for r in X.regions}
    wide = max(text_width(text, 11) for found in texts.values() for text in found) + 10
    wide, high = max(wide, _CELL), 22.0
    for region in X.regions:
        down, across = (slice(0, 1), *X.block(region))[-2:]
        x, y = MARGIN + wide * across.start, MARGIN + high * down.start
        columns, rows = across.stop - across.start, down.stop - down.start
        c = colour(region.workers[0])
        dashes = "5 3" if region.replicated else ""
        hint = f"{region.name}, on worker {region.workers[0]}"
        drawn.rect(x, y, columns * wide, rows * high, fill=c, opacity=0.14)
        for k, text in enumerate(texts[region.name]):
            right = x + (k % columns + 1) * wide - 5
            line = y + (k // columns) * high + 15
            drawn.text(right, line, text, size=11, anchor="end")
        drawn.rect(x, y, columns * wide, rows * high, line=c, thick=1.5, dashes=dashes, hint=hint)
    return drawn.picture(f"Values of a vector of {X.name}, in {len(X)} blocks")


def _texts(array: np.ndarray) -> list[str]:
    """Each number, in few digits, in C order."""
    return [f"{value:.3g}" if array.dtype.kind == "f" else str(value) for value in array.flat]


class Oblique:
    """A box of three dimensions, seen from the front, from above and from the right.

    Args:
        x, y: of its left upper front corner. deep, high, wide: in pixels.
    """

    def __init__(self, x: float, y: float, deep: float, high: float, wide: float) -> None:
        self.x, self.y = x, y
        self.deep, self.high, self.wide = deep, high, wide

    def at(self, z: float, y: float, x: float) -> tuple[float, float]:
        """The position at which a point is drawn; z pixels backwards, y downwards, x across."""
        return self.x + x + z * SLANT[0], self.y + y - z * SLANT[1]

    def front(self, y: float, x: float, high: float, wide: float) -> list[tuple[float, float]]:
        """A rectangle on the front, as its corners."""
        corners = ((y, x), (y, x + wide), (y + high, x + wide), (y + high, x))
        return [self.at(0, *corner) for corner in corners]

    def top(self, z: float, x: float, deep: float, wide: float) -> list[tuple[float, float]]:
        """A rectangle on the top."""
        corners = ((z, x), (z, x + wide), (z + deep, x + wide), (z + deep, x))
        return [self.at(a, 0, b) for a, b in corners]

    def right(self, z: float, y: float, deep: float, high: float) -> list[tuple[float, float]]:
        """A rectangle on the right side."""
        corners = ((z, y), (z + deep, y), (z + deep, y + high), (z, y + high))
        return [self.at(a, b, self.wide) for a, b in corners]


def _cuboid(
    drawn: Drawing, X: TensorSpace, dims: Sequence[int], axes: list[list[Cut]], top: float
) -> float:
    """Blocks in three dimensions: those at the front, at the top and at the right."""
    deep, high, wide = map(length, axes)
    left = MARGIN + max(text_width(f"{c.start}:{c.stop}", 11) for c in axes[1]) + 10
    top, grid = top + deep * SLANT[1] + 6, X.partition.grid
    box = Oblique(left, top, deep, high, wide)
    faces = (
        (0, (1, 2), lambda a, b: box.front(a.at, b.at, a.long, b.long)),
        (1, (0, 2), lambda a, b: box.top(a.at, b.at, a.long, b.long)),
        (2, (0, 1), lambda a, b: box.right(a.at, b.at, a.long, b.long)),
    )
    for side, (one, other), corners in faces:
        edge = axes[side][-1].number if side == 2 else axes[side][0].number
        for a, b in product(axes[one], axes[other]):
            found = corners(a, b)
            x, y = (sum(corner[k] for corner in found) / 4 for k in range(2))
            if a.number is None or b.number is None:
                drawn.text(x, y + 4, "…", anchor="middle", opacity=SOFT)
                continue
            at = {side: edge, one: a.number, other: b.number}
            workers = holders(X, grid, dims, [at[k] or 0 for k in range(3)])
            c = colour(int(workers[0]))
            shade = (0.12, 0.2, 0.3)[side]
            hint = f"worker {', '.join(map(str, workers[:8].tolist()))}"
            drawn.polygon(found, fill=c, opacity=shade, line=c, thick=1.3, hint=hint)
            drawn.text(x, y + 4, _names(workers, b.long if side < 2 else a.long), anchor="middle")
    for cut in axes[2]:
        text = "…" if cut.number is None else f"{cut.start}:{cut.stop}"
        drawn.text(
            *box.at(0, high + 14, cut.at + cut.long / 2),
            text,
            size=11,
            anchor="middle",
            opacity=SOFT,
        )
    for cut in axes[1]:
        text = "…" if cut.number is None else f"{cut.start}:{cut.stop}"
        drawn.text(
            *box.at(0, cut.at + cut.long / 2 + 4, -6), text, size=11, anchor="end", opacity=SOFT
        )
    for cut in axes[0]:
        text = "…" if cut.number is None else f"{cut.start}:{cut.stop}"
        drawn.text(*box.at(cut.at + cut.long / 2, high + 12, wide + 8), text, size=11, opacity=SOFT)
    return top + high + 38
