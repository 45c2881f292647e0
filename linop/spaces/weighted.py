"""Inner products of spaces other than the Euclidean one: positive weights, and their base class.

An inner product is <v, w> = v^H G w, for a Hermitian positive definite G. Spaces own them
(``Space(…, inner=…)``). Those of operators, which these modules do not know, are in
`linop.operators.riesz`.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from linop.caching import cached_property
from linop.errors import ArgumentError, DTypeError, RegionError, ShapeError
from linop.spaces.inner_products import wide
from linop.spaces.region import Region
from linop.spaces.scalars import Array, of_dtype

if TYPE_CHECKING:
    from linop.spaces.space import Space
    from linop.spaces.vector import Vector


class InnerProduct(ABC):
    """The inner product <v, w> = v^H G w of a space.

    Example:
        >>> X = linop.TensorSpace((2,), linop.Partition(2), inner=np.array([1.0, 4.0]))
        >>> v = X.scatter(np.array([1.0, 1.0]))
        >>> isinstance(X.inner_product, linop.spaces.weighted.InnerProduct), v.inner(v)
        (True, 5.0)
        >>> A = linop.stencil(X, {1: 1.0})
        >>> A.to_matrix().toarray().tolist(), A.H.to_matrix().toarray().tolist()
        ([[0.0, 1.0], [0.0, 0.0]], [[0.0, 0.0], [0.25, 0.0]])
    """

    @property
    @abstractmethod
    def digest(self) -> bytes:
        """Equal on workers that were given the same."""

    @abstractmethod
    def fitted(self, space: Space) -> InnerProduct:
        """The inner product of a space, checked to fit it; raises where it does not."""

    @abstractmethod
    def agrees(self, space: Space, other: Space) -> bool:
        """True if it is that of `other`, too, which has the regions of its own space."""

    @abstractmethod
    def weighed(self, vector: Vector) -> Mapping[str, Array]:
        """The arrays of G v that are held here, in the precision of inner products or higher. May
        be collective for distributed vectors."""

    def with_dtype(self, dtype: np.dtype[Any]) -> InnerProduct | None:
        """The inner product of the same space of another dtype; None for the Euclidean one."""
        return None

    def in_memory(self) -> InnerProduct | None:
        """That of the same regions in another kind of memory; None for the Euclidean one."""
        return None

    def of_other_blocks(self) -> InnerProduct | None:
        """That of the same tensor in other blocks; None for the Euclidean one."""
        return None

    @abstractmethod
    def renamed(self, names: Mapping[str, str]) -> InnerProduct:
        """That of regions of other names, by the names that these have."""


class Diagonal(InnerProduct):
    """Positive weights: <v, w> = Σ conj(v_i) g_i w_i.

    Args:
        given: a number; or an array of the shape of the only region or of the global tensor; or
            numbers or arrays by region name.
    """

    def __init__(self, given: Any, checked: np.dtype[Any] | None = None) -> None:
        self.by_region = isinstance(given, Mapping)
        self.given: dict[str, Any] = dict(given) if self.by_region else {"": given}
        self._checked = checked
        """The dtype of arrays that were checked to be positive; None of users' arrays."""

    @cached_property
    def digest(self) -> bytes:
        found = hashlib.sha256(b"diagonal")
        for name in sorted(self.given):
            array = np.ascontiguousarray(self.given[name])
            found.update(repr((name, array.dtype.str, array.shape)).encode() + array.tobytes())
        return found.digest()

    def fitted(self, space: Space) -> Diagonal:
        real = np.zeros((), space.dtype).real.dtype
        if not self.by_region:
            array = self._positive("", real, "inner")
            shape = space.shape_of_weights
            if array.ndim and array.shape != shape:
                wanted = "numbers or arrays by region name" if shape is None else f"{shape}"
                raise ShapeError(
                    f"inner: weights of shape {array.shape} given, {wanted} expected, or one number"
                )
            return Diagonal(array, real)
        checked = {}
        for name in self.given:
            array = self._positive(name, real, f"inner, region {space[name].name!r}")
            if array.ndim and array.shape != space[name].shape:
                raise ShapeError(
                    f"inner: weights of shape {array.shape} given for region {name!r}, "
                    f"{space[name].shape} expected"
                )
            checked[name] = array
        if missing := [name for name in space.numbering.index if name not in checked]:
            raise RegionError(f"inner: weights of the regions {missing[:8]} are missing")
        return Diagonal(checked, real)

    def _positive(self, name: str, real: np.dtype[Any], what: str) -> Array:
        given = self.given[name]
        known = self._checked is not None and self._checked == real
        return given if known else _positive(given, real, what)

    def of(self, space: Space, region: Region) -> Array:
        """The weights of a region of its space, of the region's shape."""
        array = self.given[region.name if self.by_region else ""]
        if array.ndim and not self.by_region:
            array = array[space.index_of(region)]
        return np.broadcast_to(array, region.shape)

    def agrees(self, space: Space, other: Space) -> bool:
        inner = other.inner_product
        return isinstance(inner, Diagonal) and (
            self.digest == inner.digest
            or all(np.array_equal(self.of(space, r), inner.of(other, r)) for r in space.regions)
        )

    @property
    def number(self) -> float | None:
        """The weight of all elements if it was given as a number."""
        array = self.given.get("")
        return None if array is None or array.ndim else array[()]

    def weighed(self, vector: Vector) -> Mapping[str, Array]:
        space = vector.space
        return {n: _scaled(a, self.of(space, space[n])) for n, a in vector.arrays.items()}

    def with_dtype(self, dtype: np.dtype[Any]) -> InnerProduct | None:
        return None if dtype.kind in "iu" else self

    def in_memory(self) -> InnerProduct:
        return self

    def of_other_blocks(self) -> InnerProduct | None:
        return None if self.by_region else self

    def renamed(self, names: Mapping[str, str]) -> InnerProduct:
        if not self.by_region:
            return self
        given = {names.get(name, name): array for name, array in self.given.items()}
        return Diagonal(given, self._checked)

    def __str__(self) -> str:
        return "positive weights" if self.number is None else f"weight {self.number:.6g}"


