"""Vector updates that methods repeat: sums of multiples, with fewer temporaries than operators, and
in memory that a method has no use for any more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from linop.spaces.vector import Vector

_TILE = 32768
"""Elements that are updated at a time, so that products stay in a core's cache."""


def plus(y: Vector, a: Any, x: Vector, into: Vector | None = None) -> Vector:
    """y + a x; `a` is rounded to their dtype, elements that overflow are infinite.

    Args:
        into: y or x, whose memory the result takes: a vector that the caller made, and that nobody
            else reads any more. None for new memory.
    """
    dtype = y.space.dtype
    update = _plus if into is None else _added if into is y else _scaled_and_added
    with np.errstate(all="ignore"):
        factor = dtype.type(a if dtype.kind == "c" else a.real)
        arrays = {name: update(array, factor, x.arrays[name]) for name, array in y.arrays.items()}
    shared = None if y.shared is None else y.shared.derived("add a multiple", x.shared)
    return Vector(y.space, arrays, shared)


def _plus(y: Any, a: Any, x: Any) -> Any:
    result = np.multiply(x, a)
    result += y
    return np.asarray(result) if isinstance(result, np.generic) else result


def _added(y: Any, a: Any, x: Any) -> Any:
    """y + a x, in y."""
    if y.size <= _TILE or not (_flat(x) and _flat(y)):
        y += np.multiply(x, a)
        return y
    all_x, all_y = x.reshape(-1), y.reshape(-1)
    product = np.empty(_TILE, y.dtype)
    for begin in range(0, y.size, _TILE):
        part = all_y[begin : begin + _TILE]
        scaled = product[: part.size]
        np.multiply(all_x[begin : begin + _TILE], a, out=scaled)
        np.add(part, scaled, out=part)
    return y


def _scaled_and_added(y: Any, a: Any, x: Any) -> Any:
    """y + a x, in x."""
    if x.size <= _TILE or not (_flat(x) and _flat(y)):
        np.multiply(x, a, out=x)
        x += y
        return x
    all_x, all_y = x.reshape(-1), y.reshape(-1)
    for begin in range(0, x.size, _TILE):
        part = all_x[begin : begin + _TILE]
        np.multiply(part, a, out=part)
        np.add(part, all_y[begin : begin + _TILE], out=part)
    return x


def _flat(array: Any) -> bool:
    """True for a NumPy array whose elements follow one another."""
    return type(array) is np.ndarray and array.flags.c_contiguous


def times(a: Any, x: Vector) -> Vector:
    """a x, a new vector, rounded as by `plus`."""
    dtype = x.space.dtype
    with np.errstate(all="ignore"):
        factor = dtype.type(a if dtype.kind == "c" else a.real)
        arrays = {name: _times(array, factor) for name, array in x.arrays.items()}
    shared = None if x.shared is None else x.shared.derived("scale")
    return Vector(x.space, arrays, shared)


def _times(x: Any, a: Any) -> Any:
    result = np.multiply(x, a)
    return np.asarray(result) if isinstance(result, np.generic) else result


def combined(factors: Sequence[Any], vectors: Sequence[Vector]) -> Vector:
    """The sum of multiples of vectors, at least one, from the left to the right; rounded as by
    `plus`."""
    first, *others = vectors
    dtype = first.space.dtype
    with np.errstate(all="ignore"):
        rounded = [dtype.type(a if dtype.kind == "c" else a.real) for a in factors]
        arrays = {name: _times(array, rounded[0]) for name, array in first.arrays.items()}
        for factor, vector in zip(rounded[1:], others, strict=True):
            for name, total in arrays.items():
                total += np.multiply(vector.arrays[name], factor)
    names = [vector.shared for vector in others]
    shared = None if first.shared is None else first.shared.derived("combine", *names)
    return Vector(first.space, arrays, shared)
