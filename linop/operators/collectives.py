"""Collectives, composed of memory operators alone (paper, section 3).

Each function states which blocks of two tensor spaces are linked. From the links,
`linop.normal_form.matching` derives the transfers, and `linop.operators.named_movement` the
composition of memory operators; no adjoint is written by hand. Where the paper writes copies
C_{a→b} = S_{a→b} A_b, all regions b are allocated by one A. Ring all-reduce, halo exchange and
padding have modules of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

from linop.errors import ArgumentError, PartitionError, expect
from linop.normal_form.matching import Link, along, same
from linop.operators.expressions import compose
from linop.operators.grids import (
    axes_text,
    copied_axes,
    grid_axes_of,
    grid_axis_of,
    matched_grids,
    on_grid,
    oriented,
    role_text,
    roles_on,
    target_space,
)
from linop.operators.memory import copy
from linop.operators.named_movement import collective
from linop.operators.operator import LinearOperator, TensorOperator
from linop.provenance import records_origin
from linop.spaces.blocks import is_disjoint
from linop.spaces.decomposition import COPIES, REPLICATED, Axis
from linop.spaces.partition import Partition
from linop.spaces.region import Part, integer, naturals
from linop.spaces.space import Space
from linop.spaces.tensor import TensorSpace


@records_origin
def send_recv(space: Space, a: Part, b: Part) -> LinearOperator:
    """The copy C_{a→b} between regions or subsets of equal shape, usually on two workers.

    In place if the space has b's region; out of place, with b's region allocated, if it has not.
    Errors are those of `copy`.

    Example:
        >>> a, b = linop.Region("a", 2), linop.Region("b", 2, workers=1)
        >>> A = linop.send_recv(linop.Space(a), a, b)
        >>> A(linop.Space(a).vector(np.array([1.0, 2.0])))["b"].tolist()
        [1.0, 2.0]
        >>> A.H.to_matrix().toarray().tolist()  # what comes back is added
        [[1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 1.0]]
    """
    return copy(space, a, b)


@records_origin
def broadcast(
    X: TensorSpace,
    partition: Partition,
    transpose_src: bool = False,
    transpose_dest: bool = False,
) -> TensorOperator:
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

    Example:
        >>> X = linop.TensorSpace((2,), linop.Partition(1))
        >>> B = linop.broadcast(X, linop.Partition(3))
        >>> y = B(X.scatter(np.array([1.0, 2.0])))
        >>> [y[region.name].tolist() for region in B.codomain]
        [[1.0, 2.0], [1.0, 2.0], [1.0, 2.0]]
        >>> X.gather(B.H(y)).tolist()  # the adjoint sums
        [3.0, 6.0]
    """
    X = expect("broadcast", X, TensorSpace)
    small, roles = oriented(X, transpose_src)
    partition = expect("broadcast", partition, Partition)
    large = partition.T if transpose_dest else partition
    small, roles = matched_grids("broadcast", "source", small, roles, "destination", large)
    new_roles = roles_on(small, large, roles)
    Y = on_grid(X, partition, new_roles, transpose_dest)
    links = [
        same(n, grid_axis_of(X, k - large.ndim, transpose_src), grid_axis_of(Y, k, transpose_dest))
        for k, n in enumerate(large.shape)
        if small.shape[k] == n and k >= large.ndim - X.partition.ndim
    ]
    return collective("B", f"{X.partition}→{partition}", X, Y, links)


