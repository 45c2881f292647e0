"""Random trials: error measures and tolerances of the checks, and the loop that runs several trials
and reports the worst case. Vectors are drawn by `linop.testing.drawing`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from numbers import Real
from typing import Any

import numpy as np

from linop.errors import ArgumentError, UndecidableError
from linop.operators.operator import LinearOperator
from linop.spaces.float_formats import machine_epsilon
from linop.spaces.region import integer
from linop.spaces.vector import Vector
from linop.testing.cancellation import size_of_products, size_of_terms
from linop.testing.drawing import APART, bits_of, of_any_parity, random_scalar, random_vector
from linop.testing.localise import (
    discrepancy,
    inner,
    largest,
    not_zero,
    whole_numbers,
    wrong_column,
    wrong_entry,
    wrong_value,
)
from linop.testing.report import Report, Worst
from linop.testing.tested_maps.foreign import tested_map
from linop.testing.tested_maps.tested_map import (
    Fault,
    TestedMap,
    exponents,
    host_vector,
    rounding,
)
from linop.testing.tested_maps.whole import seen_as

Where = Callable[[], Worst]
"""Locates the worst case; collective."""


@dataclass
class Check:
    """A check of a map: the texts of its reports, its tolerance, and the loop over trials.

    Attributes:
        title, compared: see `Report.check` and `Report.compared`.
        call: the call that reproduces it, a format string with the backend as its field.
        F: the map.
        tolerance: the default one.

    Raises:
        ArgumentError: the given tolerance is no finite number from 0.
        UndecidableError: none is given, and the dtype has too few digits to show an error.
    """

    title: str
    compared: str
    call: str
    F: TestedMap
    tolerance: float
    given: float | None = None
    """The caller's tolerance, which replaces the default one; None if there is none."""

    def __post_init__(self) -> None:
        if self.given is None:
            self._check_precision()
            return
        if not (isinstance(self.given, Real) and 0 <= self.given < math.inf):
            raise ArgumentError(
                f"tolerance: {self.given!r} given, a relative error expected, 0 or more; None for "
                f"what rounding explains"
            )
        self.tolerance = float(self.given)

    def _check_precision(self) -> None:
        """Check that the default tolerance is not that of a dtype which can show nothing.

        Raises:
            UndecidableError: rounding in the dtype explains any error.
        """
        spaces = (self.F.domain, self.F.codomain)
        dtype = max((space.dtype for space in spaces), key=machine_epsilon)
        if self.tolerance >= 1 and machine_epsilon(dtype) >= 1 / 16:
            raise UndecidableError(
                f"{self.title} of {self.F.name}: rounding to {dtype} explains any error; check the "
                f"operator in a longer dtype, give a tolerance, or use check_dot_exact"
            )

    def tried(self, trial: Callable[[int], tuple[float, Where]], seed: int, trials: int) -> Report:
        """Run trials, and report the one with the largest error.

        Args:
            trial: returns the error for a seed, and a function that locates it.
            seed: of the first trial, from 0; each trial uses two consecutive seeds.
            trials: how many, at least 1.

        Raises:
            ArgumentError: seed or trials is no integer, or too small.
        """
        seed, trials = integer(seed, "seed"), integer(trials, "trials")
        if trials < 1 or seed < 0:
            raise ArgumentError(f"seed from 0 and trials from 1 expected, given {seed}, {trials}")
        most, which, where = 0.0, seed, None
        try:
            for which_now in range(seed, seed + 2 * trials, 2):
                error, found = trial(which_now)
                if error > most or (math.isnan(error) and not math.isnan(most)):
                    most, which, where = error, which_now, found
            worst = where() if where and not most <= self.tolerance else None
        except Fault as fault:
            most, which, worst = math.inf, which_now, fault.worst
        again = f"seed={seed}, trials={trials}" if worst is None else f"seed={which}, trials=1"
        return self.report(most, worst, f", {again}")

    def report(self, error: float, worst: Worst | None, seed: str = "") -> Report:
        name, backend = self.F.name, self.F.backend.name
        if self.given is not None:
            seed += f", tolerance={self.tolerance:g}"
        call = f"linop.testing.{self.call.format(repr(backend))[:-1]}{seed})"
        title = f"{self.title} on {backend}{self.F.said}"
        passed = worst is None
        return Report(title, name, passed, float(error), self.tolerance, self.compared, worst, call)


