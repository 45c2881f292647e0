"""Decompositions of a global tensor: the roles of grid axes, and the cuts of tensor dimensions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from itertools import accumulate

import numpy as np

from linop.errors import ArgumentError, PartitionError
from linop.spaces.partition import Partition, balanced
from linop.spaces.region import naturals


class Role(Enum):
    """Role of a grid axis that splits no tensor dimension."""

    COPIES = "copies"
    REPLICATED = "replicated"

    def __repr__(self) -> str:
        return self.name


COPIES = Role.COPIES
"""Role of a grid axis along which every worker has an independent copy."""

REPLICATED = Role.REPLICATED
"""Role of a grid axis along which blocks are replicated: identical copies that count once."""

Axis = int | Role
Bounds = tuple[tuple[int, int], ...]
"""Global (start, stop) of each block along a tensor dimension."""


def even(n: int, parts: int) -> Bounds:
    """Balanced blocks of n indices."""
    lengths = balanced(n, parts)
    return tuple((b - m, b) for b, m in zip(accumulate(lengths), lengths, strict=True))


def in_multiples(bounds: Bounds, n: int, factor: int) -> Bounds:
    """Blocks of a dimension of `n * factor` indices that begin and end at multiples of a factor,
    divided by it: those given, if they do, else balanced ones."""
    if factor and all(a % factor == 0 and b % factor == 0 for a, b in bounds):
        return tuple((a // factor, b // factor) for a, b in bounds)
    return even(n, len(bounds))


def checked_axes(
    axes: Sequence[Axis] | None, partition: Partition, shape: tuple[int, ...]
) -> tuple[Axis, ...]:
    """The role of each grid axis, checked; by default grid axis k splits dimension k.

    Args:
        shape: of the global tensor.

    Raises:
        PartitionError: they do not fit the grid or the tensor. ArgumentError: one is no role.
    """
    grid, ndim = partition.shape, len(shape)
    try:
        given = tuple(range(len(grid))) if axes is None else tuple(axes)
    except TypeError:
        raise ArgumentError(f"axes: expected one for each of {len(grid)}, given {axes!r}") from None
    if len(given) != len(grid):
        raise PartitionError(f"axes {given} for a grid of {len(grid)} axes; give one for each")
    checked: list[Axis] = []
    for k, axis in enumerate(given):
        if isinstance(axis, Role):
            checked.append(axis)
        elif isinstance(axis, int | np.integer):
            if not -ndim <= axis < ndim:
                raise PartitionError(
                    f"grid axis {k} of {partition!r} splits dimension {axis}, which a "
                    f"tensor of shape {shape} does not have; give axes="
                )
            checked.append(int(axis) % ndim)
        else:
            raise ArgumentError(f"axes: expected dimensions, COPIES or REPLICATED; given {axis!r}")
    split = [axis for axis in checked if isinstance(axis, int)]
    if len(set(split)) < len(split):
        raise PartitionError(f"axes {given}: two grid axes split the same tensor dimension")
    return tuple(checked)


def checked_bounds(
    shape: tuple[int, ...],
    counts: Sequence[int],
    sizes: Mapping[int, Sequence[int]],
    bounds: Mapping[int, Bounds],
) -> tuple[Bounds, ...]:
    """The bounds of the blocks along each dimension; balanced where neither is given.

    Args:
        shape: of the global tensor.
        counts: number of blocks along each dimension.
        sizes: block lengths, by dimension.
        bounds: global (start, stop) of blocks, by dimension.

    Raises:
        PartitionError: blocks do not fit the tensor or the grid.
    """
    for dim in (*sizes, *bounds):
        if dim not in range(len(shape)):
            raise PartitionError(f"no dimension {dim} in a tensor of shape {shape}")
    cuts = tuple(_cuts(d, n, counts[d], sizes, bounds) for d, n in enumerate(shape))
    for d, (found, count) in enumerate(zip(cuts, counts, strict=True)):
        if len(found) != count:
            raise PartitionError(f"{len(found)} blocks of dimension {d} for {count} grid points")
    return cuts


def _cuts(
    dim: int,
    n: int,
    count: int,
    sizes: Mapping[int, Sequence[int]],
    bounds: Mapping[int, Bounds],
) -> Bounds:
    if dim in bounds:
        what = f"bounds of dimension {dim}"
        pairs = [naturals(pair, what, PartitionError) for pair in bounds[dim]]
        if any(len(pair) != 2 for pair in pairs):
            raise PartitionError(f"{what}: (start, stop) of each block expected; given {pairs}")
        given = tuple((a, b) for a, b in pairs)
        if any(not 0 <= a <= b <= n for a, b in given):
            raise PartitionError(f"blocks {given} of dimension {dim} leave its extent {n}")
        return given
    lengths = balanced(n, count)
    if dim in sizes:
        lengths = naturals(sizes[dim], f"sizes of dimension {dim}", PartitionError)
        if sum(lengths) != n:
            raise PartitionError(f"blocks {lengths} of dimension {dim} do not sum to {n}")
    stops = accumulate(lengths)
    return tuple((b - m, b) for b, m in zip(stops, lengths, strict=True))