@records_origin
def sum_reduce(
    Y: TensorSpace,
    partition: Partition,
    transpose_src: bool = False,
    transpose_dest: bool = False,
) -> TensorOperator:
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

    Example:
        >>> Y = linop.TensorSpace((2,), linop.Partition(3), axes=[linop.COPIES])
        >>> R = linop.sum_reduce(Y, linop.Partition(1))
        >>> R.codomain.gather(R(Y.vector({r.name: np.ones(2) for r in Y}))).tolist()
        [3.0, 3.0]
        >>> R.H.equals(linop.broadcast(R.codomain, Y.partition))
        True
    """
    Y = expect("sum_reduce", Y, TensorSpace)
    large, roles = oriented(Y, transpose_src)
    partition = expect("sum_reduce", partition, Partition)
    small = partition.T if transpose_dest else partition
    kept = small.ndim
    small, _ = matched_grids("sum_reduce", "destination", small, (COPIES,) * kept, "source", large)
    for k, (n, role) in enumerate(zip(large.shape, roles, strict=True)):
        if small.shape[k] < n and role is not COPIES:
            raise PartitionError(
                f"sum_reduce: grid axis {k} of the source ({large}) is to be summed, but it does "
                f"not hold independent copies: {role_text(role)}; give axes= with COPIES there"
            )
    X = on_grid(Y, partition, roles[large.ndim - kept :], transpose_dest)
    links = [
        same(n, grid_axis_of(Y, k, transpose_src), grid_axis_of(X, k - large.ndim, transpose_dest))
        for k, n in enumerate(large.shape)
        if small.shape[k] == n and k >= large.ndim - kept
    ]
    return collective("R", f"{Y.partition}→{partition}", Y, X, links)


@records_origin
def all_reduce(Y: TensorSpace, grid_axes: int | Sequence[int] | None = None) -> TensorOperator:
    """B R: every copy along the grid axes becomes the sum of these copies. Self-adjoint (paper,
    section 3).

    Args:
        Y: blocks, with `COPIES` along the grid axes.
        grid_axes: axes to sum along; by default all that hold several copies.

    Raises:
        PartitionError: a grid axis does not exist, is named twice, or does not hold copies.

    Example:
        >>> Y = linop.TensorSpace((2,), linop.Partition(3), axes=[linop.COPIES])
        >>> A = linop.all_reduce(Y)
        >>> y = A(Y.vector({r.name: np.ones(2) for r in Y}))
        >>> [y[region.name].tolist() for region in Y]
        [[3.0, 3.0], [3.0, 3.0], [3.0, 3.0]]
        >>> A.H.equals(A)
        True
    """
    Y = expect("all_reduce", Y, TensorSpace)
    axes = copied_axes("all_reduce", Y, grid_axes)
    one = tuple(slice(0, 1) if k in axes else slice(None) for k in range(Y.partition.ndim))
    reduced = sum_reduce(Y, Y.partition[one])
    spread = broadcast(reduced.codomain, Y.partition)
    return compose(spread, reduced)


@records_origin
def all_gather(
    X: TensorSpace, grid_axes: int | Sequence[int] | None = None, into: Axis = COPIES
) -> TensorOperator:
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

    Example:
        >>> X = linop.TensorSpace((4,), linop.Partition(2))
        >>> G = linop.all_gather(X)
        >>> y = G(X.scatter(np.arange(4.0)))
        >>> [y[region.name].tolist() for region in G.codomain]
        [[0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0, 3.0]]
        >>> G.H.equals(linop.reduce_scatter(G.codomain))
        True
        >>> linop.all_gather(X, into=linop.REPLICATED).H.cost().messages
        0
    """
    X = expect("all_gather", X, TensorSpace)
    split = [k for k, axis in enumerate(X.axes) if isinstance(axis, int)]
    axes = split if grid_axes is None else grid_axes_of("all_gather", X, grid_axes)
    for k in axes:
        if k not in split:
            raise PartitionError(
                f"all_gather: grid axis {k} splits nothing: {role_text(X.axes[k])}"
            )
    if into not in (COPIES, REPLICATED):
        raise ArgumentError(f"all_gather: into is COPIES or REPLICATED; given {into!r}")
    roles = [into if k in axes else axis for k, axis in enumerate(X.axes)]
    kept = {d: X.bounds[d] for d in range(X.ndim) if d in roles}
    Y = X.like(X.partition, roles, kept)
    return collective("G", axes_text(axes), X, Y, along(X, axes))


