"""Elements of other blocks that the taps of a stencil read, as boxes, and the blocks that hold
them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import product

import numpy as np

from linop.spaces.scalars import Array
from linop.spaces.tensor import TensorSpace
from linop.stencils.boundaries import Boundary, runs, spans

Offset = tuple[int, ...]
Box = tuple[tuple[int, int], ...]
"""(start, stop) in each dimension, in global indices."""


class Needs:
    """The boxes that each block of a tensor space needs from others.

    Args:
        X: blocks that follow one another.
        offsets: of the taps.
        modes: the boundary of each dimension.
    """

    def __init__(self, X: TensorSpace, offsets: Sequence[Offset], modes: Sequence[Boundary]):
        self.X, self.offsets, self.modes = X, offsets, modes
        self.known: dict[tuple[int, int, int], tuple[list[int], dict[int, Array]]] = {}

    def of(self, block: Box) -> list[Box]:
        """Disjoint boxes that together are all elements outside of a block that its outputs need;
        no more, and each once."""
        if not self.offsets or not block or any(a == b for a, b in block):
            return []
        cuts, covers = zip(*(self._cells(d, *ends) for d, ends in enumerate(block)), strict=True)
        needed = np.zeros([len(ends) - 1 for ends in cuts], bool)
        for offset in self.offsets:
            lines = [cover[o] for cover, o in zip(covers, offset, strict=True)]
            needed |= reduce(np.logical_and.outer, lines, np.array(True))
        own = (slice(e.index(a), e.index(b)) for e, (a, b) in zip(cuts, block, strict=True))
        needed[tuple(own)] = False
        return [
            tuple((ends[i], ends[j]) for ends, (i, j) in zip(cuts, box, strict=True))
            for box in _boxes(needed)
        ]

    def _cells(self, dim: int, start: int, stop: int) -> tuple[list[int], dict[int, Array]]:
        """Cuts of a dimension between which all or none of a block's outputs read by a tap; for
        each offset along it, the cells that it reads."""
        key = dim, start, stop
        if key not in self.known:
            n, mode = self.X.global_shape[dim], self.modes[dim]
            offsets = sorted({offset[dim] for offset in self.offsets})
            read = {o: spans(runs(start + o, stop + o, n, mode)) for o in offsets}
            cuts = sorted(
                {start, stop, *(end for pairs in read.values() for p in pairs for end in p)}
            )
            low, high = np.array(cuts[:-1]), np.array(cuts[1:])
            none = np.zeros(len(low), bool)
            covers = {
                o: reduce(np.logical_or, [(a <= low) & (high <= b) for a, b in pairs], none)
                for o, pairs in read.items()
            }
            self.known[key] = cuts, covers
        return self.known[key]

    def holders(self, box: Box) -> Iterator[tuple[dict[int, int], Box]]:
        """The blocks that hold a box: by dimension, the number of the block; and the part."""
        found = []
        for (start, stop), cuts in zip(box, self.X.bounds, strict=True):
            stops = [b for _, b in cuts]
            near = range(bisect_right(stops, start), bisect_left(stops, stop) + 1)
            parts = [(k, max(start, cuts[k][0]), min(stop, stops[k])) for k in near]
            found.append([(k, a, b) for k, a, b in parts if a < b])
        for held in product(*found):
            yield {d: k for d, (k, _, _) in enumerate(held)}, tuple((a, b) for _, a, b in held)


def _boxes(cells: Array) -> Iterator[Box]:
    """True cells as disjoint boxes, each as long as can be in the last dimension, then in those
    before it."""
    left = cells.copy()
    while left.any():
        first = [int(k) for k in np.unravel_index(int(left.argmax()), left.shape)]
        box = [slice(k, k + 1) for k in first]
        for d in reversed(range(left.ndim)):
            while box[d].stop < left.shape[d]:
                more = [*box[:d], slice(box[d].stop, box[d].stop + 1), *box[d + 1 :]]
                if not left[tuple(more)].all():
                    break
                box[d] = slice(box[d].start, box[d].stop + 1)
        left[tuple(box)] = False
        yield tuple((part.start, part.stop) for part in box)
