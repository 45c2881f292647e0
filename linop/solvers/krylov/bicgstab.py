"""BiCGSTAB of van der Vorst, for operators that are not Hermitian."""

from __future__ import annotations

import math
from typing import Any, Unpack

from linop.solvers.iteration import Ask, Callback, Control, Steps
from linop.solvers.krylov.systems import LinearMethod, solve, tolerances
from linop.solvers.updates import plus
from linop.spaces.vector import Vector

_CANCELLED = 1e-8
"""Share of ‖s‖² below which ‖r‖², computed from it, has lost half of its digits."""


def bicgstab(
    A: Any,
    b: Any,
    x0: Any = None,
    *,
    rtol: float = 1e-5,
    atol: float = 0.0,
    maxiter: int | None = None,
    M: Any = None,
    callback: Callback | None = None,
    **control: Unpack[Control],
) -> Any:
    """The stabilised bi-conjugate gradient method for A x = b; SciPy's signature (van der Vorst,
    SIAM J. Sci. Stat. Comput. 13, 1992).

    Two reductions an iteration, in which ‖r‖ and the next ρ follow from products with s and t; and
    one more where ‖r‖ falls by four digits at once, since these have cancelled then. The textbook
    has four. The coefficients α and ω depend on each other, so that two is the least without
    further operator applications or a changed recurrence.

    Args:
        A: an operator, the plan of one, or a function of vectors, of a space to itself.
        b: right-hand side, or a list of vectors; see `linop.solvers.cg`.
        x0: initial guess; zero by default.
        rtol, atol: stop when ‖r‖ is at most max(rtol ‖b‖, atol); r is updated.
        maxiter: 10 times the dimension by default.
        M: approximate inverse of A, applied on the right.
        callback: see `linop.solvers.cg`. That it asked to stop travels with the next iteration's
            first reduction.
        control: see `Control`.

    Returns:
        A `Result` that unpacks as SciPy's x, info (0: converged, -10: ρ is zero, -11: a product
        with A is orthogonal to the first residual, or ω is zero; else iterations done).

    Raises:
        ArgumentError, SpaceError, ShapeError, DTypeError: as `linop.solvers.cg`.
    """
    rtol, atol = tolerances("bicgstab", rtol=rtol, atol=atol)
    return solve(
        lambda system: _Bicgstab(system, rtol, atol),
        A,
        b,
        x0,
        M,
        maxiter=maxiter,
        callback=callback,
        problem=[rtol, atol],
        name="bicgstab",
        **control,
    )


class _Bicgstab(LinearMethod):
    """The state of the iteration.

    Attributes:
        r, shadow, p: residual, first residual, search direction.
        rho: <shadow, r>.
        broken: SciPy's number of the breakdown.
    """

    name = "bicgstab"

    def start(self) -> Steps:
        system = self._system
        self.r = self.shadow = self.p = system.residual_at(system.x0)
        self.x = system.first(self.r)
        self.broken = -10
        (rr,) = yield Ask([("residual r", self.r, self.r)])
        self.rho: complex = rr
        self.first = math.sqrt(rr)
        self.converged(self.first)

    def step(self) -> Steps:
        system = self._system
        phat = self._precondition(self.p)
        v = system.A(phat)
        (sigma,) = yield Ask([("product A p with the first residual", self.shadow, v)])
        if not abs(sigma):
            self._breaks(-11, "<r0, A p> is zero, r0 the first residual")
            return
        alpha = self.rho / sigma
        s = plus(self.r, -alpha, v)
        shat = self._precondition(s)
        t = system.A(shat)
        ts, tt, ss, rs, rt = yield Ask(
            [
                ("product A s with s", t, s),
                ("product A s", t, t),
                ("residual s", s, s),
                ("residual s with the first residual", self.shadow, s),
                ("product A s with the first residual", self.shadow, t),
            ]
        )
        self.x = plus(self.x, alpha, phat)
        self.nit += 1
        if math.sqrt(ss) <= self._limit or not tt:
            self.r = s
            if not self.converged(math.sqrt(ss)):
                self._breaks(-11, "A s is zero, s the residual after half a step: A is singular")
            return
        omega = ts / tt
        self.x, self.r = plus(self.x, omega, shat), plus(s, -omega, t)
        rr, rho = ss - abs(ts) ** 2 / tt, rs - omega * rt
        if rr <= _CANCELLED * ss:
            pairs = [("residual r", self.r, self.r), ("residual r", self.shadow, self.r)]
            rr, rho = yield Ask(pairs, final=True)
        if not self.converged(math.sqrt(rr)) and not self._stagnates(rho, omega, rr):
            beta = rho / self.rho * (alpha / omega)
            self.p = plus(self.r, beta, plus(self.p, -omega, v))
            self.rho = rho

    def _precondition(self, r: Vector) -> Vector:
        M = self._system.M
        return r if M is None else M(r)

    def _stagnates(self, rho: complex, omega: complex, rr: float) -> bool:
        """True, and the method ended, if the next direction is not defined to rounding."""
        if abs(rho) <= self._system.eps**2 * self.first * math.sqrt(rr):
            self._breaks(-10, "the residual is orthogonal to the first one: another x0 may help")
        elif not abs(omega):
            self._breaks(-11, "<A s, s> is zero, s the residual after half a step; take gmres")
        return self.status is not None

    def _breaks(self, number: int, reason: str) -> None:
        self.broken = number
        self.breakdown(reason)

    def info(self) -> int:
        return self.broken if self.status == 3 else super().info()
