"""Golub-Kahan bidiagonalisation, the base of `lsqr` and `lsmr`: vectors, and when to end."""

from __future__ import annotations

import math
from typing import Any

from linop.solvers.iteration import Ask, Method, Named, Reductions, Steps
from linop.solvers.krylov.systems import ROUNDING, System
from linop.solvers.result import BREAKDOWN, CONVERGED, Result
from linop.solvers.updates import plus, times
from linop.spaces.vector import Vector


class Bidiagonalisation(Method):
    """The state that both methods share.

    Attributes:
        u, v: the last left and right vectors, of norm 1 or 0.
        alpha, beta: the last numbers of the diagonal and the one below.
        istop: SciPy's reason of the end.
        scale: ‖b‖; ‖b - A x0‖ if it is zero.
        begun, base: iterations, and ‖x‖, when the recurrence began last; 0 for the first time.
    """

    recurs = True
    anorm = 0.0

    def __init__(
        self, system: System, damp: float, atol: float, btol: float, conlim: float
    ) -> None:
        super().__init__()
        self._system, self._damp, self._atol, self._btol = system, damp, atol, btol
        self._ctol = 1 / conlim if conlim > 0 else 0.0
        self.istop = 0

    def start(self) -> Steps:
        self.base, self.scale = 0.0, self._system.norm
        yield from self.begin(self._system.x0)

    def begin(self, x: Vector | None) -> Steps:
        """Set the state to that of no iteration from x, None for zero."""
        raise NotImplementedError

    def begin_vectors(self, x: Vector | None) -> Steps:
        """Set u, v, beta, alpha and x, and end the method if x is a solution already."""
        system = self._system
        self.u, self.begun = system.residual_at(x), self.nit
        (square,) = yield Ask([("residual r", self.u, self.u)])
        self.beta = math.sqrt(square)
        self.u = times(1 / self.beta if self.beta else 0.0, self.u)
        self.v = system.H(self.u)
        self.x = 0 * self.v if x is None else x.copy()
        (square,) = yield Ask([("product A* r", self.v, self.v)])
        self.alpha = math.sqrt(square)
        self.v = times(1 / self.alpha if self.alpha else 0.0, self.v)
        self.scale = self.scale or self.beta
        self.residuals.append(self.beta)
        self.gradient = self.alpha * self.beta
        if not self.gradient:
            which = "A x0 = b" if not self.beta else "A* r = 0 at the start"
            self.end(CONVERGED, f"converged: {which}, so that the initial x is a solution")

    def verify(self) -> Steps:
        """Compare ‖r‖ and ‖A* r‖, of the damped problem if there is one, with what is asked."""
        system, damp, x = self._system, self._damp, self.x
        r = system.residual_at(x)
        gradient, moved = system.H(r), x if system.x0 is None else x - system.x0
        gradient = plus(gradient, -(damp**2), moved) if damp else gradient
        named = ("residual b - A x", r), ("gradient A* r", gradient), ("solution x", x)
        products = yield Ask([(n, v, v) for n, v in (*named, ("step x - x0", moved))])
        rnorm, norm, xnorm, step = map(math.sqrt, products)
        rnorm = math.hypot(rnorm, damp * step)
        self.residuals[-1], self.gradient = rnorm, norm
        size = self.anorm * min(max(xnorm, step), 10 * xnorm)  # the recurrence knows the step only
        rounding = ROUNDING * system.eps * (size + self.scale)
        solves = 1.001 * (self._btol * self.scale + self._atol * size) + rounding
        least = self.anorm * (1.001 * self._atol * rnorm + rounding)
        met = rnorm <= solves or norm <= least
        if not self.confirmed(met, norm, again=not damp) and self.status is None:
            self.residuals.pop()
            self.base, self.istop = xnorm, 0
            yield from self.begin(x)

    def advance_u(self, *others: Named) -> Any:
        """The next u and beta; returns the products of other pairs, in the same reduction. Nothing
        is changed before it."""
        u = plus(self._system.A(self.v), -self.alpha, self.u)
        square, *found = yield Ask([("product A v", u, u), *others])
        self.beta = math.sqrt(square)
        self.u = times(1 / self.beta, u) if self.beta else u
        return found

    def next_v(self) -> Vector:
        """A* u - beta v, whose norm is the next alpha."""
        return plus(self._system.H(self.u), -self.beta, self.v)

    def advance_v(self, v: Vector, square: float) -> None:
        """Take a vector of this squared norm as v; unless beta is zero, where the method ends."""
        if self.beta:
            self.alpha = math.sqrt(square)
            self.v = times(1 / self.alpha, v) if self.alpha else v

    def decide(
        self, rnorm: float, gradient: float, anorm: float, xnorm: float, cond: float
    ) -> None:
        """Record ‖r‖ and ‖A* r‖, and end the method by the rules of Paige & Saunders (ACM TOMS 8,
        1982), in SciPy's order.

        Args:
            anorm, cond: estimates of the norm and the condition number of A.
        """
        self.residuals.append(rnorm)
        self.gradient = gradient
        share = anorm * max(xnorm, self.base) / self.scale
        consistent, limit = rnorm / self.scale, self._btol + self._atol * share
        below = anorm * rnorm
        least = gradient / below if below else (math.inf if gradient else 0.0)
        inverse = 1 / cond if cond else math.inf
        solves = f"‖r‖/‖b‖ = {consistent:.3g}"
        minimum = f"‖A* r‖/(‖A‖ ‖r‖) = {least:.3g}"
        far = f"the condition number is {cond:.3g}"
        for istop, met, words in (
            (1, consistent <= limit, f"x solves A x = b: {solves}, at most {limit:.3g} is asked"),
            (2, least <= self._atol, f"x is a least-squares solution: {minimum}, at most "
             f"atol = {self._atol:.3g} is asked"),
            (3, inverse <= self._ctol, f"{far}, above conlim"),
            (4, 1 + consistent / (1 + share) <= 1, f"x solves A x = b to rounding: {solves}"),
            (5, 1 + least <= 1, f"x is a least-squares solution to rounding: {minimum}"),
            (6, 1 + inverse <= 1, f"{far}, beyond rounding"),
        ):  # fmt: skip
            if met:
                self.istop = istop
                status = BREAKDOWN if istop in (3, 6) else CONVERGED
                self.end(status, words if status else f"converged: {words}")
                return

    def current(self) -> Vector:
        return self._system.given(self.x)

    def progress(self) -> dict[str, float]:
        given = self._system.norm_given
        return {"residual": given(self.residuals[-1]), "gradient": given(self.gradient)}

    def limits(self) -> str:
        return f", where atol = {self._atol:.3g}, btol = {self._btol:.3g} are asked"

    def ended_outside(self, status: int, reason: str) -> None:
        super().ended_outside(status, reason)
        self.istop = 7

    def _result(self, reductions: Reductions, *others: Any) -> Result:
        x = self.current()
        residuals = [self._system.norm_given(one) for one in self.residuals]
        return self.finished((x, self.istop, self.nit, *others), x, residuals, reductions)


def rotation(a: float, b: float) -> tuple[float, float, float]:
    """c, s, r of the rotation that takes (a, b) to (r, 0); r has the sign of the larger one."""
    if not b:
        return math.copysign(1.0, a) if a else 0.0, 0.0, abs(a)
    if not a:
        return 0.0, math.copysign(1.0, b), abs(b)
    r = math.copysign(math.hypot(a, b), b if abs(b) > abs(a) else a)
    return a / r, b / r, r
