"""Vectors: elements of spaces, as arrays of the regions that a process holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from linop.errors import ArgumentError, RegionError, SpaceError, expect
from linop.spaces import showing
from linop.spaces.array_protocol import ArrayProtocol
from linop.spaces.comparison import Comparison, only_array
from linop.spaces.distributed import Asked, Distributed, Partials
from linop.spaces.inner_products import norm_of, sums_by_worker
from linop.spaces.scalars import Array, Scalar, is_scalar

if TYPE_CHECKING:
    from linop.spaces.space import Space


class Vector(ArrayProtocol):
    """An element of a space: one array for each region that this process holds.

    Supports ``v[name]``, `inner`, `norm`, `copy`, arithmetic with vectors and numbers, and NumPy's
    ufuncs, element by element (`ArrayProtocol`); ``v == w`` compares so, too, `equals` as a whole,
    so that vectors are not hashable. ``np.asarray(v)`` is the array of the only region.
    A vector made by a backend (``backend.vector``) holds one worker's regions, and its inner
    product sums over all workers: a collective call, of the same vectors on every worker.

    Args:
        shared: identity of a distributed vector; None if this process holds the whole vector.

    Example:
        >>> X = linop.TensorSpace((4,), linop.Partition(2))
        >>> v = X.scatter(np.array([1.0, 2.0, 3.0, 4.0]))
        >>> (2 * v - v).equals(v), float(v.inner(v))
        (True, 30.0)
        >>> v[X.region(1).name].tolist()
        [3.0, 4.0]
    """

    __slots__ = ("arrays", "shared", "space")

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
        return showing.vector_text(self)

    def _repr_html_(self) -> str:
        return showing.vector_html(self)

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
        """<self, other>, conjugate-linear in self; see `Space.inner`.

        Example:
            >>> V = linop.Space(linop.Region("a", 2), dtype=complex)
            >>> v, w = V.vector(np.array([1j, 0])), V.vector(np.array([2, 5 + 0j]))
            >>> v.inner(w) == -2j
            True
        """
        return self.space.inner(self, other)

    def norm(self) -> float:
        """The norm induced by the inner product; see `inner`. Squares that leave the range of
        floating point do no harm; a long double for long double.

        Example:
            >>> linop.Space(linop.Region("a", 2)).vector(np.array([3.0, 4.0])).norm()
            5.0
        """
        return norm_of(self._scaled_square, self.space.dtype)

    def _scaled_square(self, power: int) -> Scalar:
        """<w, w> of w = 2**power self."""
        if not power:
            return inners([(self, self)], "norm")[0]
        factor: Any = np.ldexp(np.ones((), self.space.dtype).real, power)
        with np.errstate(all="ignore"):
            scaled = self._map(f"scale by 2**{power}", lambda a: a * factor)
        return inners([(scaled, scaled)], "norm")[0]

    def restricted(self, space: Space) -> Vector:
        """The part of the vector in a space of some of its regions; it shares their arrays."""
        arrays = {name: array for name, array in self.arrays.items() if name in space}
        return Vector(space, arrays, self.shared and self.shared.derived("part"))

    def copy(self) -> Vector:
        """A vector with copies of all arrays."""
        return self._map("copy", lambda a: a.copy())

    def equals(self, other: Vector) -> bool:
        """True if both vectors are of one space and all their elements are equal, on all workers.
        NaN equals nothing. Collective for vectors made by a backend.

        Raises:
            ArgumentError: `other` is no vector. SpaceError: only some regions are held, without a
                backend.

        Example:
            >>> X = linop.TensorSpace((4,), linop.Partition(2))
            >>> v = X.scatter(np.arange(4.0))
            >>> v.equals(v.copy()), v.equals(2 * v)
            (True, False)
        """
        if self.space != expect("equals", other, Vector).space:
            return False

        def partials() -> Partials:
            for vector in (self, other) if self.shared is other.shared is None else ():
                vector.require_all("equals")
            counts: dict[int, Scalar] = {}
            for name, where in self._paired("equals", np.not_equal, other).items():
                for worker in self.space[name].workers:  # copies are compared where they are
                    counts[worker] = counts.get(worker, 0) + int(where.sum())
            return [counts]

        return summed(partials, "equals", [(self, other)])[0] == 0

    def _compared(self, other: object, compare: Callable[..., Array]) -> Any:
        if isinstance(other, np.ndarray):
            raise ArgumentError(
                "a vector compares with a vector or a number; compare the array of a region, "
                "v[name] == array, or make a vector, v == space.vector(array)"
            )
        if is_scalar(other):
            return Comparison(self.space, self._results(lambda a: compare(a, other)))
        if not isinstance(other, Vector):
            return NotImplemented
        return Comparison(self.space, self._paired("comparison", compare, other))

    def __eq__(self, other: object) -> Any:
        """Elementwise comparison with a vector of the space, or a number: a `Comparison`."""
        return self._compared(other, np.equal)

    def __ne__(self, other: object) -> Any:
        """Elementwise comparison; see ``==``."""
        return self._compared(other, np.not_equal)

    __hash__ = None  # type: ignore[assignment]

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        """The array of the only region: NumPy's functions take such a vector; see `only_array`."""
        return only_array(self.space, self.arrays, dtype, copy)

    def _results(self, f: Callable[..., Array], *others: Vector) -> dict[str, Array]:
        """The function's arrays of each region that is held here."""
        results = {n: f(a, *(o.arrays[n] for o in others)) for n, a in self.arrays.items()}
        # A ufunc returns a scalar for 0-d arrays.
        return {n: np.asarray(a) if isinstance(a, np.generic) else a for n, a in results.items()}

    def _paired(self, what: str, f: Callable[..., Array], *others: Vector) -> dict[str, Array]:
        """`_results` of several vectors, after a check that they fit.

        Raises:
            SpaceError: they are of different spaces, or hold different regions.
        """
        for other in others:
            self.space.same_as(other.space, what)
            if other.arrays.keys() != self.arrays.keys():
                raise SpaceError(
                    f"{what}: one side holds {list(self.arrays)}, the other {list(other.arrays)}"
                    f"{_mixed(self, other)}"
                )
        return self._results(f, *others)

    def _map(
        self, what: str, f: Callable[..., Array], *others: Vector, dtype: Any = None
    ) -> Vector:
        """The vector of a function's arrays; of another dtype in the space of that dtype."""
        whose = [v.shared for v in (self, *others)]
        first = next((one for one in whose if one is not None), None)
        shared = None if first is None else first.derived(what, *whose[1:])
        same = dtype is None or dtype == self.space.dtype
        space = self.space if same else self.space.with_dtype(dtype)
        return Vector(space, self._paired("vector arithmetic", f, *others), shared)


