"""Proximal maps that act on each element by itself: without messages, and the same bits on any
number of workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from linop.errors import ArgumentError, DTypeError, ShapeError
from linop.solvers.prox.maps import (
    ANY,
    WEIGHTED,
    ProximalMap,
    counted,
    mapped,
    no_value,
    positive,
)
from linop.solvers.updates import TILE, flat, sum_of_moduli
from linop.spaces.scalars import Scalar
from linop.spaces.space import Space
from linop.spaces.vector import Vector

Bound = float | Vector | None


def l1(sigma: float = 1.0) -> ProximalMap:
    """sigma ‖x‖₁: its proximal map is soft thresholding, which of a complex number keeps the phase.
    In a space of weights g it is ``sigma Σ g_i |x_i|``, with the same proximal map.

    Raises:
        ArgumentError: sigma is not positive.

    Example:
        >>> X = linop.Space(linop.Region("x", (3,)))
        >>> v = X.vector(np.array([3.0, 0.5, -2.0]))
        >>> linop.solvers.prox.l1(1.0).prox(v, 1.0)["x"].tolist()  # nearer to 0 by 1
        [2.0, 0.0, -1.0]
    """
    return _L1(positive("l1: sigma", sigma))


class _L1(ProximalMap):
    inner_products = WEIGHTED

    def __init__(self, sigma: float) -> None:
        self._sigma, self.name = sigma, f"l1({sigma:g})"

    def _prox(self, v: Vector, step: float) -> Vector:
        return mapped("soft threshold", lambda a, name: soft(a, self._sigma * step), v)

    def partial(self, v: Vector) -> dict[int, Scalar]:
        inner = v.space.inner_product
        arrays = v.arrays if inner is None else inner.weighed(v)
        return counted(lambda a, name: sum_of_moduli(arrays[name]), v)

    def of_sum(self, number: Scalar) -> float:
        return self._sigma * super().of_sum(number)


def soft(a: Any, least: float) -> Any:
    """Numbers whose moduli are smaller by `least`, or zero."""
    if a.dtype.kind == "c":
        return a * shrinkage(np.abs(a), least)
    if a.size <= TILE or not flat(a):
        return a - np.clip(a, -least, least)
    made = np.empty_like(a)
    given, parts = a.reshape(-1), made.reshape(-1)
    for begin in range(0, a.size, TILE):  # in a core's cache
        own, part = given[begin : begin + TILE], parts[begin : begin + TILE]
        np.maximum(own, -least, out=part)
        np.minimum(part, least, out=part)
        np.subtract(own, part, out=part)
    return made


def shrinkage(moduli: Any, least: float) -> Any:
    """max(1 - least / modulus, 0); zero where the modulus is at most `least`."""
    left = np.maximum(moduli - least, 0)
    return left / np.where(left > 0, moduli, 1)


def box(lower: Bound = None, upper: Bound = None) -> ProximalMap:
    """The indicator of lower <= x <= upper: 0 inside, infinity outside; its proximal map is the
    projection. On real spaces only.

    Args:
        lower, upper: numbers, or vectors made as the arguments are; None for no bound.

    Raises:
        ArgumentError: a bound is neither, or NaN, or lower is above upper.

    Example:
        >>> X = linop.Space(linop.Region("x", (3,)))
        >>> v = X.vector(np.array([3.0, 0.5, -2.0]))
        >>> nonnegative = linop.solvers.prox.box(lower=0)
        >>> nonnegative.prox(v, 1.0)["x"].tolist(), nonnegative(v)
        ([3.0, 0.5, 0.0], inf)
    """
    for name, bound in (("lower", lower), ("upper", upper)):
        number = isinstance(bound, int | float | np.integer | np.floating)
        if not (bound is None or isinstance(bound, Vector) or (number and bound == bound)):
            raise ArgumentError(f"box: {name} is a real number or a Vector; given {bound!r}")
    numbers = not any(one is None or isinstance(one, Vector) for one in (lower, upper))
    if numbers and lower > upper:  # type: ignore[operator]
        raise ArgumentError(f"box: lower is at most upper; given {lower} and {upper}")
    return _Box(lower, upper)


class _Box(ProximalMap):
    name = "box"
    inner_products = WEIGHTED

    def __init__(self, lower: Bound, upper: Bound) -> None:
        self._bounds = lower, upper

    def check(self, space: Space) -> None:
        super().check(space)
        if space.dtype.kind == "c":
            raise DTypeError(f"box: complex numbers are not ordered; given {space.dtype}")
        for bound in self._bounds:
            if isinstance(bound, Vector):
                space.same_as(bound.space, "box, a bound")

    def _limits(self, name: str) -> list[Any]:
        return [bound[name] if isinstance(bound, Vector) else bound for bound in self._bounds]

    def _prox(self, v: Vector, step: float) -> Vector:
        vectors = [bound for bound in self._bounds if isinstance(bound, Vector)]
        return mapped("box", lambda a, name: _clip(a, *self._limits(name)), v, *vectors)

    def partial(self, v: Vector) -> dict[int, Scalar]:
        def outside(a: Any, name: str) -> int:
            lower, upper = self._limits(name)
            above = True if lower is None else a >= lower
            below = True if upper is None else a <= upper
            return int((~np.broadcast_to(np.logical_and(above, below), a.shape)).sum())

        return counted(outside, v)

    def of_sum(self, number: Scalar) -> float:
        return float("inf") if number else 0.0


def _clip(a: Any, lower: Any, upper: Any) -> Any:
    low = a if lower is None else np.maximum(a, lower)
    return low.copy() if upper is None else np.minimum(low, upper)


def user(
    prox: Callable[[Any, float], Any],
    value: Callable[[Any], float] | None = None,
    name: str = "user",
) -> ProximalMap:
    """A proximal map of your own that acts within each region, as one element by element does. It
    is that of the vectors' inner product, if this is not the Euclidean one.

    Args:
        prox: function of an array and a step; returns an array of the same shape, and leaves its
            argument as it is.
        value: function of an array; the values of all regions are added. None if it is not known.
        name: for messages; the same on all workers.

    Raises:
        ArgumentError: one is no function.

    Example:
        The nearest vector of whole numbers, whose set has the value 0:

        >>> whole = linop.solvers.prox.user(lambda a, step: np.round(a), lambda a: 0.0)
        >>> X = linop.TensorSpace((4,), linop.Partition((2,)))
        >>> v = X.scatter(np.array([0.2, 1.8, 3.4, -1.1]))
        >>> X.gather(whole.prox(v, 1.0)).tolist()
        [0.0, 2.0, 3.0, -1.0]
    """
    if not (callable(prox) and (value is None or callable(value))):
        raise ArgumentError(
            f"user: functions expected: prox(array, step), value(array) or None; given {prox!r}, "
            f"{value!r}"
        )
    return _User(prox, value, name)


class _User(ProximalMap):
    inner_products = ANY

    def __init__(
        self, prox: Callable[[Any, float], Any], value: Callable[[Any], float] | None, name: str
    ) -> None:
        self._of_array, self._value, self.name = prox, value, name
        self.has_value = value is not None

    def _prox(self, v: Vector, step: float) -> Vector:
        return mapped(self.name, lambda a, name: self._checked(a, step), v)

    def _checked(self, a: Any, step: float) -> Any:
        result = self._of_array(a, step)
        if getattr(result, "shape", None) != a.shape:
            given = getattr(result, "shape", type(result).__name__)
            raise ShapeError(f"{self.name}: prox of an array of shape {a.shape} returned {given}")
        if result.dtype.kind == "c" != a.dtype.kind:
            raise DTypeError(f"{self.name}: prox of an array of {a.dtype} returned {result.dtype}")
        return result.copy() if np.may_share_memory(result, a) else result

    def partial(self, v: Vector) -> dict[int, Scalar]:
        if self._value is None:
            raise no_value(self.name)
        value = self._value
        return counted(lambda a, name: value(a), v)
