"""Halos of large blocks: the strips at the edges of blocks move, and torch joins them to the block.
So a plan holds buffers for strips, and the extended block is torch's memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from linop.spaces.decomposition import Bounds
from linop.strategies.space.layout import Layout, Segments
from linop.strategies.space.saving import saving

if TYPE_CHECKING:
    from linop.strategies.space.grid import Grid

LARGE = 1 << 15
"""Elements of a block from which on strips are moved; below, whole blocks with their halos, by one
operator."""


@dataclass(frozen=True)
class _Dimension:
    """The exchange along one dimension, in indices of the unpadded tensor.

    Args:
        d: the dimension.
        needed: the range that each block needs.
        tails, heads: of each block the strips that blocks after it, or before it, need.
        left, right: what each block needs of those before it, and after it.
        pads: zeros before and after each block.
    """

    d: int
    needed: Bounds
    tails: Bounds
    heads: Bounds
    left: Bounds
    right: Bounds
    pads: Bounds


def exchange(
    grid: Grid, source: Layout, target: Layout, segments: Segments
) -> Callable[[Tensor], Tensor] | None:
    """The movement to blocks with halos and zero padding, by strips; None where that is not what
    the target is, or blocks are small."""
    if source.axes != target.axes or prod(source.shape) < LARGE * prod(grid.extents):
        return None
    shifts = {d: runs[0] for d, runs in segments if len(runs) == 1}
    if len(shifts) < len(segments):
        return None
    dimensions = []
    for d, n in enumerate(source.shape):
        if source.bounds[d] == target.bounds[d] and d not in shifts:
            continue
        at, of, length = shifts.get(d, (0, 0, n))
        if d not in source.cut or of or length != n:
            return None
        one = _along(d, n, source.bounds[d], target.bounds[d], at)
        if one is None:
            return None
        dimensions.append(one)
    return _Exchange(grid, source, target, dimensions)


def _along(d: int, n: int, own: Bounds, wanted: Bounds, before: int) -> _Dimension | None:
    needed, pads = [], []
    for low, high in wanted:
        a, b = min(max(low - before, 0), n), min(max(high - before, 0), n)
        needed.append((a, max(a, b)))
        pads.append((max(0, a - (low - before)), max(0, (high - before) - b)))
    if any(
        a == b or s == e or b <= s or a >= e for (a, b), (s, e) in zip(needed, own, strict=True)
    ):
        return None  # a block needs nothing of itself
    left = tuple((min(a, s), s) for (a, _), (s, _) in zip(needed, own, strict=True))
    right = tuple((e, max(b, e)) for (_, b), (_, e) in zip(needed, own, strict=True))
    tails, heads = [], []
    for k, (s, e) in enumerate(own):
        later = [max(a, s) for a, b in left[k + 1 :] if a < min(b, e)]
        sooner = [min(b, e) for a, b in right[:k] if max(a, s) < b]
        tails.append((min([e, *later]), e))
        heads.append((s, max([s, *sooner])))
    if any(h > t for (_, h), (t, _) in zip(heads, tails, strict=True)):
        return None  # of short blocks, strips overlap
    return _Dimension(d, tuple(needed), tuple(tails), tuple(heads), left, right, tuple(pads))


class _Exchange:
    """One dimension after the other, so that corners arrive."""

    def __init__(
        self, grid: Grid, source: Layout, target: Layout, dimensions: list[_Dimension]
    ) -> None:
        self.grid = grid
        self.steps = []
        self._inside: list[tuple[int, int, int]] | None = []
        """The place of the block in the extended one: (dimension, start, length); None if it is cut
        off in part."""
        layout = source
        for one in dimensions:
            k = layout.axis_of(one.d)
            assert k is not None
            (s, e), (a, b) = layout.bounds[one.d][grid.at[k]], one.needed[grid.at[k]]
            if a > s or b < e:
                self._inside = None
            elif self._inside is not None:
                self._inside.append((one.d, s - a + one.pads[grid.at[k]][0], e - s))
            self.steps.append((one, grid.at[k], layout))
            shape = [target.shape[d] if d == one.d else n for d, n in enumerate(layout.shape)]
            kept = {d: layout.bounds[d] for d in layout.cut}
            layout = layout.changed(shape, bounds=kept | {one.d: target.bounds[one.d]})

    def __call__(self, x: Tensor) -> Tensor:
        block, here = x, saving()
        for one, at, layout in self.steps:
            x = self._joined(x, one, at, layout)
        if here is not None and self._inside is not None:
            inside = x
            for d, first, length in self._inside:
                inside = inside.narrow(d, first, length)
            here.extended(block, inside)
        return x

    def _joined(self, x: Tensor, one: _Dimension, at: int, layout: Layout) -> Tensor:
        needed = one.needed[at]
        d, (s, e) = one.d, layout.bounds[one.d][at]
        cuts = s, one.heads[at][1], one.tails[at][0], e
        pieces = x.split([b - a for a, b in pairwise(cuts)], d)
        left = self._moved(pieces[2], layout, d, one.tails, one.left)
        right = self._moved(pieces[0], layout, d, one.heads, one.right)
        before, after = one.pads[at]
        parts = [_zeros(x, d, before), left]
        for piece, (a, b) in zip(pieces, pairwise(cuts), strict=True):
            low, high = max(a, needed[0]), min(b, needed[1])
            whole = (low, high) == (a, b)
            parts.append(
                piece if whole else piece.narrow(d, min(max(low - a, 0), b - a), max(high - low, 0))
            )
        # Strips of no rows, too: backward has to reach them on every worker.
        parts += [right, _zeros(x, d, after)]
        return torch.cat([p for p in parts if p is not None], d)

    def _moved(
        self, strip: Tensor, layout: Layout, d: int, source: Bounds, target: Bounds
    ) -> Tensor | None:
        if all(a == b for a, b in target):
            return None
        here, there = layout.changed(bounds={d: source}), layout.changed(bounds={d: target})
        return self.grid.move(strip.contiguous(), here, there)


def _zeros(x: Tensor, d: int, width: int) -> Tensor | None:
    if not width:
        return None
    return x.new_zeros([width if e == d else n for e, n in enumerate(x.shape)])