@records_origin
def reduce_scatter(
    Y: TensorSpace,
    grid_axes: int | Sequence[int] | None = None,
    dims: int | Sequence[int] | None = None,
) -> TensorOperator:
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

    Example:
        >>> Y = linop.TensorSpace((4,), linop.Partition(2), axes=[linop.COPIES])
        >>> RS = linop.reduce_scatter(Y)
        >>> y = RS(Y.vector({r.name: np.arange(4.0) for r in Y}))
        >>> [y[region.name].tolist() for region in RS.codomain]
        [[0.0, 2.0], [4.0, 6.0]]
    """
    Y = expect("reduce_scatter", Y, TensorSpace)
    axes = copied_axes("reduce_scatter", Y, grid_axes)
    into = axes if dims is None else naturals(dims, "dims of reduce_scatter")
    if len(into) != len(axes):
        raise ArgumentError(f"reduce_scatter: {len(into)} dims for {len(axes)} grid axes")
    roles: list[Axis] = list(Y.axes)
    for k, d in zip(axes, into, strict=True):
        roles[k] = d
    kept = {d: Y.bounds[d] for d in range(Y.ndim) if d in Y.axes}
    X = Y.like(Y.partition, roles, kept)
    return collective("RS", axes_text(axes), Y, X, along(Y, axes))


@records_origin
def all_to_all(X: TensorSpace, grid_axis: int, dim: int) -> TensorOperator:
    """T: a global transpose. The tensor dimension that a grid axis splits becomes whole, and `dim`
    is split instead: a block permutation within each line of workers along the axis (paper,
    section 3).

    Args:
        X: blocks, where no grid axis splits `dim`.
        grid_axis: the axis, which splits a dimension.
        dim: the tensor dimension that it splits in the codomain.

    Raises:
        PartitionError: the grid axis does not exist, or splits no dimension.

    Example:
        >>> X = linop.TensorSpace((4, 6), linop.Partition(2))
        >>> T = linop.all_to_all(X, grid_axis=0, dim=1)
        >>> X.local_shape(0), T.codomain.local_shape(0)
        ((2, 6), (4, 3))
        >>> (T.H @ T).equals(linop.identity(X))
        True
    """
    X = expect("all_to_all", X, TensorSpace)
    (axis,), dim = grid_axes_of("all_to_all", X, grid_axis), integer(dim, "all_to_all: dim")
    if not isinstance(X.axes[axis], int):
        raise PartitionError(
            f"all_to_all: grid axis {axis} splits nothing: {role_text(X.axes[axis])}"
        )
    roles: list[Axis] = list(X.axes)
    roles[axis] = dim
    kept = {d: X.bounds[d] for d in range(X.ndim) if d in X.axes and d in roles and d != dim}
    Y = X.like(X.partition, roles, kept)
    return collective("T", f"{X.axes[axis]}→{dim}", X, Y, along(X, [axis]))


@records_origin
def repartition(X: TensorSpace, partition: Partition | TensorSpace) -> TensorOperator:
    """P: redistributes a global tensor to another block decomposition, on any workers.

    Args:
        X: blocks that do not overlap.
        partition: the new grid, whose axis k splits dimension k; or the codomain itself, a
            `TensorSpace` with any decomposition, copies and replicated axes included.

    Raises:
        PartitionError: the global shape or dtype differ, or an element of X is in several blocks,
            so that the one to send is ambiguous.

    Example:
        >>> X = linop.TensorSpace((4, 6), linop.Partition((2, 2)))
        >>> P = linop.repartition(X, linop.Partition((1, 3)))
        >>> [P.codomain.local_shape(worker) for worker in range(3)]
        [(4, 2), (4, 2), (4, 2)]
        >>> (P.H @ P).equals(linop.identity(X))
        True
    """
    X = expect("repartition", X, TensorSpace)
    Y = target_space("repartition", X, partition)
    return _regrouped("P", f"{X.partition}→{Y.partition}", X, Y)


@records_origin
def scatter(X: TensorSpace, partition: Partition | TensorSpace) -> TensorOperator:
    """Sc: from one worker that holds the whole tensor to blocks on many (paper, section 3).

    Args:
        X: the tensor, in one region on one worker.
        partition: the new grid, or the codomain, as for `repartition`.

    Raises:
        PartitionError: X is not on one worker, or the global shape or dtype differ.

    Example:
        >>> X = linop.TensorSpace((5,), linop.Partition(1))
        >>> Sc = linop.scatter(X, linop.Partition(2))
        >>> [region.shape for region in Sc.codomain]
        [(3,), (2,)]
        >>> Sc.H.equals(linop.gather(Sc.codomain))
        True
    """
    X = expect("scatter", X, TensorSpace)
    if len(X.regions) != 1 or X.regions[0].replicated:
        raise PartitionError(f"scatter: the tensor is on workers {X.workers}; expected one")
    Y = target_space("scatter", X, partition)
    return _regrouped("Sc", f"→{Y.partition}", X, Y)


@records_origin
def gather(X: TensorSpace, worker: int = 0) -> TensorOperator:
    """Ga: from blocks on many workers to the whole tensor on one; the adjoint of `scatter`.

    Args:
        X: blocks that do not overlap.
        worker: the worker that gets the tensor.

    Raises:
        PartitionError: an element of X is in several blocks.

    Example:
        >>> X = linop.TensorSpace((5,), linop.Partition(2))
        >>> Ga = linop.gather(X, worker=1)
        >>> Ga.codomain.workers, Ga.codomain.local_shape(1)
        ((1,), (5,))
        >>> (Ga.H @ Ga).equals(linop.identity(X))
        True
    """
    X = expect("gather", X, TensorSpace)
    Y = target_space("gather", X, Partition((1,) * X.ndim, [worker]))
    return _regrouped("Ga", f"→{worker}", X, Y)


@records_origin
def shift(X: TensorSpace, steps: int, grid_axis: int = 0, periodic: bool = True) -> TensorOperator:
    """Moves every block by some steps along a grid axis; a permutation of blocks if periodic.

    Args:
        X: blocks.
        steps: the distance in grid coordinates; blocks go to lower ones if it is negative.
        grid_axis: the grid axis, one that splits a dimension or holds copies.
        periodic: True if the axis closes to a ring. Otherwise blocks that leave the grid are
            dropped, and workers that receive none get zeros, in the shape of their own block.

    Raises:
        PartitionError: the grid axis does not exist, or is replicated.

    Example:
        >>> X = linop.TensorSpace((4,), linop.Partition(2))
        >>> y = linop.shift(X, 1)(X.scatter(np.arange(4.0)))
        >>> y[X.region(0).name].tolist(), y[X.region(1).name].tolist()
        ([2.0, 3.0], [0.0, 1.0])
        >>> linop.shift(X, 1).H.equals(linop.shift(X, -1))
        True
    """
    X = expect("shift", X, TensorSpace)
    steps = integer(steps, "shift: steps")
    (axis,) = grid_axes_of("shift", X, grid_axis)
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


def _regrouped(name: str, subscript: str, X: TensorSpace, Y: TensorSpace) -> TensorOperator:
    """Each block of Y assembled from all blocks of X that intersect it.

    Raises:
        PartitionError: an element of X is in several blocks.
    """
    if not is_disjoint(X):
        raise PartitionError(
            f"{X!r} holds elements more than once, so which to take is not said; sum_reduce copies "
            f"first, or name the blocks with send_recv"
        )
    return collective(name, subscript, X, Y)
