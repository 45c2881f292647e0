"""How a check is tried: with random vectors, several times, until the worst case is known."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from linop.errors import ArgumentError, UndecidableError
from linop.operators.operator import LinearOperator
from linop.spaces.region import integer
from linop.spaces.scalars import Scalar
from linop.spaces.space import Space, Vector
from linop.testing.localise import (
    apart,
    inner,
    largest,
    not_zero,
    part_held,
    whole_numbers,
    wrong_column,
    wrong_entry,
    wrong_value,
)
from linop.testing.report import Report, Worst
from linop.testing.subjects.foreign import subject
from linop.testing.subjects.subject import Fault, Subject, epsilon, exponents, rounding
from linop.testing.subjects.whole import seen_as

Where = Callable[[], Worst]
"""Finds the worst case; collective."""


@dataclass
class Check:
    """A check of a map: what its reports say, and how it is tried."""

    title: str
    compared: str
    call: str
    F: Subject
    tolerance: float
    given: float | None = None
    """The tolerance that the caller gave in its place."""

    def __post_init__(self) -> None:
        if self.given is None:
            return
        if not (isinstance(self.given, Real) and 0 <= self.given < math.inf):
            raise ArgumentError(
                f"tolerance: {self.given!r} given, a relative error expected, 0 or more; None for "
                f"what rounding explains"
            )
        self.tolerance = float(self.given)

    def tried(self, trial: Callable[[int], tuple[float, Where]], seed: int, trials: int) -> Report:
        """The worst of several trials, each with a seed.

        Raises:
            ArgumentError: these are no whole numbers, or there is no trial.
        """
        seed, trials = integer(seed, "seed"), integer(trials, "trials")
        if trials < 1 or seed < 0:
            raise ArgumentError(f"seed from 0 and trials from 1 expected, given {seed}, {trials}")
        most, which, where = 0.0, seed, None
        try:
            for which_now in range(seed, seed + 2 * trials, 2):
                error, found = trial(which_now)
                if error > most or not math.isfinite(error):
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
        title = f"{self.title} on {backend}"
        passed = worst is None
        return Report(title, name, passed, error, self.tolerance, self.compared, worst, call)


def dot_tolerance(op: LinearOperator | Subject) -> float:
    """The relative error of the dot-product test that rounding may cause: 16 times the distance of
    1 from the next number, of the coarser of the two dtypes; 0 of integers. It does not grow with
    the size: errors of random sign do not, relative to the norms. It is large for half precision,
    where `check_dot_exact` sees more."""
    return 16 * max(epsilon(space.dtype) for space in (op.domain, op.codomain))


def element_tolerance(F: Subject) -> float:
    """The error of a single element that rounding may cause, relative to the largest one: an
    element may be a sum of as many terms as there are elements."""
    size = max(F.domain.size, F.codomain.size)
    return max(rounding(space.dtype, size) for space in (F.domain, F.codomain))


def adjoint_of(what: str, F: Subject, given: Any) -> Subject:
    """The adjoint that a check tests: another map, or that of F."""
    if given is None:
        return F.H
    G = subject(what, given, F.backend)
    return seen_as(G, F.codomain, F.domain, not F.anonymous)


def random_vector(F: Subject, space: Space, seed: int, nth: int = 0, whole: bool = False) -> Vector:
    """The nth random vector of a trial, without zeros: an element that is zero tests nothing.

    Whole numbers are odd: units modulo 2**bits, so that no single wrong entry vanishes. But in one
    trial of three the first vector has even ones, too, and in another the second: else two entries
    of a row or column, both wrong by 2**(bits - 1), would always cancel.

    Args:
        seed: of the trial.
        whole: draw whole numbers for floating point, too.
    """
    if space.dtype.kind in "iu" or whole:
        least = 0 if space.dtype.kind == "u" else -9
        even = seed // 2 % 3 == nth + 1
        numbers = [n for n in range(least, 10) if n % 2 or (even and n)]
        vector = space._fill(seed + nth, lambda rng, shape: rng.choice(numbers, shape))
    else:
        vector = space.random(seed + nth)
    return part_held(vector, F.backend)


def random_scalar(F: Subject, seed: int) -> Scalar:
    """A random factor of the maps' kind; a whole number for integers."""
    rng = np.random.default_rng(seed)
    kinds = {F.domain.dtype.kind, F.codomain.dtype.kind}
    if not kinds.isdisjoint("iu"):
        return 3
    value = float(rng.standard_normal())
    return complex(value, rng.standard_normal()) if kinds == {"c"} and not F.real else value


