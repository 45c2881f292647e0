"""Grids of collectives: matching of two partitions, checks of grid axes, spaces on a new grid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from linop.errors import PartitionError, expect
from linop.spaces.blocks import axes_of_copies
from linop.spaces.decomposition import COPIES, Axis
from linop.spaces.partition import Partition
from linop.spaces.region import integer
from linop.spaces.tensor import TensorSpace


def oriented(X: TensorSpace, transpose: bool) -> tuple[Partition, tuple[Axis, ...]]:
    """The grid of X and the roles of its axes, reversed if `transpose`."""
    return (X.partition.T, X.axes[::-1]) if transpose else (X.partition, X.axes)


def matched_grids(
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


def roles_on(small: Partition, large: Partition, roles: Sequence[Axis]) -> tuple[Axis, ...]:
    """The roles of the larger grid's axes: `COPIES` where extents differ, else the given ones."""
    return tuple(
        role if m == n else COPIES
        for m, n, role in zip(small.shape, large.shape, roles, strict=True)
    )


def on_grid(
    X: TensorSpace, partition: Partition, roles: Sequence[Axis], transposed: bool
) -> TensorSpace:
    """The tensor of X on another grid. If `transposed`, the roles are those of the axes of the
    transposed grid, and are reversed."""
    axes = tuple(reversed(roles)) if transposed else tuple(roles)
    return X.like(partition, axes, {d: X.bounds[d] for d in range(X.ndim)})


def grid_axis_of(X: TensorSpace, k: int, transposed: bool) -> int:
    """The axis of X's grid that is axis k of that grid, or of its transpose if `transposed`."""
    ndim = X.partition.ndim
    return ndim - 1 - k % ndim if transposed else k % ndim


def target_space(what: str, X: TensorSpace, target: Any) -> TensorSpace:
    if isinstance(target, TensorSpace):
        if target.global_shape != X.global_shape or target.dtype != X.dtype:
            raise PartitionError(
                f"{what}: global shape {target.global_shape} and dtype {target.dtype} given, "
                f"{X.global_shape} and {X.dtype} expected"
            )
        return target
    grid = expect("partition", target, Partition)
    inner = X.inner_of_other_blocks
    return TensorSpace(X.global_shape, grid, X.dtype, name=X.name, memory=X.memory, inner=inner)


def grid_axes_of(what: str, X: TensorSpace, axes: Any) -> tuple[int, ...]:
    several = axes if np.ndim(axes) else (axes,)
    given = tuple(integer(k, f"{what}: grid axes") for k in several)
    ndim = X.partition.ndim
    if any(not -ndim <= k < ndim for k in given):
        raise PartitionError(f"{what}: grid axes {given} of {X.partition!r}, which has {ndim}")
    chosen = tuple(k % ndim for k in given)
    if len(set(chosen)) < len(chosen):
        raise PartitionError(f"{what}: grid axes {given} name an axis twice")
    return chosen


def copied_axes(what: str, Y: TensorSpace, axes: Any) -> tuple[int, ...]:
    if axes is None:
        return axes_of_copies(Y)
    chosen = grid_axes_of(what, Y, axes)
    for k in chosen:
        if Y.axes[k] is not COPIES:
            raise PartitionError(
                f"{what}: grid axis {k} does not hold independent copies: {role_text(Y.axes[k])}"
            )
    return chosen


def role_text(role: Axis) -> str:
    return f"it splits dimension {role}" if isinstance(role, int) else f"it is {role!r}"


def axes_text(axes: Sequence[int]) -> str:
    return ",".join(map(str, axes))