def dot_tolerance(op: LinearOperator | TestedMap) -> float:
    """Default tolerance of the dot-product test: `entry_tolerance`. It does not grow with the size,
    since rounding errors of random sign do not, relative to the norms; and inner products are
    summed in float64 at least. In half precision it is large, and `check_dot_exact` is sharper.

    Example:
        >>> X = linop.TensorSpace((4,), linop.Partition((2,)))  # of float64
        >>> linop.testing.dot_tolerance(linop.identity(X)) == 16 * 2.0**-52
        True
    """
    return entry_tolerance(op)


def entry_tolerance(op: LinearOperator | TestedMap) -> float:
    """Default tolerance of a matrix's entries: 16 machine epsilons of the coarser of the two
    dtypes; 0 for integers."""
    return 16 * max(machine_epsilon(space.dtype) for space in (op.domain, op.codomain))


def element_tolerance(F: TestedMap) -> float:
    """Default tolerance of a single element, relative to the largest one: a bound of the rounding
    errors of a sum of as many terms as the larger space has elements."""
    size = max(F.domain.size, F.codomain.size)
    return max(rounding(space.dtype, size) for space in (F.domain, F.codomain))


def adjoint_of(what: str, F: TestedMap, given: Any) -> TestedMap:
    """The map that a check tests as the adjoint of F: the given one, or by default ``F.H``.

    Args:
        what: the name of the check, for messages.

    Raises:
        ArgumentError: F has no adjoint, or `given` cannot be checked. Fault: its spaces differ.
    """
    if given is None:
        return F.H
    G = tested_map(what, given, F.backend)
    return seen_as(G, F.codomain, F.domain, not F.anonymous)


def dot_products(
    F: TestedMap,
    G: TestedMap,
    seed: int,
    exact: bool = False,
    other: str = "the conjugate transpose of the adjoint",
) -> tuple[float, Where]:
    """Error of the dot-product test, <F x, y> against <x, G y>, for one pair of random vectors:
    relative in floating point, modulo 2**bits in integer dtypes.

    If it passes, each map is also applied to the negated vector; this finds odd-symmetry errors,
    and maps that overwrite their last result.

    Args:
        exact: draw whole numbers, and return the absolute error.
        other: the name of G's conjugate transpose, for the report.

    Returns:
        The error, and a function that locates a wrong entry.

    Raises:
        Fault: F(-x) is not -F x, or G(-y) is not -G y.
        UndecidableError: `exact`, and a result is not exact (`whole_numbers`).
    """
    x = random_vector(F, F.domain, seed, whole=exact)
    y = random_vector(F, F.codomain, seed, 1, whole=exact)
    found = F(x), G(y)
    rounds = not exact and dot_tolerance(F) > 0
    power = _power_in_range(F, found) if rounds else 0
    forward, backward = found
    if power:
        forward, backward = F(_power(power) * x), G(_power(power) * y)
    scale = _finite(forward.norm() * y.norm(), x.norm() * backward.norm())
    for S, result in ((F, forward), (G, backward)) if exact else ():
        if why := whole_numbers(S, result, scale):
            raise UndecidableError(f"check_dot_exact of {F.name}: {why}; use check_adjoint")
    error = float(abs(discrepancy(F, inner(F, forward, y), inner(F, x, backward))))
    if rounds:

        def terms() -> Any:
            sizes = [largest(v, F.backend)[1] for v in (x, y)]
            size = max(size_of_products(F, *sizes), size_of_products(G, *reversed(sizes)))
            return np.ldexp(np.longdouble(size), power)

        error = float(error / _scale(error, scale, dot_tolerance(F), terms))
    if error <= dot_tolerance(F):
        _look_at_opposite(F, x, found[0])
        _look_at_opposite(G, y, found[1])
    if not error and bits_of(F, F.domain):
        error, x, y = _of_any_parity(F, G, seed)
    return error, lambda: wrong_entry(F, G, x, y, other)


def _of_any_parity(F: TestedMap, G: TestedMap, seed: int) -> tuple[float, Vector, Vector]:
    """The largest error of the dot-product test for all pairs of some vectors of whole numbers of
    any parity, and the pair. Where blocks are wrong by 2**(bits - 1), results differ by that times
    a sum of elements, and sums of an even number of odd ones are even.

    Args:
        seed: of the trial.
    """
    xs, ys = of_any_parity(F, F.domain, seed), of_any_parity(F, F.codomain, seed, 1)
    forward, backward = [F(x) for x in xs], [G(y) for y in ys]
    found = [
        (float(abs(discrepancy(F, inner(F, forward[i], y), inner(F, x, backward[k])))), x, y)
        for i, x in enumerate(xs)
        for k, y in enumerate(ys)
    ]
    return max(found, key=lambda one: one[0])


