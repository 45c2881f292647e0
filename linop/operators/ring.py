"""Collectives around a ring of workers, as sequences of steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from linop.errors import expect
from linop.normal_form.primitives import InPlace
from linop.operators.algebra import Named, identity, in_steps
from linop.operators.collectives import all_gather
from linop.operators.expressions import Primitives
from linop.operators.grids import copied_axes
from linop.operators.memory import adds, allocate
from linop.operators.named_movement import out_of_place
from linop.operators.operator import TensorOperator
from linop.provenance import records_origin
from linop.spaces.blocks import lines
from linop.spaces.partition import balanced
from linop.spaces.region import Region, Subset, as_subset
from linop.spaces.space import Space
from linop.spaces.tensor import TensorSpace


@records_origin
def ring_all_reduce(Y: TensorSpace, grid_axes: int | Sequence[int] | None = None) -> TensorOperator:
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

    Example:
        >>> Y = linop.TensorSpace((6,), linop.Partition(3), axes=[linop.COPIES])
        >>> ring = linop.ring_all_reduce(Y)
        >>> ring.equals(linop.all_reduce(Y))
        True
        >>> ring.H.equals(ring)
        True
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


@records_origin
def ring_all_gather(X: TensorSpace, grid_axis: int = 0) -> TensorOperator:
    """Ring all-gather: the same map as `all_gather`, in P - 1 steps around a ring of P workers, in
    each of which every worker sends one block to the next. Its adjoint, in the steps' adjoints, is
    the ring reduce-scatter; both together are the ring all-reduce (Patarasuk and Yuan, 2009).

    Args:
        X: blocks.
        grid_axis: the workers along it form a ring; it splits a dimension.

    Raises:
        PartitionError: there is no such grid axis, or it splits nothing.

    Example:
        >>> X = linop.TensorSpace((6,), linop.Partition(3))
        >>> ring = linop.ring_all_gather(X)
        >>> ring.equals(linop.all_gather(X))
        True
        >>> ring.cost().stages, linop.all_gather(X).cost().stages
        (2, 1)
    """
    X = expect("ring_all_gather", X, TensorSpace)
    Y = expect("ring_all_gather", all_gather(X, grid_axis).codomain, TensorSpace)
    rings = list(zip(lines(X, [grid_axis]), lines(Y, [grid_axis]), strict=True))
    size = len(rings[0][0])

    # Between steps, every block that a worker has is a region of its own, so that no step copies
    # more than its message.
    def chunk(blocks: Sequence[Region], k: int, copy: Region) -> Region:
        return Region(f"{copy.name}:{k}", blocks[k].shape, copy.workers, copy.memory)

    first = [(xs[k], chunk(xs, k, ys[k])) for xs, ys in rings for k in range(size)]
    space = Space([held for _, held in first], X.dtype)
    steps = [out_of_place(X, space, first)]
    for step in range(size - 1):
        pairs = [
            (chunk(xs, c, ys[k]), chunk(xs, c, ys[(k + 1) % size]))
            for xs, ys in rings
            for k, c in ((k, (k - step) % size) for k in range(size))
        ]
        more = allocate(space, *(there for _, there in pairs))
        space = more.codomain
        sent = [(as_subset(a), as_subset(b)) for a, b in pairs if a.size]
        steps.append(adds(space, [a for a, _ in sent], [b for _, b in sent]) @ more)
    every = [
        (chunk(xs, c, y), _part(X, xs[c], Y, y))
        for xs, ys in rings
        for y in ys
        for c in range(size)
        if xs[c].size
    ]
    steps.append(out_of_place(space, Y, every))
    # The first and the last step include the copies before and after them.
    if len(steps) > 2:
        steps = [steps[1] @ steps[0], *steps[2:]]
    steps = [*steps[:-2], steps[-1] @ steps[-2]]
    return Named("RingG", str(size), in_steps(*reversed(steps)))


def _part(X: TensorSpace, block: Region, Y: TensorSpace, copy: Region) -> Subset:
    """The part of a block of Y that holds the elements of a block of X."""
    bounds = zip(X.block(block), Y.block(copy), strict=True)
    return copy[tuple(slice(a.start - b.start, a.stop - b.start) for a, b in bounds)]


def _chunks(block: Region, count: int) -> list[Any]:
    """A block cut into `count` balanced subsets along its longest dimension; None if empty."""
    if block.size == 0 or block.ndim == 0:
        return [as_subset(block) if block.size else None, *[None] * (count - 1)]
    axis = max(range(block.ndim), key=lambda d: block.shape[d])
    stops = accumulate(balanced(block.shape[axis], count))
    bounds = pairwise([0, *stops])
    before = (slice(None),) * axis
    return [block[(*before, slice(a, b))] if a < b else None for a, b in bounds]