class Joined(InnerProduct):
    """The inner product of a direct sum: the sum of those of its parts.

    Args:
        parts: spaces.
    """

    def __init__(self, parts: Sequence[Space]) -> None:
        self.parts = tuple(parts)

    @cached_property
    def digest(self) -> bytes:
        return hashlib.sha256(b"".join(part.digest for part in self.parts)).digest()

    def fitted(self, space: Space) -> Joined:
        return self

    def agrees(self, space: Space, other: Space) -> bool:
        inner = other.inner_product
        return isinstance(inner, Joined) and all(part in inner.parts for part in self.parts)

    def weighed(self, vector: Vector) -> Mapping[str, Array]:
        found: dict[str, Array] = {}
        for part in self.parts:
            own = vector.restricted(part)
            found |= own.arrays if part.inner_product is None else part.inner_product.weighed(own)
        return found

    def renamed(self, names: Mapping[str, str]) -> InnerProduct:
        raise not_renamed(names)

    def __str__(self) -> str:
        return "a direct sum's"


def joined(parts: Sequence[Space]) -> InnerProduct | None:
    """The inner product of the direct sum of spaces; None if all are Euclidean."""
    if all(part.inner_product is None for part in parts):
        return None
    if not all(
        part.inner_product is None or isinstance(part.inner_product, Diagonal) for part in parts
    ):
        return Joined(parts)
    return Diagonal(
        {
            region.name: np.ones((), np.zeros((), part.dtype).real.dtype)
            if part.inner_product is None
            else part.inner_product.of(part, region)  # type: ignore[attr-defined]
            for part in parts
            for region in part.regions
        }
    )


def inner_product_of(space: Space, given: Any) -> InnerProduct | None:
    """The inner product that a space is given: None, weights as `Diagonal` takes them, a `Vector`
    of them, or an `InnerProduct`.

    Raises:
        DTypeError: the dtype is an integer one, or the weights are complex.
        ArgumentError: weights are not positive and finite, or `given` is none of these.
        ShapeError, RegionError: weights do not fit the regions.
    """
    if given is None:
        return None
    if space.dtype.kind in "iu":
        raise DTypeError(
            f"inner: a floating dtype expected, given {space.dtype}: G has no inverse in whole "
            f"numbers"
        )
    if hasattr(given, "arrays") and hasattr(given, "space"):
        given.require_all("inner")
        given = given.arrays
    if hasattr(given, "codomain"):
        raise ArgumentError(
            f"inner: an operator alone has no inverse here; give "
            f"linop.inner_product(G, inverse), given {given!r}"
        )
    made = (given if isinstance(given, InnerProduct) else Diagonal(given)).fitted(space)
    if isinstance(made, Diagonal) and all((array == 1).all() for array in made.given.values()):
        return None  # the Euclidean one
    return made


def not_renamed(names: Mapping[str, str]) -> ArgumentError:
    """The error of regions that need other names, of a space with the inner product of an
    operator."""
    return ArgumentError(
        f"regions {[*names][:4]} need other names beside equal ones of other spaces, and the inner "
        f"product of their space is an operator's, which keeps them: name the regions of the "
        f"spaces differently"
    )


def _positive(values: Any, dtype: np.dtype[Any], what: str) -> Array:
    """Weights, rounded to a real dtype.

    Raises:
        ArgumentError: one is not positive and finite. DTypeError: they are no real numbers.
    """
    array = of_dtype(values, dtype, what)
    right = (array > 0) & np.isfinite(array)
    if not np.all(right):
        at = tuple(int(k) for k in np.argwhere(~right)[0])
        raise ArgumentError(
            f"{what}: positive and finite weights expected, given {array[at]} at {at}; in {dtype}"
        )
    array.flags.writeable = False
    return array


def _scaled(array: Array, weights: Array) -> Array:
    """An array, multiplied by weights in the precision of inner products."""
    array = wide(array)
    scaled: Array = array * np.asarray(weights, like=array)
    return scaled
