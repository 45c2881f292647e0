"""Vectors: elements of spaces, as arrays of the regions that a process holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from linop.errors import RegionError, SpaceError, expect
from linop.spaces.distributed import Asked, Distributed, Partials
from linop.spaces.inner_products import sums_by_worker
from linop.spaces.scalars import Array, Scalar, factor_of, is_scalar, reciprocal

if TYPE_CHECKING:
    from linop.spaces.space import Space


class Vector:
    """An element of a space: one array for each region that this process holds.

    Supports ``v[name]``, ``v + w``, ``v - w``, ``2 * v``, ``v / 2``, `inner`, `norm`, `copy`.
    A vector made by a backend (``backend.vector``) holds one worker's regions, and its inner
    product sums over all workers: a collective call, of the same vectors on every worker.

    Args:
        shared: identity of a distributed vector; None if this process holds the whole vector.
    """

    __slots__ = ("arrays", "shared", "space")
    __array_ufunc__ = None  # numpy_scalar * vector calls __rmul__

    def __init__(
        self,
        space: Space,
        arrays: dict[str, Array],
        shared: Distributed | None = None,
    ) -> None:
        self.space = space
        self.arrays = arrays
        self.shared = shared

    def __getitem__(self, name: str) -> Array:
        try:
            return self.arrays[name]
        except (KeyError, TypeError):
            self.space[name]  # raises for an unknown name
            raise RegionError(
                f"region {name!r} is not held here; this process holds {list(self.arrays)}"
            ) from None

    def __contains__(self, name: object) -> bool:
        return name in self.arrays

    def __repr__(self) -> str:
        shown = ", ".join(f"{n}={a!r}" for n, a in self.arrays.items())
        return f"Vector({shown})"

    def require_all(self, what: str) -> None:
        """Check that the vector holds every region of its space.

        Raises:
            SpaceError: it holds some regions only, as on one worker of several.
        """
        if len(self.arrays) < len(self.space.regions):
            raise SpaceError(
                f"{what} needs all {len(self.space.regions)} regions, this vector holds "
                f"{list(self.arrays)}; for one worker's part backend.vector(space, arrays) makes "
                f"vectors whose inner products span all workers"
            )

    def inner(self, other: Vector) -> Scalar:
        """<self, other>, conjugate-linear in self; see `Space.inner`."""
        return self.space.inner(self, other)

    def norm(self) -> float:
        """The norm induced by the inner product; see `inner`."""
        return math.sqrt(abs(inners([(self, self)], "norm")[0]))

    def copy(self) -> Vector:
        """A vector with copies of all arrays."""
        return self._map("copy", lambda a: a.copy())

    def _map(self, what: str, f: Callable[..., Array], *others: Vector) -> Vector:
        for other in others:
            self.space.same_as(other.space, "vector arithmetic")
            if other.arrays.keys() != self.arrays.keys():
                raise SpaceError(
                    f"vector arithmetic: one side holds {list(self.arrays)}, "
                    f"the other {list(other.arrays)}"
                )
        whose = [v.shared for v in (self, *others)]
        first = next((one for one in whose if one is not None), None)
        shared = None if first is None else first.derived(what, *whose[1:])
        # A ufunc returns a scalar for 0-d arrays.
        results = {n: f(a, *(o.arrays[n] for o in others)) for n, a in self.arrays.items()}
        arrays = {n: np.asarray(a) if isinstance(a, np.generic) else a for n, a in results.items()}
        return Vector(self.space, arrays, shared)

    def _scale(self, scalar: Any) -> Vector:
        factor = factor_of(scalar, self.space.dtype)
        return self._map("scale", lambda a: np.multiply(a, factor))

    def __add__(self, other: Vector) -> Vector:
        return self._map("add", np.add, other) if isinstance(other, Vector) else NotImplemented

    def __sub__(self, other: Vector) -> Vector:
        return (
            self._map("subtract", np.subtract, other)
            if isinstance(other, Vector)
            else NotImplemented
        )

    def __mul__(self, scalar: Scalar) -> Vector:
        return self._scale(scalar) if is_scalar(scalar) else NotImplemented

    __rmul__ = __mul__

    def __truediv__(self, scalar: Scalar) -> Vector:
        if not is_scalar(scalar):
            return NotImplemented
        inverse, dtype = reciprocal(scalar), self.space.dtype
        if dtype.kind in "iu":
            return self._scale(inverse)
        factor_of(inverse, dtype)
        divisor = factor_of(scalar, dtype)
        return self._map("divide", lambda a: np.divide(a, divisor))

    def __neg__(self) -> Vector:
        return self._map("negate", np.negative)


def inners(
    pairs: Sequence[tuple[Vector, Vector]],
    what: str = "inner product",
    space: Space | None = None,
) -> list[Scalar]:
    """Several inner products, each as by `Space.inner`; for distributed vectors in one collective
    call, in which all workers ask for the same.

    Args:
        what: the operation, for errors: other workers have to do the same.
        space: of all vectors; None for those of the left ones.

    Raises:
        SpaceError: the vectors of a pair are in different spaces, or lack regions. BackendError:
            workers ask for products of different vectors. Of distributed vectors on every worker.
    """

    def partials() -> Partials:
        found = []
        for v, w in pairs:
            own = v.space if space is None else space
            own.same_as(expect(what, v, Vector).space, f"{what}, left side")
            own.same_as(expect(what, w, Vector).space, f"{what}, right side")
            if v.shared is w.shared is None:
                v.require_all("an inner product")
                w.require_all("an inner product")
            found.append(v.space.partial_inners(v, w))
        return found

    whose = [(_shared(v), _shared(w)) for v, w in pairs]
    first = next((one for pair in whose for one in pair if one is not None), None)
    return sums_by_worker(partials()) if first is None else first.sums(partials, Asked(what, whose))


def _shared(given: object) -> Distributed | None:
    return given.shared if isinstance(given, Vector) else None
