"""Vectors: elements of spaces, as arrays of the regions that a process holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from linop.errors import RegionError, SpaceError, expect
from linop.spaces.inner_products import sums_by_worker
from linop.spaces.scalars import Array, Scalar, factor_of, is_scalar, reciprocal

if TYPE_CHECKING:
    from linop.spaces.space import Space

Total = Callable[[Sequence[Mapping[int, Scalar]]], list[Scalar]]
"""Function that sums partial inner products, each a mapping by worker, over all workers."""


class Vector:
    """An element of a space: one array for each region that this process holds.

    Supports ``v[name]``, ``v + w``, ``v - w``, ``2 * v``, ``v / 2``, `inner`, `norm`, `copy`.
    A vector made by a backend (``backend.vector``) holds one worker's regions, and its inner
    product sums over all workers: a collective call.
    """

    __slots__ = ("_total", "arrays", "space")
    __array_ufunc__ = None  # numpy_scalar * vector calls __rmul__

    def __init__(
        self,
        space: Space,
        arrays: dict[str, Array],
        total: Total | None = None,
    ) -> None:
        self.space = space
        self.arrays = arrays
        self._total = total

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

    def total(self, other: Vector) -> Total:
        """The reduction of partial inner products over workers: a backend's, or a local sum."""
        distributed = self._total or other._total
        if distributed is not None:
            return distributed
        for vector in (self, other):
            vector.require_all("an inner product")
        return sums_by_worker

    def inner(self, other: Vector) -> Scalar:
        """<self, other>, conjugate-linear in self; see `Space.inner`."""
        return self.space.inner(self, expect("inner product", other, Vector))

    def norm(self) -> float:
        """The norm induced by the inner product; see `inner`."""
        return math.sqrt(abs(self.inner(self)))

    def copy(self) -> Vector:
        """A vector with copies of all arrays."""
        return self._map(lambda a: a.copy())

    def _map(self, f: Callable[..., Array], *others: Vector) -> Vector:
        for other in others:
            self.space.same_as(other.space, "vector arithmetic")
            if other.arrays.keys() != self.arrays.keys():
                raise SpaceError(
                    f"vector arithmetic: one side holds {list(self.arrays)}, "
                    f"the other {list(other.arrays)}"
                )
        total = next((v._total for v in (self, *others) if v._total), None)
        # A ufunc returns a scalar for 0-d arrays.
        results = {n: f(a, *(o.arrays[n] for o in others)) for n, a in self.arrays.items()}
        arrays = {n: np.asarray(a) if isinstance(a, np.generic) else a for n, a in results.items()}
        return Vector(self.space, arrays, total)

    def _scale(self, scalar: Any) -> Vector:
        factor = factor_of(scalar, self.space.dtype)
        return self._map(lambda a: np.multiply(a, factor))

    def __add__(self, other: Vector) -> Vector:
        return self._map(np.add, other) if isinstance(other, Vector) else NotImplemented

    def __sub__(self, other: Vector) -> Vector:
        return self._map(np.subtract, other) if isinstance(other, Vector) else NotImplemented

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
        return self._map(lambda a: np.divide(a, divisor))

    def __neg__(self) -> Vector:
        return self._map(np.negative)


def inners(pairs: Sequence[tuple[Vector, Vector]]) -> list[Scalar]:
    """Several inner products, each as by `Space.inner`; for distributed vectors in one collective
    call. All pairs have one dtype.

    Raises:
        SpaceError: the vectors of a pair are in different spaces.
    """
    partial = []
    for v, w in pairs:
        v.space.same_as(w.space, "inner product")
        partial.append(v.space.partial_inners(v, w))
    totals = [v.total(w) for v, w in pairs]
    return totals[0](partial) if pairs else []