def _look_at_opposite(F: TestedMap, x: Vector, result: Vector) -> None:
    """Check that F(-x) is -F x, except in unsigned dtypes.

    Raises:
        Fault: it is not.
    """
    if F.domain.dtype.kind == "u":
        return
    error, where = _opposite(F, x, result)
    if not error <= element_tolerance(F):
        raise Fault(where())


def _opposite(F: TestedMap, x: Vector, result: Vector) -> tuple[float, Where]:
    """Error of F(-x) against -F x, which rounding does not affect."""
    names = f"the {F.role} function of -x", "the opposite of that of x"
    return difference(F, F(-x), -result, names, [])


def _power_in_range(F: TestedMap, found: tuple[Vector, Vector]) -> int:
    """The exponent of two by which x and y are to be scaled, so that elements of F x and G y, too
    small or too large to be squared, are neither; else 0."""
    most = max(largest(v, F.backend)[1] for v in found)
    low, high = max(_range(F)[0], _PRODUCTS[0]), min(_range(F)[1], _PRODUCTS[1])
    if not most or low / 2 < _log2(most) < high / 2:
        return 0
    lowest, highest = _range(F)
    return min(max(-round(_log2(most)), lowest + _MARGIN), highest - _MARGIN)


_PRODUCTS = exponents(np.dtype(np.float64))
"""(lowest, highest) exponent of two of inner products, which are summed in float64."""


def _log2(size: Any) -> float:
    return float(np.log2(size))


def _power(exponent: int) -> Any:
    """A power of two, also one beyond the range of Python's floats."""
    return Fraction(2) ** exponent


_MARGIN = 6
"""Distance, in powers of two, of scaled numbers from the ends of a dtype's range."""


def _range(F: TestedMap) -> tuple[int, int]:
    """(lowest, highest) exponent of two at which both dtypes of a map have full precision."""
    lows, highs = zip(*(exponents(space.dtype) for space in (F.domain, F.codomain)), strict=True)
    return max(lows), min(highs)


