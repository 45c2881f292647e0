"""Ring all-reduce: a collective as a sequence of steps, in place."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from linop.errors import expect
from linop.normal_form.primitives import InPlace
from linop.operators.algebra import Named, identity
from linop.operators.expressions import Primitives
from linop.operators.grids import copied_axes
from linop.operators.operator import LinearOperator
from linop.provenance import records_origin
from linop.spaces.blocks import lines
from linop.spaces.partition import balanced
from linop.spaces.region import Region, Subset, as_subset
from linop.spaces.tensor import TensorSpace


@records_origin
def ring_all_reduce(Y: TensorSpace, grid_axes: int | Sequence[int] | None = None) -> LinearOperator:
    """Ring all-reduce, in place: the same matrix as `all_reduce`, composed of 2 (P - 1) steps
    around a ring of P workers (Patarasuk and Yuan, 2009).

    Each block is cut into P chunks, and each message is one chunk. In the first P - 1 steps chunks
    are added (reduce-scatter), after which each worker has the sum of one chunk; in the others
    these sums are copied (all-gather).

    Args:
        Y: blocks, with `COPIES` along the grid axes.
        grid_axes: axes whose workers form a ring; by default all that hold several copies.

    Raises:
        PartitionError: a grid axis does not exist, is named twice, or does not hold copies.
    """
    Y = expect("ring_all_reduce", Y, TensorSpace)
    rings = lines(Y, copied_axes("ring_all_reduce", Y, grid_axes))
    rings_of_chunks = [[_chunks(block, len(ring)) for block in ring] for ring in rings]
    targets: list[Subset] = []
    sources: list[Subset] = []
    for copies in (False, True):
        for step in range(len(rings[0]) - 1):
            for ring in rings_of_chunks:
                for k, here in enumerate(ring):
                    c = (k + copies - step) % len(ring)
                    source, target = here[c], ring[(k + 1) % len(ring)][c]
                    if source is not None and target is not None:
                        targets += [target] * (1 + copies)
                        sources += [target] * copies + [source]
    body = Primitives(Y, InPlace(targets, sources), Y) if targets else identity(Y)
    return Named("Ring", str(len(rings[0])), body)


def _chunks(block: Region, count: int) -> list[Any]:
    """A block cut into `count` balanced subsets along its longest dimension; None if empty."""
    if block.size == 0 or block.ndim == 0:
        return [as_subset(block) if block.size else None, *[None] * (count - 1)]
    axis = max(range(block.ndim), key=lambda d: block.shape[d])
    stops = accumulate(balanced(block.shape[axis], count))
    bounds = pairwise([0, *stops])
    before = (slice(None),) * axis
    return [block[(*before, slice(a, b))] if a < b else None for a, b in bounds]
