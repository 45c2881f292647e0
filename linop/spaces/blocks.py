"""Questions about the blocks of tensor spaces: order, overlap, lines along grid axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from linop.spaces.decomposition import COPIES
from linop.spaces.region import Region, Subset
from linop.spaces.tensor import TensorSpace


def axes_of_copies(X: TensorSpace) -> tuple[int, ...]:
    """The grid axes of role `COPIES` with an extent above 1."""
    grid = X.partition.shape
    return tuple(k for k, axis in enumerate(X.axes) if axis is COPIES and grid[k] > 1)


def is_tiled(X: TensorSpace) -> bool:
    """True if in each dimension the blocks, in order, cover the extent, no gap, no overlap."""
    return all(
        cuts[0][0] == 0 and cuts[-1][1] == n and all(a[1] == b[0] for a, b in pairwise(cuts))
        for cuts, n in zip(X.bounds, X.global_shape, strict=True)
    )


def is_disjoint(X: TensorSpace) -> bool:
    """True if each element of the tensor is in at most one block."""
    ordered = (sorted(cuts) for cuts in X.bounds)
    separate = all(a[1] <= b[0] for cuts in ordered for a, b in pairwise(cuts))
    return separate and not axes_of_copies(X)


def lines(X: TensorSpace, grid_axes: Sequence[int]) -> list[tuple[Region, ...]]:
    """Groups of blocks whose coordinates differ along the given grid axes only, each in row-major
    order. Groups that are equal, as for replicated blocks, are listed once."""
    last = np.moveaxis(X.partition.grid, tuple(grid_axes), tuple(range(-len(grid_axes), 0)))
    length = math.prod(X.partition.shape[k] for k in grid_axes)
    workers: list[list[int]] = last.reshape(-1, length).tolist()
    return list(dict.fromkeys(tuple(map(X.region, line)) for line in workers))


def intersections(X: TensorSpace, Y: TensorSpace) -> list[tuple[Subset, Subset]]:
    """Intersections, in the global tensor, of each block of X with the block of Y of the same
    number: pairs of subsets of the two blocks, empty ones omitted."""
    at, of = X.numbering.starts, Y.numbering.starts
    low, high = np.maximum(at, of), np.minimum(at + X.numbering.shapes, of + Y.numbering.shapes)
    ends = ((corner - base)[:, : X.ndim].tolist() for base in (at, of) for corner in (low, high))
    rows = zip(X.regions, Y.regions, *ends, (low < high).all(axis=1), strict=True)
    return [
        (Subset(x, tuple(a), tuple(b)), Subset(y, tuple(c), tuple(d)))
        for x, y, a, b, c, d, some in rows
        if some
    ]
