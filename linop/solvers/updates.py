"""Vector updates that methods repeat: sums of multiples, with fewer temporaries than operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from linop.spaces.vector import Vector


def plus(y: Vector, a: Any, x: Vector) -> Vector:
    """y + a x, a new vector; `a` is rounded to their dtype, elements that overflow are infinite."""
    dtype = y.space.dtype
    with np.errstate(all="ignore"):
        factor = dtype.type(a if dtype.kind == "c" else a.real)
        arrays = {name: _plus(array, factor, x.arrays[name]) for name, array in y.arrays.items()}
    shared = None if y.shared is None else y.shared.derived("add a multiple", x.shared)
    return Vector(y.space, arrays, shared)


def _plus(y: Any, a: Any, x: Any) -> Any:
    result = np.multiply(x, a)
    result += y
    return np.asarray(result) if isinstance(result, np.generic) else result


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