def linear(F: TestedMap, seed: int, exactly: bool = True) -> tuple[float, Where]:
    """Error of linearity at two random vectors, at the two halves of one, and at one negated and
    scaled by large and small powers of two; relative to the largest element. Infinite if F 0 is
    not 0.

    In spaces of few elements sums are tried at several pairs of vectors: a map that is linear on
    each of a few cones is likely to have a single pair, and its sum, in one of them.

    Args:
        exactly: where a tolerance of sums would hide all errors, those of signs and powers of two,
            which rounding does not affect, are infinite if they are larger than two roundings and
            F x has the same bits a second time.
    """
    if worst := not_zero(F):
        return math.inf, lambda: worst
    x, y = _pair(F, seed)
    once, other = F(x), F(y)
    found = [_added(F, x, once, y, other, seed), _halved(F, y, other, seed)]
    for k in range(1, _FEW // max(1, F.domain.size)):
        u, v = _pair(F, seed + APART * k)
        found.append(_added(F, u, F(u), v, F(v), seed + APART * k))
    again = difference(F, F(x), once, ("F x, the second time,", "F x, the first time,"), [])
    scaled = [] if F.domain.dtype.kind == "u" else [_opposite(F, x, once)]
    for power in _far(F, largest(once, F.backend)[1]):
        names = f"F(2**{power} x)", f"2**{power} F x"
        scaled.append(difference(F, F(_power(power) * x), _power(power) * once, names, []))
    if exactly and not again[0] and element_tolerance(F) > _COARSE:
        most = 2 * max(machine_epsilon(space.dtype) for space in (F.domain, F.codomain))
        scaled = [(math.inf if error > most else error, where) for error, where in scaled]
    return max([*found, again, *scaled], key=lambda one: one[0])


_COARSE = 0.01
"""Tolerance of an element from which on it hides errors of maps that are not linear."""
_FEW = 8
"""Pairs of vectors in a trial of linearity, times elements of the space; or one pair."""


def _pair(F: TestedMap, seed: int) -> tuple[Vector, Vector]:
    """Two vectors to be added; whole numbers of the second are of any parity, for carries."""
    return random_vector(F, F.domain, seed), random_vector(F, F.domain, seed, 1, even=True)


def _added(
    F: TestedMap, x: Vector, Fx: Vector, y: Vector, Fy: Vector, seed: int
) -> tuple[float, Where]:
    """Error of F(a x + y) against a F x + F y.

    Args:
        seed: of the scalar.
    """
    a = random_scalar(F, seed)
    both = F(a * x + y)
    sides = max(largest(v, F.backend)[1] for v in (a * x, y))
    names, terms = ("F(a x + y)", "a F x + F y"), [Fx * a, Fy]
    return difference(F, both, a * Fx + Fy, names, terms, lambda: size_of_terms(F, sides))


def _halved(F: TestedMap, y: Vector, Fy: Vector, seed: int) -> tuple[float, Where]:
    """Error of F z + F(y - z) against F y, where a random half of z's elements are those of y, and
    the others are zero: a map may be another one there."""
    space = F.domain
    coins = space._fill(seed, lambda rng, shape: rng.integers(0, 2, shape)).arrays
    images = []
    for side in (0, 1):
        parts = {name: array.copy() for name, array in y.arrays.items()}
        for name, array in parts.items():
            array[coins[name].real == side] = 0
        images.append(F(host_vector(space, parts, F.backend)))
    names = "F z + F(y - z), for z with some elements of y, and zeros,", "F y"
    size = largest(y, F.backend)[1]
    return difference(F, images[0] + images[1], Fy, names, images, lambda: size_of_terms(F, size))


def _far(F: TestedMap, most: Any) -> list[int]:
    """A small and a large exponent of two by which x and F x can be scaled without leaving the
    range of their dtypes; `most` is the largest element of F x."""
    low, high = _range(F)
    here = _log2(most) if most else 0.0
    powers = -(high // 4), high // 4
    return [p for p in powers if p and low + _MARGIN < here + p < high - _MARGIN]


def _finite(*sizes: float) -> float:
    """The largest of several norms, by which errors are divided.

    Raises:
        Fault: one is not finite; divided by it, every error would pass.
    """
    if not all(map(math.isfinite, sizes)):
        raise Fault(Worst("norms are beyond what floating point holds: scale the operator"))
    return max(sizes)


def difference(
    F: TestedMap,
    found: Vector,
    wanted: Vector,
    names: tuple[str, str],
    terms: list[Vector],
    size: Callable[[], Any] = lambda: 0.0,
) -> tuple[float, Where]:
    """The largest difference between two vectors, and a function that locates it. In floating point
    it is relative to the largest element of both, and of the terms that they are sums of.

    Args:
        names: of the two vectors, for the report.
        size: gives the size of terms within the map, which may cancel; asked for if the difference
            is larger than rounding of what is known without it. Collective.
    """
    where, most = largest(found - wanted, F.backend)
    scale = max(largest(v, F.backend)[1] for v in (found, wanted, *terms))
    if not dot_tolerance(F):
        scale = 1.0
    else:
        scale = _scale(most, scale, element_tolerance(F), size)
    return most / (scale or 1.0), lambda: wrong_value(found, wanted, where, names, F.backend)


def _scale(error: Any, known: Any, tolerance: float, size: Callable[[], Any]) -> Any:
    """The size that an error is divided by: the known one of results; or that of the terms which
    these are sums of, where it explains an error that results do not. Collective."""
    if error <= tolerance * known:
        return known or 1.0
    terms = size()
    return terms if error <= tolerance * terms < math.inf else known or 1.0


def there_and_back(F: TestedMap, G: TestedMap, seed: int, name: str) -> tuple[float, Where]:
    """Error of G F x against x, and of F G y against y, the larger one; divided in floating point
    by the product of the gains of F and G, if that is above 1.

    Args:
        name: of G, for the report.
    """
    x, y = random_vector(F, F.domain, seed), random_vector(F, F.codomain, seed, 1)
    forward, backward = F(x), G(y)
    gain = _finite(forward.norm() / (x.norm() or 1.0) * backward.norm() / (y.norm() or 1.0))
    if not dot_tolerance(F):
        gain = 1.0
    ways = []
    for A, B, v, image, names in (
        (F, G, x, forward, (f"{name} F", "the identity")),
        (G, F, y, backward, (f"F {name}", "the identity")),
    ):

        def where(A: TestedMap = A, B: TestedMap = B, v: Vector = v, names: Any = names) -> Worst:
            return wrong_column(F, lambda part: B(A(part)), lambda part: part, v, names)

        ways.append((difference(F, B(image), v, names, [])[0] / max(1.0, gain), where))
    return max(ways, key=lambda way: way[0])
