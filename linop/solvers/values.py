"""Numbers of workers that travel with inner products: values of functions, in the same collective
call. Also what `linop.solvers.iteration.run` reads of an operator, for methods that have none.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from functools import lru_cache
from typing import Any
from zlib import crc32

import numpy as np

from linop.errors import ArgumentError, DTypeError
from linop.solvers.iteration import Named
from linop.solvers.prox.maps import ProximalMap
from linop.spaces.region import Region
from linop.spaces.scalars import Scalar
from linop.spaces.space import Space
from linop.spaces.vector import Vector

_INFINITE = 2.0**1000
"""Stands for infinity, which inner products refuse."""


class Value:
    """The value of a sum of functions, f(v) + g(w) + …, as products that a method asks for.

    Args:
        terms: functions and their arguments; None for a function that is zero.

    Attributes:
        pairs: for `linop.solvers.iteration.Ask`; empty if a function has no value.
    """

    def __init__(self, *terms: tuple[ProximalMap | None, Vector]) -> None:
        self._terms = [(f, v) for f, v in terms if f is not None]
        self.known = all(f.has_value for f, _ in self._terms)
        self.pairs: list[Named] = []
        if self.known:
            self.pairs = [summed_by(f.name, v, f.partial(v)) for f, v in self._terms]

    def of(self, sums: list[Any]) -> float:
        """The value, of the products; infinity outside of the domain."""
        found = (f.of_sum(total(one)) for (f, _), one in zip(self._terms, sums, strict=True))
        return float(sum(found))


def summed_by(what: str, like: Vector, partial: Mapping[int, Scalar]) -> Named:
    """Two vectors whose inner product is the sum of numbers by worker; see `total`.

    Args:
        like: a vector of the program; numbers are of the first holders of its regions.
    """
    space = _of_workers(like.space, np.dtype(np.float64))
    values = {}
    for worker, number in partial.items():
        most = min(float(number.real), _INFINITE)
        values[f"worker {worker}"] = np.array([most])
    return (f"value of {what}", *_with_ones(space, values, like))


def total(found: float) -> float:
    """The sum of numbers, of the product of `summed_by`."""
    return math.inf if found >= _INFINITE / 2 else found


def same_on_all(like: Vector, number: float) -> list[Named]:
    """Products that show whether a number is the same on all workers; see `differs`."""
    space = _of_workers(like.space, np.dtype(np.int64))
    code = crc32(struct.pack("d", number)) >> 8  # squares of 24 bits are summed exactly
    held = {like.space[name].workers[0] for name in like.arrays}
    first = {f"worker {worker}": np.array([code]) for worker in sorted(held)}
    ones: Named = ("value", *_with_ones(space, {n: a * 0 + 1 for n, a in first.items()}, like))
    codes = _with_ones(space, first, like)
    return [ones, ("value", *codes), ("value", codes[0], codes[0])]


def differs(products: list[Any]) -> bool:
    """True if the numbers of `same_on_all` differ, by Cauchy and Schwarz."""
    count, codes, squares = (int(one) for one in products)
    return count * squares != codes**2


@lru_cache(maxsize=64)
def _of_workers(space: Space, dtype: np.dtype[Any]) -> Space:
    """A number for each worker that is the first holder of a region."""
    workers = sorted({region.workers[0] for region in space.regions})
    return Space([Region(f"worker {w}", 1, w) for w in workers], dtype)


def _with_ones(space: Space, values: dict[str, Any], like: Vector) -> tuple[Vector, Vector]:
    shared = like.shared and like.shared.derived("value")
    ones = {name: np.ones_like(array) for name, array in values.items()}
    return Vector(space, values, shared), Vector(space, ones, shared)


class Place:
    """The spaces and the backend of a vector, as those of an operator."""

    def __init__(self, like: Vector) -> None:
        self.domain = self.codomain = like.space
        # The sums of a worker's vectors are those of its backend.
        self.backend = getattr(getattr(like.shared, "sums", None), "__self__", None)


def first_guess(method: str, x0: Any) -> Vector:
    """The initial guess of a method without an operator.

    Raises:
        ArgumentError: it is no `Vector`. DTypeError: an integer dtype.
    """
    if not isinstance(x0, Vector):
        raise ArgumentError(
            f"{method}: x0 is a Vector, given {type(x0).__name__}; make one with X.vector(array) "
            f"or X.scatter(array) of a space X, on workers with backend.vector(X, array)"
        )
    if x0.space.dtype.kind in "iu":
        raise DTypeError(
            f"{method}: it divides, so a floating dtype is expected; given {x0.space.dtype}"
        )
    return x0


def map_or_none(method: str, name: str, f: Any, none: bool = True) -> Any:
    """A function with a proximal map, given as an argument; None for zero.

    Raises:
        ArgumentError: it is none.
    """
    if isinstance(f, ProximalMap) or (none and f is None):
        return f
    raise ArgumentError(
        f"{method}: {name} is a map of linop.solvers.prox, as prox.l1(0.1){' or None' * none}; "
        f"given {f!r:.60}"
    )
