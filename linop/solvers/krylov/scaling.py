"""Units of a problem: powers of two that keep squares in the range of floating point."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np

from linop.errors import ArgumentError
from linop.solvers.iteration import Reductions
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

    def __init__(
        self, Op: Any, y: Vector, x0: Vector | None, damp: float, reductions: Reductions
    ) -> None:
        self._op, self._adjoint = Op, Op.H
        self._power = power_of(y, reductions.norm(y, "the data y"))
        if x0 is not None:
            reductions.norm(x0, "the initial guess x0")
        self.y = times_power(y, -self._power)
        start = self._adjoint(self.y)
        self._gain = power_of(start, reductions.norm(start, "Op* y"))
        self.start = times_power(start, -self._gain)
        self.x0 = None if x0 is None else times_power(x0, self._gain - self._power)
        with np.errstate(over="ignore"):
            self.damp = float(np.ldexp(damp, -self._gain))
        if not self.damp < 2.0**500:
            raise ArgumentError(
                f"cgls: damp={damp:g} is so much larger than Op that x is zero to rounding; scale "
                f"Op, or leave out the problem"
            )

    def forward(self, x: Vector) -> Vector:
        return times_power(self._op(x), -self._gain)

    def backward(self, y: Vector) -> Vector:
        return times_power(self._adjoint(y), -self._gain)

    def given(self, x: Vector) -> Vector:
        """A solution in the user's units."""
        return times_power(x, self._power - self._gain)

    def residual(self, norm: float) -> float:
        """The norm of a residual in the user's units."""
        return float(np.ldexp(norm, self._power))

    def gradient(self, norm: float) -> float:
        """The norm of a gradient in the user's units."""
        return float(np.ldexp(norm, self._power + self._gain))


def power_of(vector: Vector, norm: float) -> int:
    """The power of two by which a vector of this norm is divided: 0 unless it is very small or
    large."""
    power = int(np.frexp(norm)[1])
    dtype = np.zeros((), vector.space.dtype).real.dtype
    most = _LARGEST.get(dtype.name, 256)
    return power if norm and abs(power) > most else 0


_LARGEST = {"float16": 4, "bfloat16": 32, "float32": 32}
"""Largest power of two of norms whose vectors are left in the user's units, by dtype; 256 for
others, since the numbers that are computed of norms are double precision: a quarter of the range.
"""


def times_power(vector: Vector, power: int) -> Vector:
    """2**power times the vector, in two steps, since a dtype may not hold the factor."""
    if not power:
        return vector
    half = power // 2
    return vector * Fraction(2) ** half * Fraction(2) ** (power - half)
