"""Vector updates that methods repeat: sums of multiples, with fewer temporaries than operators, and
in memory that a method has no use for any more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from linop.operators.operator import LinearOperator
from linop.spaces.vector import Vector

TILE = 32768
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


def minus(y: Vector, x: Vector, into: Vector | None = None) -> Vector:
    """y - x; elements that overflow are infinite.

    Args:
        into: a vector of their space whose memory the result takes, one of them or another, which
            the caller made, and that nobody else reads any more. None for new memory.
    """
    with np.errstate(all="ignore"):
        arrays = {
            name: np.subtract(array, x.arrays[name], out=None if into is None else into[name])
            for name, array in y.arrays.items()
        }
    # A ufunc returns a scalar for 0-d arrays.
    arrays = {n: np.asarray(a) if isinstance(a, np.generic) else a for n, a in arrays.items()}
    shared = None if y.shared is None else y.shared.derived("subtract", x.shared)
    return Vector(y.space, arrays, shared)


def beyond(x: Vector, a: Any, last: Vector, into: Vector | None = None) -> Vector:
    """x + a (x - last), with the bits of `minus` and `plus`, in one pass over memory.

    Args:
        into: as for `minus`, but neither of the two.
    """
    dtype = x.space.dtype
    arrays = {}
    with np.errstate(all="ignore"):
        factor = dtype.type(a if dtype.kind == "c" else a.real)
        for name, array in x.arrays.items():
            room = np.empty_like(array) if into is None else into[name]
            arrays[name] = _beyond(array, factor, last.arrays[name], room)
    shared = None if x.shared is None else x.shared.derived("extrapolate", last.shared)
    return Vector(x.space, arrays, shared)


def _beyond(x: Any, a: Any, last: Any, into: Any) -> Any:
    if not (flat(x) and flat(last) and flat(into)):
        return _scaled_and_added(x, a, np.subtract(x, last, out=into))
    all_x, all_last, made = x.reshape(-1), last.reshape(-1), into.reshape(-1)
    for begin in range(0, x.size, TILE):
        own, part = all_x[begin : begin + TILE], made[begin : begin + TILE]
        np.subtract(own, all_last[begin : begin + TILE], out=part)
        np.multiply(part, a, out=part)
        np.add(part, own, out=part)
    return into


def makes_vectors(A: Any) -> bool:
    """True for an operator or a plan, whose results are memory of their own; of another function of
    vectors nobody knows."""
    return isinstance(getattr(A, "op", A), LinearOperator)


def sum_of_moduli(array: Any) -> Any:
    """The sum of absolute values, in double precision at least; tile by tile, without a temporary
    array of all."""
    wide = np.result_type(array.real.dtype, np.float64)
    if array.size <= TILE or not flat(array):
        return np.abs(array).sum(dtype=wide)
    line = array.reshape(-1)
    parts = (line[begin : begin + TILE] for begin in range(0, line.size, TILE))
    return sum(np.abs(part).sum(dtype=wide) for part in parts)


def _plus(y: Any, a: Any, x: Any) -> Any:
    result = np.multiply(x, a)
    result += y
    return np.asarray(result) if isinstance(result, np.generic) else result


def _added(y: Any, a: Any, x: Any) -> Any:
    """y + a x, in y."""
    if y.size <= TILE or not (flat(x) and flat(y)):
        y += np.multiply(x, a)
        return y
    all_x, all_y = x.reshape(-1), y.reshape(-1)
    product = np.empty(TILE, y.dtype)
    for begin in range(0, y.size, TILE):
        part = all_y[begin : begin + TILE]
        scaled = product[: part.size]
        np.multiply(all_x[begin : begin + TILE], a, out=scaled)
        np.add(part, scaled, out=part)
    return y


def _scaled_and_added(y: Any, a: Any, x: Any) -> Any:
    """y + a x, in x."""
    if x.size <= TILE or not (flat(x) and flat(y)):
        np.multiply(x, a, out=x)
        x += y
        return x
    all_x, all_y = x.reshape(-1), y.reshape(-1)
    for begin in range(0, x.size, TILE):
        part = all_x[begin : begin + TILE]
        np.multiply(part, a, out=part)
        np.add(part, all_y[begin : begin + TILE], out=part)
    return x


def flat(array: Any) -> bool:
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
