"""Collectives, composed of memory operators alone (paper, section 3).

Each function states which blocks of two tensor spaces are linked. From the links,
`linop.normal_form.matching` derives the transfers, and `out_of_place` the composition of memory
operators; no adjoint is written by hand. Where the paper writes copies C_{a→b} = S_{a→b} A_b, all
regions b are allocated by one A. Halo exchange and padding have modules of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from linop.errors import ArgumentError, PartitionError, expect
from linop.normal_form.matching import Link, Segment, along, matching, same
from linop.normal_form.primitives import InPlace
from linop.operators.algebra import Known, Named, identity
from linop.operators.memory import adds, allocate, copy, deallocate
from linop.operators.operator import LinearOperator, Primitives, compose
from linop.provenance import remembered
from linop.spaces.partition import Partition, balanced
from linop.spaces.region import Part, Region, Subset, as_subset, integer, naturals
from linop.spaces.space import Space
from linop.spaces.tensor import COPIES, REPLICATED, Axis, TensorSpace

Pair = tuple[Part, Part]


def out_of_place(domain: Space, codomain: Space, pairs: Iterable[Pair]) -> LinearOperator:
    """D_domain ΠS_{a→b} A_codomain: allocates the codomain's regions, adds each subset a of the
    domain to its subset b of the codomain, and deallocates the domain's regions.

    If the two spaces share a region's name, the new regions get primed names first, and are renamed
    by a move after the old ones are deallocated.
    """
    clash = any(region.name in domain for region in codomain.regions)
    fresh = {r.name: _primed(r, domain) if clash else r for r in codomain.regions}
    bring = allocate(domain, *fresh.values())
    factors = [bring]
    every = [(as_subset(a), as_subset(b)) for a, b in pairs]
    if every:
        targets = [Subset(fresh[b.region.name], b.start, b.stop) for _, b in every]
        factors.append(adds(bring.codomain, [a for a, _ in every], targets))
    # Deallocations are written as adjoints of allocations, so that they end in `codomain` itself.
    if not clash:
        return compose(allocate(codomain, *domain.regions).H, *reversed(factors))
    dropped = deallocate(bring.codomain, *domain.regions)
    renamed = allocate(dropped.codomain, *codomain.regions)
    ends = [[as_subset(r) for r in regions] for regions in (fresh.values(), codomain.regions)]
    move = adds(renamed.codomain, *ends)
    end = allocate(codomain, *fresh.values()).H
    return compose(end, move, renamed, dropped, *reversed(factors))


@remembered
def send_recv(space: Space, a: Part, b: Part) -> LinearOperator:
    """The copy C_{a→b} between regions or subsets of equal shape, usually on two workers.

    In place if the space has b's region; out of place, with b's region allocated, if it has not.
    Errors are those of `copy`.
    """
    return copy(space, a, b)


@remembered
def broadcast(
    X: TensorSpace,
    partition: Partition,
    transpose_src: bool = False,
    transpose_dest: bool = False,
) -> LinearOperator:
    """B: each block of X copied to all workers of the new grid that it matches (paper, equation 8).

    Grid axes match as in NumPy's broadcasting, but one way only: X's grid is extended with ones on
    the left, and each of its axes must then have the new grid's extent, or 1. A transposed grid is
    reversed before it is matched: its worker at (i, j) is taken to be at (j, i).

    Args:
        X: the blocks to send.
        partition: the new grid.
        transpose_src, transpose_dest: reverse X's grid, or the new one.

    Returns:
        The operator from X to its blocks on the new grid, with `COPIES` along the grid axes that
        were added or extended. Its adjoint is the sum-reduction (paper, equation 9).

    Raises:
        PartitionError: the grids do not match; the message names the axis.
    """
    X = expect("broadcast", X, TensorSpace)
    small, roles = _oriented(X, transpose_src)
    partition = expect("broadcast", partition, Partition)
    large = partition.T if transpose_dest else partition
    small, roles = _matched("broadcast", "source", small, roles, "destination", large)
    new_roles = _roles(small, large, roles)
    Y = _on_grid(X, partition, new_roles, transpose_dest)
    links = [
        same(n, _grid_axis(X, k - large.ndim, transpose_src), _grid_axis(Y, k, transpose_dest))
        for k, n in enumerate(large.shape)
        if small.shape[k] == n and k >= large.ndim - X.partition.ndim
    ]
    return collective("B", f"{X.partition}→{partition}", X, Y, links)


@remembered
def sum_reduce(
    Y: TensorSpace,
    partition: Partition,
    transpose_src: bool = False,
    transpose_dest: bool = False,
) -> LinearOperator:
    """R: independent copies in Y summed to the blocks of a smaller grid; the adjoint of a broadcast
    (paper, section 3, with the rules of DistDL's sum-reduce for matching grids).

    The new grid is extended with ones on the left; each of its axes must then have the extent of
    Y's, or 1, and copies are summed along the latter. A transposed grid is reversed before it is
    matched.

    Args:
        Y: blocks, with `COPIES` along the grid axes that are summed.
        partition: the new grid.
        transpose_src, transpose_dest: reverse Y's grid, or the new one.

    Raises:
        PartitionError: the grids do not match, or an axis to be summed does not hold copies; the
            message names the axis.
    """
    Y = expect("sum_reduce", Y, TensorSpace)
    large, roles = _oriented(Y, transpose_src)
    partition = expect("sum_reduce", partition, Partition)
    small = partition.T if transpose_dest else partition
    kept = small.ndim
    small, _ = _matched("sum_reduce", "destination", small, (COPIES,) * kept, "source", large)
    for k, (n, role) in enumerate(zip(large.shape, roles, strict=True)):
        if small.shape[k] < n and role is not COPIES:
            raise PartitionError(
                f"sum_reduce: grid axis {k} of the source ({large}) is to be summed, but it does "
                f"not hold independent copies: {_describe(role)}; give axes= with COPIES there"
            )
    X = _on_grid(Y, partition, roles[large.ndim - kept :], transpose_dest)
    links = [
        same(n, _grid_axis(Y, k, transpose_src), _grid_axis(X, k - large.ndim, transpose_dest))
        for k, n in enumerate(large.shape)
        if small.shape[k] == n and k >= large.ndim - kept
    ]
    return collective("R", f"{Y.partition}→{partition}", Y, X, links)


@remembered
def all_reduce(Y: TensorSpace, grid_axes: int | Sequence[int] | None = None) -> LinearOperator:
    """B R: every copy along the grid axes becomes the sum of these copies. Self-adjoint (paper,
    section 3).

    Args:
        Y: blocks, with `COPIES` along the grid axes.
        grid_axes: axes to sum along; by default all that hold several copies.

    Raises:
        PartitionError: a grid axis does not exist, is named twice, or does not hold copies.
    """
    Y = expect("all_reduce", Y, TensorSpace)
    axes = _copied_axes("all_reduce", Y, grid_axes)
    one = tuple(slice(0, 1) if k in axes else slice(None) for k in range(Y.partition.ndim))
    reduced = sum_reduce(Y, Y.partition[one])
    spread = broadcast(expect("all_reduce", reduced.codomain, TensorSpace), Y.partition)
    return compose(spread, reduced)


@remembered
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
    rings = Y.lines(_copied_axes("ring_all_reduce", Y, grid_axes))
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


@remembered
def all_gather(
    X: TensorSpace, grid_axes: int | Sequence[int] | None = None, into: Axis = COPIES
) -> LinearOperator:
    """G: every worker along the grid axes gets the concatenation of the blocks along them.

    Args:
        X: blocks.
        grid_axes: axes to gather along, each of which splits a dimension; by default all that do.
        into: `COPIES` for independent copies, where the adjoint is a reduce-scatter; or
            `REPLICATED` for one tensor that all workers hold, where the adjoint is a slice without
            messages.

    Raises:
        PartitionError: a grid axis does not exist, is named twice, or splits no dimension.
        ArgumentError: `into` is neither of the two.
    """
    X = expect("all_gather", X, TensorSpace)
    split = [k for k, axis in enumerate(X.axes) if isinstance(axis, int)]
    axes = split if grid_axes is None else _grid_axes("all_gather", X, grid_axes)
    for k in axes:
        if k not in split:
            raise PartitionError(
                f"all_gather: grid axis {k} splits nothing: {_describe(X.axes[k])}"
            )
    if into not in (COPIES, REPLICATED):
        raise ArgumentError(f"all_gather: into is COPIES or REPLICATED; given {into!r}")
    roles = [into if k in axes else axis for k, axis in enumerate(X.axes)]
    kept = {d: X.bounds[d] for d in range(X.ndim) if d in roles}
    Y = X.like(X.partition, roles, kept)
    return collective("G", _over(axes), X, Y, along(X, axes))


@remembered
def reduce_scatter(
    Y: TensorSpace,
    grid_axes: int | Sequence[int] | None = None,
    dims: int | Sequence[int] | None = None,
) -> LinearOperator:
    """RS: the copies along the grid axes summed, and the sum cut into blocks along the same axes;
    the adjoint of `all_gather` into `COPIES`.

    Args:
        Y: blocks, with `COPIES` along the grid axes.
        grid_axes: axes to sum along; by default all that hold several copies.
        dims: the tensor dimension that each of these axes splits in the codomain; by default grid
            axis k splits dimension k.

    Raises:
        PartitionError: a grid axis does not exist, is named twice, or does not hold copies.
        ArgumentError: the number of `dims` is not that of the grid axes.
    """
    Y = expect("reduce_scatter", Y, TensorSpace)
    axes = _copied_axes("reduce_scatter", Y, grid_axes)
    into = axes if dims is None else naturals(dims, "dims of reduce_scatter")
    if len(into) != len(axes):
        raise ArgumentError(f"reduce_scatter: {len(into)} dims for {len(axes)} grid axes")
    roles: list[Axis] = list(Y.axes)
    for k, d in zip(axes, into, strict=True):
        roles[k] = d
    kept = {d: Y.bounds[d] for d in range(Y.ndim) if d in Y.axes}
    X = Y.like(Y.partition, roles, kept)
    return collective("RS", _over(axes), Y, X, along(Y, axes))


@remembered
def all_to_all(X: TensorSpace, grid_axis: int, dim: int) -> LinearOperator:
    """T: a global transpose. The tensor dimension that a grid axis splits becomes whole, and `dim`
    is split instead: a block permutation within each line of workers along the axis (paper,
    section 3).

    Args:
        X: blocks, where no grid axis splits `dim`.
        grid_axis: the axis, which splits a dimension.
        dim: the tensor dimension that it splits in the codomain.

    Raises:
        PartitionError: the grid axis does not exist, or splits no dimension.
    """
    X = expect("all_to_all", X, TensorSpace)
    (axis,), dim = _grid_axes("all_to_all", X, grid_axis), integer(dim, "all_to_all: dim")
    if not isinstance(X.axes[axis], int):
        raise PartitionError(
            f"all_to_all: grid axis {axis} splits nothing: {_describe(X.axes[axis])}"
        )
    roles: list[Axis] = list(X.axes)
    roles[axis] = dim
    kept = {d: X.bounds[d] for d in range(X.ndim) if d in X.axes and d in roles and d != dim}
    Y = X.like(X.partition, roles, kept)
    return collective("T", f"{X.axes[axis]}→{dim}", X, Y, along(X, [axis]))


@remembered
def repartition(X: TensorSpace, partition: Partition | TensorSpace) -> LinearOperator:
    """P: redistributes a global tensor to another block decomposition, on any workers.

    Args:
        X: blocks that do not overlap.
        partition: the new grid, whose axis k splits dimension k; or the codomain itself, a
            `TensorSpace` with any decomposition, copies and replicated axes included.

    Raises:
        PartitionError: the global shape or dtype differ, or an element of X is in several blocks,
            so that the one to send is ambiguous.
    """
    X = expect("repartition", X, TensorSpace)
    Y = _target("repartition", X, partition)
    return _regrouped("P", f"{X.partition}→{Y.partition}", X, Y)


@remembered
def scatter(X: TensorSpace, partition: Partition | TensorSpace) -> LinearOperator:
    """Sc: from one worker that holds the whole tensor to blocks on many (paper, section 3).

    Args:
        X: the tensor, in one region on one worker.
        partition: the new grid, or the codomain, as for `repartition`.

    Raises:
        PartitionError: X is not on one worker, or the global shape or dtype differ.
    """
    X = expect("scatter", X, TensorSpace)
    if len(X.regions) != 1 or X.regions[0].replicated:
        raise PartitionError(f"scatter: the tensor is on workers {X.workers}; expected one")
    Y = _target("scatter", X, partition)
    return _regrouped("Sc", f"→{Y.partition}", X, Y)


@remembered
def gather(X: TensorSpace, worker: int = 0) -> LinearOperator:
    """Ga: from blocks on many workers to the whole tensor on one; the adjoint of `scatter`.

    Args:
        X: blocks that do not overlap.
        worker: the worker that gets the tensor.

    Raises:
        PartitionError: an element of X is in several blocks.
    """
    X = expect("gather", X, TensorSpace)
    Y = _target("gather", X, Partition((1,) * X.ndim, [worker]))
    return _regrouped("Ga", f"→{worker}", X, Y)


@remembered
def shift(X: TensorSpace, steps: int, grid_axis: int = 0, periodic: bool = True) -> LinearOperator:
    """Moves every block by some steps along a grid axis; a permutation of blocks if periodic.

    Args:
        X: blocks.
        steps: the distance in grid coordinates; blocks go to lower ones if it is negative.
        grid_axis: the grid axis, one that splits a dimension or holds copies.
        periodic: True if the axis closes to a ring. Otherwise blocks that leave the grid are
            dropped, and workers that receive none get zeros, in the shape of their own block.

    Raises:
        PartitionError: the grid axis does not exist, or is replicated.
    """
    X = expect("shift", X, TensorSpace)
    steps = integer(steps, "shift: steps")
    (axis,) = _grid_axes("shift", X, grid_axis)
    if X.axes[axis] is REPLICATED:
        raise PartitionError(f"shift: along grid axis {axis} all workers hold the same block")
    n = X.partition.shape[axis]
    came_from = [k - steps if periodic or 0 <= k - steps < n else None for k in range(n)]
    came_from = [None if k is None else k % n for k in came_from]
    bounds = {d: X.bounds[d] for d in range(X.ndim)}
    role = X.axes[axis]
    if isinstance(role, int):
        old = X.bounds[role]
        bounds[role] = tuple(old[k if j is None else j] for k, j in enumerate(came_from))
    Y = X.like(X.partition, X.axes, bounds)
    arrivals = [(j, k) for k, j in enumerate(came_from) if j is not None]
    links = [*along(X, [axis]), Link(axis, axis, arrivals)]
    return collective("Shift", f"{steps:+d}", X, Y, links)


def collective(
    name: str,
    subscript: str,
    X: TensorSpace,
    Y: TensorSpace,
    links: Sequence[Link] = (),
    segments: Mapping[int, Sequence[Segment]] | None = None,
) -> LinearOperator:
    """The operator whose movement is ``matching(X, Y, links, segments)``, under a name. Its
    composition of memory operators (`out_of_place`) is built lazily."""
    known = matching(X, Y, links, segments)
    return Known(
        name, subscript, known, lambda: out_of_place(X, Y, [(t.source, t.target) for t in known])
    )


def _regrouped(name: str, subscript: str, X: TensorSpace, Y: TensorSpace) -> LinearOperator:
    """Each block of Y assembled from all blocks of X that intersect it.

    Raises:
        PartitionError: an element of X is in several blocks.
    """
    if not X.disjoint:
        raise PartitionError(
            f"{X!r} holds elements more than once, so which to take is not said; sum_reduce copies "
            f"first, or name the blocks with send_recv"
        )
    return collective(name, subscript, X, Y)


def _oriented(X: TensorSpace, transpose: bool) -> tuple[Partition, tuple[Axis, ...]]:
    return (X.partition.T, X.axes[::-1]) if transpose else (X.partition, X.axes)


def _matched(
    what: str,
    small_name: str,
    small: Partition,
    roles: tuple[Axis, ...],
    large_name: str,
    large: Partition,
) -> tuple[Partition, tuple[Axis, ...]]:
    """The smaller grid (and its roles) extended on the left to match the larger one.

    Raises:
        PartitionError: the smaller grid has more axes, or an extent that is neither the larger
            grid's nor 1.
    """
    if small.ndim > large.ndim:
        raise PartitionError(
            f"{what}: the {small_name} grid {small} has more axes ({small.ndim}) than the "
            f"{large_name} grid {large} ({large.ndim})"
        )
    extended = small.extend(large.ndim)
    for k, (m, n) in enumerate(zip(extended.shape, large.shape, strict=True)):
        if m not in (1, n):
            allowed = f"{n} or 1" if n != 1 else "1"
            raise PartitionError(
                f"{what}: grid axis {k} does not match: {m} in the {small_name} grid {extended}, "
                f"{n} in the {large_name} grid {large}; in the {small_name} grid {allowed} expected"
            )
    return extended, (COPIES,) * (large.ndim - small.ndim) + roles


def _roles(small: Partition, large: Partition, roles: Sequence[Axis]) -> tuple[Axis, ...]:
    """The roles of the larger grid's axes: `COPIES` where extents differ, else the given ones."""
    return tuple(
        role if m == n else COPIES
        for m, n, role in zip(small.shape, large.shape, roles, strict=True)
    )


def _on_grid(
    X: TensorSpace, partition: Partition, roles: Sequence[Axis], transposed: bool
) -> TensorSpace:
    """The tensor of X on another grid. If `transposed`, the roles are those of the axes of the
    transposed grid, and are reversed."""
    axes = tuple(reversed(roles)) if transposed else tuple(roles)
    return X.like(partition, axes, {d: X.bounds[d] for d in range(X.ndim)})


def _grid_axis(X: TensorSpace, k: int, transposed: bool) -> int:
    """The axis of X's grid that is axis k of that grid, or of its transpose if `transposed`."""
    ndim = X.partition.ndim
    return ndim - 1 - k % ndim if transposed else k % ndim


def _target(what: str, X: TensorSpace, target: Any) -> TensorSpace:
    if isinstance(target, TensorSpace):
        if target.global_shape != X.global_shape or target.dtype != X.dtype:
            raise PartitionError(
                f"{what}: global shape {target.global_shape} and dtype {target.dtype} given, "
                f"{X.global_shape} and {X.dtype} expected"
            )
        return target
    grid = expect("partition", target, Partition)
    return TensorSpace(X.global_shape, grid, X.dtype, name=X.name, memory=X.memory)


def _grid_axes(what: str, X: TensorSpace, axes: Any) -> tuple[int, ...]:
    several = axes if np.ndim(axes) else (axes,)
    given = tuple(integer(k, f"{what}: grid axes") for k in several)
    ndim = X.partition.ndim
    if any(not -ndim <= k < ndim for k in given):
        raise PartitionError(f"{what}: grid axes {given} of {X.partition!r}, which has {ndim}")
    chosen = tuple(k % ndim for k in given)
    if len(set(chosen)) < len(chosen):
        raise PartitionError(f"{what}: grid axes {given} name an axis twice")
    return chosen


def _copied_axes(what: str, Y: TensorSpace, axes: Any) -> tuple[int, ...]:
    if axes is None:
        return Y.copied
    chosen = _grid_axes(what, Y, axes)
    for k in chosen:
        if Y.axes[k] is not COPIES:
            raise PartitionError(
                f"{what}: grid axis {k} does not hold independent copies: {_describe(Y.axes[k])}"
            )
    return chosen


def _chunks(block: Region, count: int) -> list[Any]:
    """A block cut into `count` balanced subsets along its longest dimension; None if empty."""
    if block.size == 0 or block.ndim == 0:
        return [as_subset(block) if block.size else None, *[None] * (count - 1)]
    axis = max(range(block.ndim), key=lambda d: block.shape[d])
    stops = accumulate(balanced(block.shape[axis], count))
    bounds = pairwise([0, *stops])
    before = (slice(None),) * axis
    return [block[(*before, slice(a, b))] if a < b else None for a, b in bounds]


def _primed(region: Region, space: Space) -> Region:
    name = region.name + "'"
    while name in space:
        name += "'"
    return Region(name, region.shape, region.workers, region.memory)


def _describe(role: Axis) -> str:
    return f"it splits dimension {role}" if isinstance(role, int) else f"it is {role!r}"


def _over(axes: Sequence[int]) -> str:
    return ",".join(map(str, axes))