def _mixed(v: Vector, w: Vector) -> str:
    """Advice for an error: one of two vectors is a worker's, the other one process's; else
    empty."""
    if (v.shared is None) == (w.shared is None):
        return ""
    return f"; one is made by a backend, for one worker, the other is not: {_MADE}"


_MADE = "backend.vector(space, v) keeps the regions of this worker"


def inners(
    pairs: Sequence[tuple[Vector, Vector]],
    what: str = "inner product",
    space: Space | None = None,
    own: Sequence[Scalar] = (),
) -> list[Scalar]:
    """Several inner products, each as by `Space.inner`; for distributed vectors in one collective
    call, in which all workers ask for the same.

    Args:
        what: the operation, for errors: other workers have to do the same.
        space: of all vectors; None for those of the left ones.
        own: numbers of this worker, whose sums over all workers follow the inner products.

    Raises:
        SpaceError: the vectors of a pair are in different spaces, or lack regions; or some pairs
            are distributed and others are not. BackendError: workers ask for products of different
            vectors. Of distributed vectors on every worker.
    """

    def partials() -> Partials:
        found: list[Mapping[int, Scalar]] = []
        for v, w in pairs:
            mine = v.space if space is None else space
            mine.same_as(expect(what, v, Vector).space, f"{what}, left side")
            mine.same_as(expect(what, w, Vector).space, f"{what}, right side")
            if v.shared is w.shared is None:
                v.require_all("an inner product")
                w.require_all("an inner product")
            found.append(v.space.partial_inners(v, w))
        if len({v.shared is w.shared is None for v, w in pairs}) > 1:
            raise SpaceError(f"{what} of vectors made by a backend, and of others: {_MADE}")
        return [*found, *map(_Own, own)]

    return summed(partials, what, pairs)


class _Own(dict[int, Scalar]):
    """A summand of this worker, whichever it is."""

    def __init__(self, number: Scalar) -> None:
        super().__init__({0: number})

    def get(self, worker: int, default: Any = None) -> Any:
        del worker, default
        return self[0]


def summed(
    partials: Callable[[], Partials], what: str, pairs: Sequence[tuple[Vector, Vector]]
) -> list[Scalar]:
    """Sums of partial numbers about pairs of vectors: over all workers if one is distributed."""
    whose = [(_shared(v), _shared(w)) for v, w in pairs]
    first = next((one for pair in whose for one in pair if one is not None), None)
    return sums_by_worker(partials()) if first is None else first.sums(partials, Asked(what, whose))


def _shared(given: object) -> Distributed | None:
    return given.shared if isinstance(given, Vector) else None
