"""The class of proximal maps, their conjugates, and functions of the arrays of a vector.

The maps themselves are in the modules beside this one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from numbers import Real
from typing import Any

import numpy as np

from linop.errors import ArgumentError, DTypeError, SpaceError, expect
from linop.solvers.updates import plus, times
from linop.spaces.scalars import Scalar
from linop.spaces.space import Space
from linop.spaces.vector import Vector, summed
from linop.spaces.weighted import Diagonal, InnerProduct

WEIGHTED = (type(None), Diagonal)
"""Inner products for which functions are defined that are sums over elements: each with the
weight of its element, as the sum that stands for an integral."""
ANY = (type(None), InnerProduct)


class ProximalMap(ABC):
    """A convex function f of vectors, with its proximal map (Parikh & Boyd, Proximal Algorithms,
    2014), in the norm of their space.

    A map is a pure function, of its arguments alone: it keeps nothing from one call to the next, so
    that several solvers may share one. A start near the result is an argument, and solvers, whose
    state it is a part of, give it.

    Example:
        A map has its proximal map, its value, and its conjugate:

        >>> X = linop.Space(linop.Region("x", (3,)))
        >>> f, v = linop.solvers.prox.l1(), X.vector(np.array([3.0, 0.5, -2.0]))
        >>> f.prox(v, 1.0)["x"].tolist(), f(v)
        ([2.0, 0.0, -1.0], 5.5)
        >>> f.conjugate().prox(v, 1.0)["x"].tolist()  # the rest: v is the sum of both
        [1.0, 0.5, -1.0]
    """

    name = "f"
    """Shown in messages."""

    def prox(self, v: Vector, step: float, start: Vector | None = None) -> Vector:
        """The minimizer x of f(x) + ‖x - v‖² / (2 step), a new vector of the space of v.

        Args:
            start: a vector near x, from which a map that `starts` begins to iterate, and on which
                its x depends within its tolerance; other maps do not look at it.

        Raises:
            ArgumentError: v or start is no `Vector`, or step no positive number. SpaceError: start
                is of another space. DTypeError: an integer dtype, or a complex one that f is not
                defined for.
        """
        self.check(v.space if isinstance(v, Vector) else expect(self.name, v, Vector).space)
        step = positive(f"{self.name}: step", step)
        if start is None or not self.starts:
            return self._prox(v, step)
        v.space.same_as(expect(f"{self.name}, start", start, Vector).space, f"{self.name}, start")
        return self._prox_from(v, step, start)

    def __call__(self, v: Vector) -> float:
        """f(v); infinity outside of its domain. Collective for vectors made by a backend.

        Raises:
            ArgumentError: v is no `Vector`, or f has no value (`conjugate`, `user` without one).
        """
        self.check(expect(self.name, v, Vector).space)
        return self.of_sum(summed(lambda: [self.partial(v)], f"value of {self.name}", [(v, v)])[0])

    def check(self, space: Space) -> None:
        """Check that f is defined on a space.

        Raises:
            DTypeError: an integer dtype. SpaceError: an inner product that f is not defined for.
        """
        inner = space.inner_product
        if not isinstance(inner, self.inner_products):
            raise SpaceError(
                f"{self.name}: its proximal map is not known for the inner product {inner} of this "
                f"space; take it in space.euclidean, or give your own by linop.solvers.prox.user"
            )
        if space.dtype.kind in "iu":
            raise DTypeError(
                f"{self.name}: a floating dtype is expected, given {space.dtype}: use a space of "
                f"dtype float64"
            )

    inner_products: tuple[type, ...] = (type(None),)
    """Classes of the inner products that f is defined for; NoneType is the Euclidean one."""

    has_value = True
    """False if f has a proximal map alone."""

    starts = False
    """True if its proximal map iterates, and begins at ``start``, if that is given."""

    @abstractmethod
    def _prox(self, v: Vector, step: float) -> Vector: ...

    def _prox_from(self, v: Vector, step: float, start: Vector) -> Vector:
        """As `_prox`, from a start; of maps that have `starts` alone."""
        raise NotImplementedError

    @abstractmethod
    def partial(self, v: Vector) -> dict[int, Scalar]:
        """Numbers by worker whose sum over all workers determines f(v)."""

    def of_sum(self, number: Scalar) -> float:
        """f(v), of the sum of `partial`."""
        return float(number.real)

    def conjugate(self) -> ProximalMap:
        """The convex conjugate f*(y) = sup Re <x, y> - f(x): its proximal map by Moreau's identity,
        prox(v, step) = v - step f.prox(v / step, 1 / step), from (v - start) / step. It has no
        value."""
        return _Conjugate(self)

    def __repr__(self) -> str:
        return self.name


class _Conjugate(ProximalMap):
    has_value = False

    def __init__(self, f: ProximalMap) -> None:
        self._f, self.name = f, f"{f.name}*"
        self.inner_products, self.starts = f.inner_products, f.starts

    def check(self, space: Space) -> None:
        self._f.check(space)

    def _prox(self, v: Vector, step: float) -> Vector:
        return plus(v, -step, self._f.prox(times(1 / step, v), 1 / step))

    def _prox_from(self, v: Vector, step: float, start: Vector) -> Vector:
        inner = times(1 / step, v - start)
        return plus(v, -step, self._f.prox(times(1 / step, v), 1 / step, inner))

    def partial(self, v: Vector) -> dict[int, Scalar]:
        raise no_value(self.name)

    def conjugate(self) -> ProximalMap:
        return self._f


def no_value(name: str) -> ArgumentError:
    """The error of a map whose value is asked for and unknown."""
    return ArgumentError(f"{name}: it has a proximal map and no value; ask for its prox(v, step)")


def positive(what: str, value: Any) -> float:
    """A positive finite number, given as an argument.

    Raises:
        ArgumentError: it is none.
    """
    number = float(value) if isinstance(value, Real | np.floating | np.integer) else math.nan
    if not (0 < number < math.inf):
        raise ArgumentError(f"{what}: a positive finite number expected, given {value!r}")
    return number


def mapped(what: str, f: Callable[..., Any], v: Vector, *others: Vector) -> Vector:
    """The vector of f(array, name) for each region that is held here, in the dtype of v.

    Args:
        what: the operation, the same on all workers.
        others: vectors that f reads.
    """
    arrays = {name: array_like(f(a, name), v.space.dtype) for name, a in v.arrays.items()}
    whose = v.shared and v.shared.derived(what, *(other.shared for other in others))
    return Vector(v.space, arrays, whose)


def array_like(result: Any, dtype: np.dtype[Any]) -> Any:
    """The array of a ufunc's result, which is a scalar for arrays without dimensions."""
    made = result.astype(dtype, copy=False)
    return np.asarray(made) if isinstance(made, np.generic) else made


def counted(f: Callable[..., Any], v: Vector) -> dict[int, Scalar]:
    """The sum of f(array, name) over the regions held here, by worker; a replicated region counts
    for the first of its workers."""
    found: dict[int, Scalar] = {}
    for name, array in v.arrays.items():
        worker = v.space[name].workers[0]
        found[worker] = found.get(worker, 0) + float(f(array, name))
    return found


def total(array: Any) -> Any:
    """The sum of real numbers, in double precision at least."""
    return array.sum(dtype=np.result_type(array.dtype, np.float64))
