"""Checks of linear maps and their adjoints, on any backend.

Each takes whatever `linop.testing.foreign` makes a `Subject` of: linop's operators and plans, pairs
of functions, matrices, operators of SciPy and PyLops. It returns a `Report`, true if it passed;
where a backend is one worker's, every worker makes the same call and gets the same report. What is
not a finite number fails, wherever it is. Each ``assert_`` form raises with the report's text.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec

import numpy as np

from linop.backends.base import Backend
from linop.errors import UndecidableError
from linop.operator import LinearOperator
from linop.scalars import Scalar
from linop.space import Space, Vector
from linop.testing.foreign import subject
from linop.testing.localise import (
    inner,
    largest,
    not_zero,
    part_held,
    whole_numbers,
    wrong_column,
    wrong_entry,
    wrong_value,
)
from linop.testing.matrices import worst_of_matrices
from linop.testing.report import Report, Worst
from linop.testing.subject import Fault, Subject, rounding
from linop.testing.whole import seen_as

Parameters = ParamSpec("Parameters")
Where = Callable[[], Worst]
"""Finds the worst case; collective."""


@dataclass
class _Check:
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


def check_adjoint(
    op: Any,
    backend: Backend | str = "reference",
    *,
    adjoint: Any = None,
    seed: int = 0,
    trials: int = 3,
) -> Report:
    """The dot-product test (paper, equation 13), for random x and y:
    ``abs(<F x, y> - <x, F* y>) / max(‖F x‖ ‖y‖, ‖x‖ ‖F* y‖)`` is below rounding (`dot_tolerance`).
    Integer spaces are compared exactly. If it fails, the report names a wrong entry.

    Args:
        op: the operator F.
        backend: a backend or its name. On one worker's backend every worker makes the same call.
        adjoint: what to test as F*; by default that of `op`.
        seed, trials: the random vectors; the same on every worker.

    Returns:
        The report, the same on every worker.
    """
    F = subject("check_adjoint", op, backend)
    call = "check_adjoint(op, {})" if adjoint is None else "check_adjoint(op, {}, adjoint=adjoint)"
    check = _Check("dot-product test", "<F x, y> with <x, F* y>", call, F, dot_tolerance(F))

    def trial(seed: int) -> tuple[float, Where]:
        return _dot_products(F, _adjoint("check_adjoint", F, adjoint), seed, Space.random)

    return check.tried(trial, seed, trials)


def check_dot_exact(
    op: Any,
    backend: Backend | str = "reference",
    *,
    adjoint: Any = None,
    seed: int = 0,
    trials: int = 3,
) -> Report:
    """The dot-product test on whole numbers, without tolerance.

    Args:
        op, backend, adjoint, seed, trials: as for `check_adjoint`.

    Raises:
        UndecidableError: of whole numbers the operator makes others, or larger ones than its dtype
            holds exactly: its arithmetic may round. On every worker.
    """
    F = subject("check_dot_exact", op, backend)
    extra = "" if adjoint is None else ", adjoint=adjoint"
    compared = "<F x, y> with <x, F* y>, on whole numbers"
    call = f"check_dot_exact(op, {{}}{extra})"
    check = _Check("exact dot-product test", compared, call, F, 0.0)

    def trial(seed: int) -> tuple[float, Where]:
        G = _adjoint("check_dot_exact", F, adjoint)
        return _dot_products(F, G, seed, Space.integers, exact=True)

    return check.tried(trial, seed, trials)


def check_self_adjoint(
    op: Any, backend: Backend | str = "reference", *, seed: int = 0, trials: int = 3
) -> Report:
    """Whether F is its own adjoint: the dot-product test with F in both places.

    Args:
        op, backend, seed, trials: as for `check_adjoint`.
    """
    F = subject("check_self_adjoint", op, backend)
    compared, call = "<F x, y> with <x, F y>", "check_self_adjoint(op, {})"
    check = _Check("self-adjointness", compared, call, F, dot_tolerance(F))

    def trial(seed: int) -> tuple[float, Where]:
        G = seen_as(F, F.codomain, F.domain, not F.anonymous)
        return _dot_products(F, G, seed, Space.random, other="its conjugate transpose")

    return check.tried(trial, seed, trials)


def check_exact(op: Any, adjoint: Any = None, *, backend: Backend | str = "reference") -> Report:
    """Whether the matrix of the adjoint is the conjugate transpose of that of the operator, entry
    by entry.

    Both are found independently, by applying both to all unit vectors. Where nothing rounds (data
    movement, integers) entries must be equal; else they may differ by rounding.

    Args:
        op: the operator; small, since its matrix is built.
        adjoint: what to test as its adjoint; by default that of `op`.
        backend: as for `check_adjoint`.
    """
    F = subject("check_exact", op, backend)
    extra = "" if adjoint is None else "adjoint, "
    compared = "the matrix of F* with the conjugate transpose of that of F"
    check = _Check("exact adjoint", compared, f"check_exact(op, {extra}backend={{}})", F, 0.0)
    try:
        G = _adjoint("check_exact", F, adjoint)
        error, largest_entry, worst = worst_of_matrices(F, G)
    except Fault as fault:
        return check.report(math.inf, fault.worst)
    if not (F.exact and G.exact):
        check.tolerance = max(dot_tolerance(F), dot_tolerance(G)) * largest_entry
    return check.report(error, None if error <= check.tolerance else worst)


def check_linear(
    op: Any, backend: Backend | str = "reference", *, seed: int = 0, trials: int = 3
) -> Report:
    """Whether ``F(a x + y) = a F x + F y`` and ``F 0 = 0``, the same twice, leaving its argument as
    it was. Its adjoint is not called. Errors are relative to the largest element.

    Args:
        op, backend, seed, trials: as for `check_adjoint`.
    """
    F = subject("check_linear", op, backend)
    compared = "F(a x + y) with a F x + F y, F 0 with 0, F x with F x again"
    check = _Check("linearity", compared, "check_linear(op, {})", F, dot_tolerance(F))

    def trial(seed: int) -> tuple[float, Where]:
        if worst := not_zero(F):
            return math.inf, lambda: worst
        x, y = _random(F, F.domain, seed), _random(F, F.domain, seed + 1)
        a = _scalar(F, seed)
        once, other, both = F(x), F(y), F(a * x + y)
        names = "F(a x + y)", "a F x + F y"
        return max(
            _compared(F, both, a * once + other, names, [once * a, other]),
            _compared(F, F(x), once, ("F x, the second time,", "F x, the first time,"), []),
            key=lambda found: found[0],
        )

    return check.tried(trial, seed, trials)


def check_equal(
    op: Any, other: Any, backend: Backend | str = "reference", *, seed: int = 0, trials: int = 3
) -> Report:
    """Whether two operators are the same map, on random vectors, but for rounding; in the dtypes of
    integers, exactly. (`LinearOperator.equals` proves it for all vectors.)

    Args:
        op, other: what is compared. If one of them has no regions (SciPy's, PyLops'), elements
            correspond in their order.
        backend, seed, trials: as for `check_adjoint`.
    """
    F, second = subject("check_equal", op, backend), subject("check_equal", other, backend)
    tolerance = max(dot_tolerance(F), dot_tolerance(second))
    check = _Check("equality", "F x with G x", "check_equal(op, other, {})", F, tolerance)

    def trial(seed: int) -> tuple[float, Where]:
        G = seen_as(second, F.domain, F.codomain, not F.anonymous)
        x = _random(F, F.domain, seed)
        error, _ = _compared(F, F(x), G(x), ("F", "G"), [])
        return error, lambda: wrong_column(F, F, G, x, ("F", "G"))

    return check.tried(trial, seed, trials)


def check_inverse(
    op: Any, inverse: Any, backend: Backend | str = "reference", *, seed: int = 0, trials: int = 3
) -> Report:
    """Whether ``inverse(F x) = x`` and ``F(inverse(y)) = y``. Errors are relative to the largest
    element, and to how much the two amplify random vectors, as those of rounding are.

    Args:
        op, inverse: the two maps.
        backend, seed, trials: as for `check_adjoint`.
    """
    F, G = subject("check_inverse", op, backend), subject("check_inverse", inverse, backend)
    compared = "inverse(F x) with x, F(inverse(y)) with y"
    tolerance = max(dot_tolerance(F), dot_tolerance(G))
    check = _Check("inverse", compared, "check_inverse(op, inverse, {})", F, tolerance)

    def trial(seed: int) -> tuple[float, Where]:
        back = seen_as(G, F.codomain, F.domain, not F.anonymous)
        return _returns(F, back, seed, "inverse")

    return check.tried(trial, seed, trials)


def check_unitary(
    op: Any, backend: Backend | str = "reference", *, seed: int = 0, trials: int = 3
) -> Report:
    """Whether the adjoint is the inverse: ``F* F x = x`` and ``F F* y = y``. That it is
    the adjoint, `check_adjoint` tells.

    Args:
        op, backend, seed, trials: as for `check_adjoint`.
    """
    F = subject("check_unitary", op, backend)
    compared, call = "F* F x with x, F F* y with y", "check_unitary(op, {})"
    check = _Check("unitarity", compared, call, F, dot_tolerance(F))
    return check.tried(lambda seed: _returns(F, F.H, seed, "F*"), seed, trials)


def dot_tolerance(op: LinearOperator | Subject) -> float:
    """The relative error that rounding may cause in an inner product of an operator's vectors: sums
    of n terms of random sign err by about √n ulps; 16 times that. 0 of integers."""
    size = max(op.domain.size, op.codomain.size)
    return max(rounding(space.dtype, size) for space in (op.domain, op.codomain))


def _adjoint(what: str, F: Subject, given: Any) -> Subject:
    """The adjoint that a check tests: another map, or that of F."""
    if given is None:
        return F.H
    G = subject(what, given, F.backend)
    return seen_as(G, F.codomain, F.domain, not F.anonymous)


def _random(F: Subject, space: Space, seed: int) -> Vector:
    return part_held(space.random(seed), F.backend)


def _scalar(F: Subject, seed: int) -> Scalar:
    """A random factor of the maps' kind; a whole number for integers."""
    rng = np.random.default_rng(seed)
    kinds = {F.domain.dtype.kind, F.codomain.dtype.kind}
    if not kinds.isdisjoint("iu"):
        return 3
    value = float(rng.standard_normal())
    return complex(value, rng.standard_normal()) if kinds == {"c"} and not F.real else value


