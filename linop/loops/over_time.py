"""Spaces over time, of which every region has the time steps as its first dimension, and the
operator from such a space to the regions of single steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy

from linop.errors import ArgumentError, RegionError
from linop.local_operators.functions import local_operator
from linop.normal_form.maps import Function
from linop.operators.algebra import direct_sum
from linop.operators.memory import deallocate, move
from linop.operators.operator import LinearOperator
from linop.operators.simplification import in_order
from linop.spaces.array_modules import Namespace
from linop.spaces.direct_sums import DirectSumSpace, joined_space
from linop.spaces.region import Region, integer
from linop.spaces.scalars import Array
from linop.spaces.space import Space
from linop.spaces.tensor import TensorSpace


def steps(what: str, n: Any) -> int:
    """A number of time steps.

    Raises:
        ArgumentError: it is no whole number from 0.
    """
    number = integer(n, f"{what}, number of steps")
    if number < 0:
        raise ArgumentError(f"{what}: n is a whole number of steps from 0; given {number}")
    return number


def over_time(space: Space, n: int) -> Space:
    """The space of n vectors of a space, one for each time step: its regions have their names, and
    time is their first dimension, ``(n, *shape)``. A `TensorSpace` stays one, cut as it is."""
    if isinstance(space, DirectSumSpace):
        return DirectSumSpace([over_time(part, n) for part in space.parts])
    if isinstance(space, TensorSpace):
        return TensorSpace(
            (n, *space.global_shape),
            space.partition,
            space.dtype,
            [axis + 1 if isinstance(axis, int) else axis for axis in space.axes],
            space.name,
            bounds={d + 1: cuts for d, cuts in enumerate(space.bounds)},
            memory=space.memory,
        )
    return Space([_longer(region, n) for region in space], space.dtype)


def _longer(region: Region, n: int) -> Region:
    return Region(region.name, (n, *region.shape), region.workers, region.memory)


class Series(NamedTuple):
    """The vectors that a time step takes, or makes, over all steps.

    Attributes:
        space: of all steps, `over_time`.
        names: what the step calls each of its regions.
    """

    space: Space
    names: tuple[str, ...]

    def over_reals(self) -> Series:
        """The series of rows of real parts."""
        return Series(self.space.over_reals(), self.names)

    def at(self, k: int | str = "") -> Space:
        """The space of one step, its regions named as the step does, with a mark added."""
        regions = zip(self.space, self.names, strict=True)
        shapes = (Region(f"{m}{k}", r.shape[1:], r.workers, r.memory) for r, m in regions)
        return Space(shapes, self.space.dtype)

    def apart(self, n: int) -> LinearOperator:
        """The operator that takes the space of all steps apart, to the sum of those of the steps
        0, 1, …"""
        if not n:
            return deallocate(self.space, *self.space.regions)
        each = [self.at(k).regions for k in range(n)]
        made = zip(self.space, zip(*each, strict=True), strict=True)
        return direct_sum(
            *(_slabs(region, Space(slabs, self.space.dtype)) for region, slabs in made)
        )


NOTHING = Series(Space([]), ())


def series(space: Space, n: int, mark: str) -> Series:
    """The series of a space, whose regions the step calls by their names and a mark."""
    return Series(over_time(space, n), tuple(region.name + mark for region in space))


def beside(what: str, spaces: Sequence[Space]) -> Space:
    """The direct sum of state, parameters and a series, one side of a loop.

    Raises:
        RegionError: two of them have regions of one name.
    """
    names = [region.name for space in spaces for region in space]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise RegionError(
            f"{what}: state, parameters and signals (or records) have regions of one name, "
            f"{', '.join(twice[:4])}; give the sources' domain (the receivers' codomain) another "
            f"name, as by linop.repartition(X, TensorSpace(..., name='r'))"
        )
    return joined_space(spaces)


def renaming(space: Space, names: Sequence[str]) -> LinearOperator:
    """The identity from a space to that of the same regions under other names."""
    new = [Region(m, r.shape, r.workers, r.memory) for r, m in zip(space, names, strict=True)]
    moved = [move(Space(a, space.dtype), a, b) for a, b in zip(space, new, strict=True)]
    return in_order(direct_sum(*moved), space, Space(new, space.dtype))


def _slabs(region: Region, slabs: Space) -> LinearOperator:
    """The operator from a region over time to the regions of its steps."""
    names = [slab.name for slab in slabs]

    def port(namespace: Namespace) -> tuple[Function, Function]:
        def forward(x: Array) -> Any:
            parts = {name: x[k].copy() for k, name in enumerate(names)}
            return parts if len(parts) > 1 else parts[names[0]]

        def backward(y: Any) -> Array:
            stacked: Array = namespace.module.stack(
                [y[n] for n in names] if len(names) > 1 else [y]
            )
            return stacked

        return forward, backward

    def matrix() -> scipy.sparse.csr_array:
        return scipy.sparse.csr_array(scipy.sparse.eye_array(region.size, dtype=np.int8))

    return local_operator(Space(region, slabs.dtype), slabs, port, "t", matrix)
