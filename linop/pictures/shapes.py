"""Shapes and labels in the pictures of operators: the size of a region, a box in it, its name, and
the legend."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from linop.pictures.scene import Regions, Scene
from linop.spaces.direct_sums import DirectSumSpace
from linop.spaces.region import Region, Subset, memory_mark
from linop.spaces.space import Space
from linop.spaces.tensor import TensorSpace
from linop.svg import SOFT, Drawing, colour, number, short, text_width

CELL, WIDE, HIGH, STRIP = 24.0, 150.0, 84.0, 24.0
"""Pixels: an element's side at most; a region's width and height at most; a row of elements."""
_LEAST = 12.0
"""Pixels: the shortest side of a region."""
_NUMBERS = re.compile("(?<=.)(⟨[0-9]+⟩)+$", re.DOTALL)
_NAME = 22
"""Longest name of a region, in characters."""

Dims = dict[int, tuple[int, ...]]
"""By a region's number of dimensions, those that are drawn, at most two: downwards and across."""


@dataclass(frozen=True)
class Style:
    """Settings that all panels of a picture have in common.

    Attributes:
        dims: dimensions that are drawn.
        unit: pixels of an element.
    """

    dims: Dims
    unit: float

    @staticmethod
    def of(scenes: Sequence[Scene]) -> Style:
        """Dimensions that are cut somewhere, the last two of them; else the last one."""
        cut: dict[int, set[int]] = {}
        regions: list[Region] = []
        for scene in scenes:
            for level in scene.levels:
                if isinstance(level, Regions):
                    of_level = [r for held in level.held.values() for r in held]
                    regions += of_level
                    for region in of_level[:1]:
                        cut.setdefault(region.ndim, set()).update(_split(level.space, region))
            for arrow in scene.arrows:
                for box in (arrow.source, arrow.target):
                    if box is not None:
                        shapes = enumerate(zip(box.shape, box.region.shape, strict=True))
                        some = {d for d, (a, b) in shapes if a != b}
                        cut.setdefault(box.region.ndim, set()).update(some)
        dims = {
            ndim: tuple(sorted(found))[-2:] if found else (ndim - 1,) * min(ndim, 1)
            for ndim, found in cut.items()
        }
        for region in regions:
            dims.setdefault(region.ndim, (region.ndim - 1,) * min(region.ndim, 1))
        across = max((r.shape[dims[r.ndim][-1]] for r in regions if r.ndim), default=1)
        down = max((r.shape[dims[r.ndim][0]] for r in regions if len(dims[r.ndim]) == 2), default=1)
        return Style(dims, min(CELL, WIDE / max(across, 1), HIGH / max(down, 1)))

    def size(self, region: Region) -> tuple[float, float]:
        """Width and height of a region, in pixels."""
        dims = self.dims[region.ndim]
        if not dims:
            return CELL, STRIP
        wide = max(_LEAST, self.unit * region.shape[dims[-1]])
        return wide, max(_LEAST, self.unit * region.shape[dims[0]]) if len(dims) == 2 else STRIP


def _split(space: Space, region: Region) -> set[int]:
    """The dimensions of a region that grid axes split."""
    X = tensor_of(space, region)
    if X is None:
        return set()
    cuts = zip(X.axes, X.partition.shape, strict=True)
    return {axis for axis, many in cuts if isinstance(axis, int) and many > 1}


def tensor_of(space: Space, region: Region) -> TensorSpace | None:
    """The tensor space that a region is a block of; None if it is of none."""
    spaces = space.parts if isinstance(space, DirectSumSpace) else (space,)
    return next((s for s in spaces if isinstance(s, TensorSpace) and region in s), None)


def ranges(space: Space, region: Region) -> list[tuple[int, int]]:
    """(start, stop) of a region in each dimension: of the global tensor, if it is a block of one,
    else from 0."""
    X = tensor_of(space, region)
    if X is None:
        return [(0, n) for n in region.shape]
    return [(s.start, s.stop) for s in X.block(region)]


@dataclass(frozen=True)
class Box:
    """A region that is drawn."""

    region: Region
    dims: tuple[int, ...]
    x: float
    y: float
    wide: float
    high: float

    def part(self, box: Subset) -> tuple[float, float, float, float]:
        """x, y, width and height of a box in the region."""
        x, y, wide, high = self.x, self.y, self.wide, self.high
        if self.dims:
            d = self.dims[-1]
            n = max(self.region.shape[d], 1)
            x, wide = x + wide * box.start[d] / n, wide * (box.stop[d] - box.start[d]) / n
        if len(self.dims) == 2:
            d = self.dims[0]
            n = max(self.region.shape[d], 1)
            y, high = y + high * box.start[d] / n, high * (box.stop[d] - box.start[d]) / n
        return x, y, wide, high


def label(space: Space, region: Region, inner: bool = False) -> str:
    """Name, and the indices that a region has of its tensor, or its shape; of a region between
    stages (`inner`) without the numbers that the normal form gives it."""
    name = _NUMBERS.sub("", region.name) if inner else region.name
    name = short(name, _NAME) + memory_mark(region)
    if not region.ndim:
        return name
    if tensor_of(space, region) is None:
        return f"{name} [{', '.join(map(str, region.shape))}]"
    return f"{name} [{', '.join(f'{a}:{b}' for a, b in ranges(space, region))}]"


def hint(space: Space, region: Region) -> str:
    held = region.workers
    few = ", ".join(map(str, held[:8])) + (", …" if len(held) > 8 else "")
    copies = f"identical copies on workers {few}" if region.replicated else f"on worker {few}"
    return f"{label(space, region)}, shape {region.shape}, {copies}"


def legend(drawn: Drawing, kinds: Iterable[str], left: float, y: float) -> float:
    """The legend of the lines and fills that occur in panels, in as many lines as the picture is
    wide; returns the last line's baseline."""
    x, limit = left, max(drawn.right, 520.0)
    words = {
        "message": "to another worker",
        "copy": "inside own memory",
        "hatch": "came from another worker",
        "crossed": "came from several",
        "add": "added",
        "map": "local map",
    }
    for kind in (k for k in words if k in set(kinds)):
        wide = 34 + text_width(words[kind], 11)
        if x > left and x + wide > limit:
            x, y = left, y + 20
        if kind == "message":
            drawn.path(f"M{number(x)} {number(y - 4)}h20", line=colour(0), thick=2)
            drawn.head(x + 26, y - 4, "right", colour(0))
        elif kind == "copy":
            drawn.path(f"M{number(x)} {number(y - 4)}h20", dashes="3 3", opacity=0.6)
            drawn.head(x + 26, y - 4, "right", "currentColor")
        elif kind == "hatch":
            drawn.rect(x + 4, y - 10, 20, 12, fill=drawn.hatch(0), line=colour(0))
        elif kind == "crossed":
            drawn.rect(x + 4, y - 10, 20, 12, fill=drawn.crossed(), line="currentColor")
        elif kind == "add":
            drawn.plus(x + 18, y - 4, "currentColor")
        else:
            drawn.rect(
                x, y - 11, 26, 14, fill="currentColor", opacity=0.1, line="currentColor", round=7
            )
        drawn.text(x + 34, y, words[kind], size=11, opacity=SOFT)
        x += wide + 22
    return y
