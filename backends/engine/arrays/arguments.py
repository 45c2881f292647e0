"""Users' arguments and ``out`` arrays of a bound plan: the regions that a worker holds, and the
validation of arrays for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from linop.backends.engine.arrays.interface import NUMPY, Arrays
from linop.backends.engine.arrays.overlap import near, overlaps_itself
from linop.errors import ArgumentError, LinopError, RegionError
from linop.spaces.region import Region
from linop.spaces.scalars import Array
from linop.spaces.space import Space
from linop.spaces.vector import Vector


def same_array(one: Array, other: Array) -> bool:
    """True if two arrays have the same address and form; not NumPy's: are the same object."""
    if one is other or not (isinstance(one, np.ndarray) and isinstance(other, np.ndarray)):
        return one is other
    form = (other.shape, other.strides, other.dtype)
    return one.ctypes.data == other.ctypes.data and (one.shape, one.strides, one.dtype) == form


class Unfit:
    """An argument that could not be converted to arrays: the plan raises its error on every
    worker."""

    def __init__(self, error: LinopError) -> None:
        self.error = error


def held(space: Space, worker: int | None) -> Sequence[Region]:
    """The regions of a space that a worker holds; all regions for None."""
    return space.regions if worker is None else space.on(worker)


def held_arrays(
    space: Space, worker: int | None, x: Any, arrays: Arrays = NUMPY
) -> dict[str, Array]:
    """Arrays by region name, for the regions held here, from a user's argument.

    Raises:
        ArgumentError, RegionError, ShapeError, DTypeError: the argument does not fit; the message
            states what was expected.
    """
    if isinstance(x, Unfit):
        raise x.error
    regions = held(space, worker)
    me = "this process" if worker is None else f"worker {worker}"
    if isinstance(x, Vector):
        space.same_as(x.space, f"argument on {me}")
        x = x.arrays
    if isinstance(x, Mapping):
        missing = [r.name for r in regions if r.name not in x]
        for name in x:
            space[name]
        if missing:
            raise RegionError(
                f"{me}: no array for the regions {missing}; it holds {_list(regions)}"
            )
        given = {r.name: x[r.name] for r in regions}
    elif not regions:
        if x is not None and np.size(x):
            raise ArgumentError(f"{me} holds no region here; pass None, not an array")
        given = {}
    elif len(regions) > 1 or x is None:
        what = "None" if x is None else f"a bare {type(x).__name__}"
        mend = f": give {space.several}" if len(regions) > 1 else ""
        raise ArgumentError(f"{me}: {what} given; it holds {_list(regions)}{mend}")
    else:
        given = {regions[0].name: x}
    if not arrays.asynchronous:
        return {r.name: space.check(r, given[r.name], arrays.ndarray) for r in regions}
    return {r.name: space.check(r, given[r.name], arrays.of(r.memory).ndarray) for r in regions}


def out_arrays(
    space: Space,
    worker: int | None,
    out: Any,
    given: Mapping[str, Array],
    kind: Arrays = NUMPY,
) -> list[Array]:
    """The arrays passed as ``out``, validated, in the order of the regions held here.

    Args:
        given: the argument's arrays, by region. That of a region may be the one passed for the same
            region; otherwise they share no memory.
        kind: array module of the backend.

    Raises:
        ArgumentError, RegionError, ShapeError, DTypeError: they do not fit, are read-only, or share
            memory with the argument, with each other, or among their own elements.
    """
    arrays = list(held_arrays(space, worker, out, kind).values())
    passed = list(out.arrays.values() if isinstance(out, Vector) else _values(out))
    for one in passed:
        if not isinstance(one, kind.ndarray | kind.of("host").ndarray):
            wanted = f"{kind.name}.ndarray"
            raise ArgumentError(f"out: {type(one).__name__} given, {wanted} expected")
    for region, array in zip(held(space, worker), arrays, strict=True):
        if not kind.writeable(array):
            raise ArgumentError(f"out, region {region.name!r}: the array is read-only")
        if overlaps_itself(array):
            raise ArgumentError(
                f"out, region {region.name!r}: elements of the array share memory with each other "
                f"(shape {array.shape}, strides {array.strides}); pass one with memory for each "
                f"element, such as np.empty({array.shape}, {array.dtype.name!r})"
            )
    names = [region.name for region in held(space, worker)]
    everything = [*arrays, *given.values()]
    owners = [*names, *given]
    for pair in near(everything):
        k, other = sorted(pair)
        if k >= len(arrays):
            continue  # both are the argument's
        one, two = everything[k], everything[other]
        own = other >= len(arrays) and owners[other] == owners[k]
        if not (own and same_array(two, one)) and kind.may_share_memory(one, two):
            raise ArgumentError(
                f"out, region {owners[k]!r}: the array shares memory with the argument, or with "
                f"another, without being the one that was given for this region; pass that one, "
                f"or memory of its own"
            )
    return arrays


def _values(out: Any) -> Sequence[Any]:
    return list(out.values()) if isinstance(out, Mapping) else [out]


def written(
    regions: Sequence[Region],
    results: Sequence[Array],
    outs: Sequence[Array],
    arrays: Arrays = NUMPY,
) -> Sequence[Array]:
    """Copy results to the ``out`` arrays, and return these."""
    for region, result, out in zip(regions, results, outs, strict=True):
        arrays.of(region.memory).copyto(out, result)
    return outs


def _list(regions: Sequence[Region]) -> str:
    return ", ".join(f"{r.name!r} of shape {r.shape}" for r in regions)