def _dot_products(
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
    scale = max(forward.norm() * y.norm(), x.norm() * backward.norm())
    if exact:
        for subject, result in ((F, forward), (G, backward)):
            if why := whole_numbers(subject, result, scale):
                raise UndecidableError(f"check_dot_exact of {F.name}: {why}; use check_adjoint")
    error = float(abs(inner(F, forward, y) - inner(F, x, backward)))
    if not exact and dot_tolerance(F):
        error /= scale or 1.0
    return error, lambda: wrong_entry(F, G, x, y, other)


def _compared(
    F: Subject, found: Vector, wanted: Vector, names: tuple[str, str], terms: list[Vector]
) -> tuple[float, Where]:
    """The largest difference of two vectors, relative to the largest element of both, and of terms
    that they are sums of."""
    difference = largest(found - wanted, F.backend)
    scale = max(largest(v, F.backend)[1] for v in (found, wanted, *terms))
    if not dot_tolerance(F):
        scale = 1.0
    return difference[1] / (scale or 1.0), lambda: wrong_value(
        found, wanted, difference[0], names, F.backend
    )


def _returns(F: Subject, G: Subject, seed: int, name: str) -> tuple[float, Where]:
    """How far G F x is from x, and F G y from y."""
    x, y = _random(F, F.domain, seed), _random(F, F.codomain, seed + 1)
    forward, backward = F(x), G(y)
    gain = forward.norm() / (x.norm() or 1.0) * backward.norm() / (y.norm() or 1.0)
    if not dot_tolerance(F):
        gain = 1.0
    ways = []
    for A, B, v, image, names in (
        (F, G, x, forward, (f"{name} F", "the identity")),
        (G, F, y, backward, (f"F {name}", "the identity")),
    ):

        def where(A: Subject = A, B: Subject = B, v: Vector = v, names: Any = names) -> Worst:
            return wrong_column(F, lambda part: B(A(part)), lambda part: part, v, names)

        ways.append((_compared(F, B(image), v, names, [])[0] / max(1.0, gain), where))
    return max(ways, key=lambda way: way[0])


def _asserting(check: Callable[Parameters, Report]) -> Callable[Parameters, None]:
    """A check as an assertion."""

    def assertion(*arguments: Parameters.args, **options: Parameters.kwargs) -> None:
        report = check(*arguments, **options)
        if not report:
            raise AssertionError(str(report))

    assertion.__name__ = assertion.__qualname__ = check.__name__.replace("check_", "assert_")
    assertion.__doc__ = f"`{check.__name__}`, or an AssertionError with the report."
    return assertion


assert_adjoint = _asserting(check_adjoint)
assert_dot_exact = _asserting(check_dot_exact)
assert_exact = _asserting(check_exact)
assert_linear = _asserting(check_linear)
assert_equal = _asserting(check_equal)
assert_inverse = _asserting(check_inverse)
assert_unitary = _asserting(check_unitary)
assert_self_adjoint = _asserting(check_self_adjoint)
