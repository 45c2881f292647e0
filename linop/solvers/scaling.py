"""Units of a problem: powers of two that keep squares in the range of floating point."""

from __future__ import annotations

import math
from fractions import Fraction
from numbers import Real
from typing import Any

import numpy as np

from linop.errors import ArgumentError
from linop.spaces.finite import not_finite
from linop.spaces.vector import Vector


class ScaledProblem:
    """The problem in units in which squares of its vectors stay in the range of floating point: y
    and Op are divided by powers of two, by 1 in the usual case, so that rounding is not affected.

    Attributes:
        y, x0, damp: as given to `cgls`, in these units.
        start: Op* y.

    Raises:
        ArgumentError: y, x0 or Op* y is not finite; on every worker. Collective.
    """

    def __init__(self, Op: Any, y: Vector, x0: Vector | None, damp: float) -> None:
        self._op, self._adjoint = Op, Op.H
        self._power = _power(y, "the data y")
        if x0 is not None:
            _power(x0, "the initial guess x0")
        self.y = _times(y, -self._power)
        start = self._adjoint(self.y)
        self._gain = _power(start, "Op* y")
        self.start = _times(start, -self._gain)
        self.x0 = None if x0 is None else _times(x0, self._gain - self._power)
        with np.errstate(over="ignore"):
            self.damp = float(np.ldexp(damp, -self._gain))
        if not self.damp < 2.0**500:
            raise ArgumentError(
                f"cgls: damp={damp:g} is so much larger than Op that x is zero to rounding; scale "
                f"Op, or leave out the problem"
            )

    def forward(self, x: Vector) -> Vector:
        return _times(self._op(x), -self._gain)

    def backward(self, y: Vector) -> Vector:
        return _times(self._adjoint(y), -self._gain)

    def given(self, x: Vector) -> Vector:
        """A solution in the user's units."""
        return _times(x, self._power - self._gain)

    def residual(self, norm: float) -> float:
        """The norm of a residual in the user's units."""
        return float(np.ldexp(norm, self._power))

    def gradient(self, norm: float) -> float:
        """The norm of a gradient in the user's units."""
        return float(np.ldexp(norm, self._power + self._gain))


def real(name: str, value: Any, least: float = -math.inf) -> float:
    """A finite real number given as an argument.

    Raises:
        ArgumentError: it is none, or below `least`.
    """
    try:
        number = float(value) if isinstance(value, Real | np.floating | np.integer) else math.nan
    except OverflowError:  # of an int
        number = math.inf
    if not (math.isfinite(number) and value >= least):
        wanted = "a finite real number" + (" from 0" if least == 0 else "")
        raise ArgumentError(f"cgls: {name} is {wanted}; given {value!r:.40}")
    return number


def _power(vector: Vector, what: str) -> int:
    """The power of two by which a vector is divided: 0 unless its norm is very small or large.
    Collective.

    Raises:
        ArgumentError: the vector is not finite; on every worker.
    """
    norm = vector.norm()
    if not np.isfinite(norm):
        where = not_finite(vector) or "its norm is beyond floating point"
        raise ArgumentError(f"cgls: {what} is not finite: {where}")
    power = int(np.frexp(norm)[1])
    dtype = np.zeros((), vector.space.dtype).real.dtype
    most = _LARGEST.get(dtype.name, 256)
    return power if norm and abs(power) > most else 0


_LARGEST = {"float16": 4, "bfloat16": 32, "float32": 32}
"""Largest power of two of norms whose vectors are left in the user's units, by dtype; 256 for
others, since the numbers that are computed of norms are double precision: a quarter of the range.
"""


def _times(vector: Vector, power: int) -> Vector:
    """2**power times the vector, in two steps, since a dtype may not hold the factor."""
    if not power:
        return vector
    half = power // 2
    return vector * Fraction(2) ** half * Fraction(2) ** (power - half)
