"""How a check is tried: with random vectors, several times, until the worst case is known."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from linop.errors import UndecidableError
from linop.operator import LinearOperator
from linop.scalars import Scalar
from linop.space import Space, Vector
from linop.testing.foreign import subject
from linop.testing.localise import (
    inner,
    largest,
    part_held,
    whole_numbers,
    wrong_column,
    wrong_entry,
    wrong_value,
)
from linop.testing.report import Report, Worst
from linop.testing.subject import Fault, Subject, rounding
from linop.testing.whole import seen_as

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

    def tried(self, trial: Callable[[int], tuple[float, Where]], seed: int, trials: int) -> Report:
        """The worst of several trials, each with a seed."""
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
        call = f"linop.testing.{self.call.format(repr(backend))[:-1]}{seed})"
        title = f"{self.title} on {backend}"
        passed = worst is None
        return Report(title, name, passed, error, self.tolerance, self.compared, worst, call)


def dot_tolerance(op: LinearOperator | Subject) -> float:
    """The relative error that rounding may cause in an inner product of an operator's vectors: sums
    of n terms of random sign err by about √n ulps; 16 times that. 0 of integers. It is large for
    half precision, where `check_dot_exact` sees more."""
    size = max(op.domain.size, op.codomain.size)
    return max(rounding(space.dtype, size) for space in (op.domain, op.codomain))


def adjoint_of(what: str, F: Subject, given: Any) -> Subject:
    """The adjoint that a check tests: another map, or that of F."""
    if given is None:
        return F.H
    G = subject(what, given, F.backend)
    return seen_as(G, F.codomain, F.domain, not F.anonymous)


def random_vector(F: Subject, space: Space, seed: int) -> Vector:
    return part_held(space.random(seed), F.backend)


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
    draw: Callable[[Space, int], Vector],
    exact: bool = False,
    other: str = "the conjugate transpose of the adjoint",
) -> tuple[float, Where]:
    """How far <F x, y> is from <x, G y>: relative where numbers round."""
    x = part_held(draw(F.domain, seed), F.backend)
    y = part_held(draw(F.codomain, seed + 1), F.backend)
    forward, backward = F(x), G(y)
    scale = _finite(forward.norm() * y.norm(), x.norm() * backward.norm())
    if exact:
        for subject, result in ((F, forward), (G, backward)):
            if why := whole_numbers(subject, result, scale):
                raise UndecidableError(f"check_dot_exact of {F.name}: {why}; use check_adjoint")
    error = float(abs(inner(F, forward, y) - inner(F, x, backward)))
    if not exact and dot_tolerance(F):
        error /= scale or 1.0
    return error, lambda: wrong_entry(F, G, x, y, other)


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
    x, y = random_vector(F, F.domain, seed), random_vector(F, F.codomain, seed + 1)
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