def dot_products(
    F: Subject,
    G: Subject,
    seed: int,
    exact: bool = False,
    other: str = "the conjugate transpose of the adjoint",
) -> tuple[float, Where]:
    """How far <F x, y> is from <x, G y>: relative where numbers round, modulo 2**bits in integers.
    Each map is called twice, so that one that overwrites its last result, or does not give the same
    again, is found.

    Args:
        exact: draw whole numbers, and compare without tolerance.

    Raises:
        Fault: of -x a map does not make the opposite of what it makes of x.
    """
    x = random_vector(F, F.domain, seed, whole=exact)
    y = random_vector(F, F.codomain, seed, 1, whole=exact)
    found = F(x), G(y)
    rounds = not exact and dot_tolerance(F) > 0
    forward, backward = _in_range(F, G, (x, y), found) if rounds else found
    scale = _finite(forward.norm() * y.norm(), x.norm() * backward.norm())
    for S, result in ((F, forward), (G, backward)) if exact else ():
        if why := whole_numbers(S, result, scale):
            raise UndecidableError(f"check_dot_exact of {F.name}: {why}; use check_adjoint")
    error = float(abs(apart(F, inner(F, forward, y), inner(F, x, backward))))
    if rounds:
        error /= scale or 1.0
    if error <= dot_tolerance(F):
        _look_at_opposite(F, x, found[0])
        _look_at_opposite(G, y, found[1])
    return error, lambda: wrong_entry(F, G, x, y, other)


def _look_at_opposite(F: Subject, x: Vector, result: Vector) -> None:
    """That F(-x) is -F x.

    Raises:
        Fault: it is not.
    """
    if F.domain.dtype.kind == "u":
        return
    error, where = _opposite(F, x, result)
    if not error <= element_tolerance(F):
        raise Fault(where())


def _opposite(F: Subject, x: Vector, result: Vector) -> tuple[float, Where]:
    """How far F(-x) is from -F x, which rounding does not change."""
    names = f"the {F.role} function of -x", "the opposite of that of x"
    return difference(F, F(-x), -result, names, [])


def _in_range(
    F: Subject, G: Subject, given: tuple[Vector, Vector], found: tuple[Vector, Vector]
) -> tuple[Vector, Vector]:
    """F x and G y; of x and y scaled by one power of two, where these are too small or too large to
    be squared."""
    most = max(largest(v, F.backend)[1] for v in found)
    low, high = _range(F)
    if not most or low / 2 < math.log2(most) < high / 2:
        return found
    power = min(max(-round(math.log2(most)), low + _MARGIN), high - _MARGIN)
    x, y = given
    return F(2.0**power * x), G(2.0**power * y)


_MARGIN = 6
"""Powers of two between the numbers that are drawn and the end of a dtype's range."""


def _range(F: Subject) -> tuple[int, int]:
    """The powers of two that both dtypes of a map hold with full precision."""
    lows, highs = zip(*(exponents(space.dtype) for space in (F.domain, F.codomain)), strict=True)
    return max(lows), min(highs)


def linear(F: Subject, seed: int) -> tuple[float, Where]:
    """How far F is from linear at random vectors, and at one of them negated, and scaled far up and
    down; relative to the largest element."""
    if worst := not_zero(F):
        return math.inf, lambda: worst
    x, y = random_vector(F, F.domain, seed), random_vector(F, F.domain, seed, 1)
    a = random_scalar(F, seed)
    once, other, both = F(x), F(y), F(a * x + y)
    names = "F(a x + y)", "a F x + F y"
    found = [
        difference(F, both, a * once + other, names, [once * a, other]),
        difference(F, F(x), once, ("F x, the second time,", "F x, the first time,"), []),
    ]
    if F.domain.dtype.kind != "u":
        found.append(_opposite(F, x, once))
    for power in _far(F, largest(once, F.backend)[1]):
        names = f"F(2**{power} x)", f"2**{power} F x"
        found.append(difference(F, F(2.0**power * x), 2.0**power * once, names, []))
    return max(found, key=lambda one: one[0])


def _far(F: Subject, most: float) -> list[int]:
    """Powers of two, far apart, by which x and F x, whose largest element is given, can be scaled
    without leaving the range of their dtypes."""
    low, high = _range(F)
    here = math.log2(most) if most else 0.0
    powers = -(high // 8), high // 8
    return [p for p in powers if p and low + _MARGIN < here + p < high - _MARGIN]


def _finite(*sizes: float) -> float:
    """The largest of sizes that errors are divided by.

    Raises:
        Fault: one is not finite: divided by it, every error would pass.
    """
    if not all(map(math.isfinite, sizes)):
        raise Fault(Worst("norms are beyond what floating point holds: scale the operator"))
    return max(sizes)


def difference(
    F: Subject, found: Vector, wanted: Vector, names: tuple[str, str], terms: list[Vector]
) -> tuple[float, Where]:
    """The largest difference of two vectors, relative to the largest element of both, and of terms
    that they are sums of."""
    where, most = largest(found - wanted, F.backend)
    scale = max(largest(v, F.backend)[1] for v in (found, wanted, *terms))
    if not dot_tolerance(F):
        scale = 1.0
    return most / (scale or 1.0), lambda: wrong_value(found, wanted, where, names, F.backend)


def there_and_back(F: Subject, G: Subject, seed: int, name: str) -> tuple[float, Where]:
    """How far G F x is from x, and F G y from y."""
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

        def where(A: Subject = A, B: Subject = B, v: Vector = v, names: Any = names) -> Worst:
            return wrong_column(F, lambda part: B(A(part)), lambda part: part, v, names)

        ways.append((difference(F, B(image), v, names, [])[0] / max(1.0, gain), where))
    return max(ways, key=lambda way: way[0])
