"""MINRES of Paige & Saunders, for Hermitian operators that may be indefinite or singular."""

from __future__ import annotations

import math
from typing import Any, Unpack

from linop.solvers.arguments import real
from linop.solvers.iteration import Ask, Callback, Control, Steps
from linop.solvers.krylov.systems import ROUNDING, LinearMethod, System, solve, tolerances
from linop.solvers.result import BREAKDOWN, CONVERGED
from linop.solvers.updates import plus, times
from linop.spaces.vector import Vector


def minres(
    A: Any,
    b: Any,
    x0: Any = None,
    *,
    rtol: float = 1e-5,
    shift: float = 0.0,
    maxiter: int | None = None,
    M: Any = None,
    callback: Callback | None = None,
    **control: Unpack[Control],
) -> Any:
    """The minimum residual method for (A - shift) x = b, A Hermitian; SciPy's signature (Paige &
    Saunders, SIAM J. Numer. Anal. 12, 1975). Two reductions an iteration.

    Args:
        A: an operator, the plan of one, or a function of vectors; indefinite or singular, too.
        b: right-hand side, or a list of vectors; see `linop.solvers.cg`.
        x0: initial guess; zero by default.
        rtol: stop when ‖r‖ is at most rtol ‖A‖ ‖x‖, or, for a least-squares solution, ‖A r‖ at most
            rtol ‖A‖ ‖r‖; ‖A‖ is estimated. (SciPy counts ‖b‖ into ‖A‖, so that the end depends on
            units.)
        shift: a real number.
        maxiter: 5 times the dimension by default.
        M: approximate inverse of A, Hermitian and positive definite. Residuals are then measured
            in the norm of <r, M r>.
        callback: see `linop.solvers.cg`. That it asked to stop travels with the next iteration's
            first reduction.
        control: see `Control`.

    Returns:
        A `Result` that unpacks as SciPy's x, info (0: converged, -1: breakdown, else iterations
        done).

    Raises:
        ArgumentError, SpaceError, ShapeError, DTypeError: as `linop.solvers.cg`.

    Example:
        The eigenvalues may have both signs, where `cg` breaks down:

        >>> A = linop.local_operators.matrix(np.diag([2.0, -4.0]))
        >>> x, info = linop.solvers.minres(A, np.array([2.0, 8.0]))
        >>> x["x"].round(6).tolist(), info
        ([1.0, -2.0], 0)
    """
    (rtol,) = tolerances("minres", rtol=rtol)
    shift = real("minres", "shift", shift)
    return solve(
        lambda system: _Minres(system, rtol, shift),
        A,
        b,
        x0,
        M,
        maxiter=maxiter,
        most=lambda size: 5 * size,
        callback=callback,
        problem=[rtol, shift],
        name="minres",
        **control,
    )


class _Minres(LinearMethod):
    """The state of the iteration, in the names of SciPy's source.

    Attributes:
        r1, r2, y: the last two Lanczos vectors, times their betas, and M r2.
        w, w2: the last two directions.
        xx: ‖x‖².
        anorm: the largest estimate of ‖A‖, where the recurrence has begun anew.
        least: True if it is a least-squares solution to which the method has come.
    """

    name = "minres"
    recurs = True

    def __init__(self, system: System, rtol: float, shift: float) -> None:
        super().__init__(system, rtol, 0.0)
        self._rtol, self._shift = rtol, shift

    def start(self) -> Steps:
        self.x = self._system.first(self._system.b)
        self.anorm = 0.0
        yield from self._begin()
        if self.status is None and not self.beta:
            self.end(CONVERGED, "converged: ‖r‖ = 0 at the start")

    def _begin(self) -> Steps:
        """Begin from b - (A - shift) x."""
        system = self._system
        r = system.residual_at(self.x if self.nit or system.x0 is not None else None)
        self.r1 = self.r2 = plus(r, self._shift, self.x) if self._shift else r
        self.y = self._precondition(self.r2)
        square, self.xx = yield Ask(
            [("product M r with the residual r", self.r2, self.y), ("solution x", self.x, self.x)]
        )
        del self.residuals[self.nit :]
        self.residuals.append(math.sqrt(max(0.0, square.real)))
        self.beta1 = self.beta = self.phibar = self.rhs1 = self.residuals[-1]
        if square.real < 0:
            self.breakdown(f"M is not positive definite: <r, M r> = {square.real:.3g}")
        self.oldb = self.dbar = self.epsln = self.rhs2 = self.tnorm2 = self.gmax = self.sn = 0.0
        self.gmin, self.cs = math.inf, -1.0
        self.w = self.w2 = 0 * self.r2

    def step(self) -> Steps:
        v = times(1 / self.beta, self.y)
        y = self._system.A(v)
        y = plus(y, -self._shift, v) if self._shift else y
        y = plus(y, -self.beta / self.oldb, self.r1) if self.oldb else y
        (product,) = yield Ask([("product A v", v, y)])
        alfa = product.real
        self.r1, self.r2 = self.r2, plus(y, -alfa / self.beta, self.r2)
        self.y = self._precondition(self.r2)
        oldeps, delta = self.epsln, self.cs * self.dbar + self.sn * alfa
        t = plus(plus(v, -oldeps, self.w2), -delta, self.w)
        square, tt, xt = yield Ask(
            [
                ("product M r with the Lanczos vector r", self.r2, self.y),
                ("direction", t, t),
                ("solution x", self.x, t),
            ]
        )
        if square.real < 0:
            self.breakdown(f"M is not positive definite: <r, M r> = {square.real:.3g}")
            return
        below = self.beta**2 if self.oldb else 0.0
        self.oldb, self.beta = self.beta, math.sqrt(square.real)
        self.tnorm2 += alfa**2 + self.beta**2 + below
        phi, gamma, root = self._rotate(alfa)
        self.w, self.w2 = times(1 / gamma, t), self.w
        self.x = plus(self.x, phi, self.w)
        step = phi / gamma
        self.xx = max(0.0, self.xx + 2 * step * xt.real + step**2 * tt)
        self.nit += 1
        self._decide(root)

    def verify(self) -> Steps:
        self.anorm = max(self.anorm, math.sqrt(self.tnorm2))
        yield from self._begin()
        size = self.anorm * math.sqrt(self.xx)
        rounding = ROUNDING * self._system.eps * (size + self._system.norm)
        true, asked = self.residuals[-1], self._rtol * size
        if self.least and self.status == CONVERGED:
            r = self._system.residual_at(self.x)
            image = plus(self._system.A(r), -self._shift, r)
            (square,) = yield Ask([("product A r with the residual r", image, image)])
            true, asked = math.sqrt(square), self._rtol * self.anorm * true
            rounding *= self.anorm
        if self.status == CONVERGED and not self.confirmed(true <= 1.001 * asked + rounding, true):
            yield from self._compare_sides()

    def _compare_sides(self) -> Steps:
        """End the method if <B r, x> is not <r, B x>, B = A - shift: the recurrence is that of a
        Hermitian one."""
        r, x = self.r2, self.x
        image = plus(self._system.A(r), -self._shift, r)
        other = self._system.b - r
        one, two, *squares = yield Ask(
            [
                ("product A r with x", image, x),
                ("product A x with r", r, other),
                *(("residual or its image", v, v) for v in (image, x, r, other)),
            ]
        )
        ir, xx, rr, ix = map(math.sqrt, squares)
        if abs(one - two) > math.sqrt(self._system.eps) * (ir * xx + rr * ix):
            self.breakdown(
                f"‖b - A x‖ = {self.residuals[-1]:.3g}, and not as the recurrence has it: A is not "
                f"Hermitian (linop.testing.check_self_adjoint tests it; gmres takes any A)"
            )

    def _precondition(self, r: Vector) -> Vector:
        M = self._system.M
        return r if M is None else M(r)

    def _rotate(self, alfa: float) -> tuple[float, float, float]:
        """The next rotation: the step, its denominator, and ‖A r‖ / ‖r‖ of the residual before.

        A denominator that is zero to rounding says that A is singular, and that no step along this
        direction makes the residual less.
        """
        gbar = self.sn * self.dbar - self.cs * alfa
        self.epsln, self.dbar = self.sn * self.beta, -self.cs * self.beta
        root = math.hypot(gbar, self.dbar)
        gamma = math.hypot(gbar, self.beta)
        if gamma <= self._system.eps * math.sqrt(self.tnorm2):
            self.cs, self.sn = 0.0, 1.0
            return 0.0, 1.0, root
        self.cs, self.sn = gbar / gamma, self.beta / gamma
        phi = self.cs * self.phibar
        self.phibar *= self.sn
        self.gmax, self.gmin = max(self.gmax, gamma), min(self.gmin, gamma)
        return phi, gamma, root

    def _decide(self, root: float) -> None:
        """End the method by the rules of SciPy's source, in its order."""
        self.residuals.append(self.phibar)
        anorm, xnorm = math.sqrt(self.tnorm2), math.sqrt(self.xx)
        eps = self._system.eps
        solves = self.phibar / (anorm * xnorm) if anorm * xnorm else math.inf
        minimum = root / anorm if anorm else 0.0
        cond = self.gmax / self.gmin if self.gmax else math.inf
        words = f"‖r‖/(‖A‖ ‖x‖) = {solves:.3g}"
        least = f"‖A r‖/(‖A‖ ‖r‖) = {minimum:.3g}"
        asked = f"at most rtol = {self._rtol:.3g} is asked"
        rounded = anorm * xnorm * eps >= self.beta1 or 1 + solves <= 1
        self.least = solves > self._rtol and (minimum <= self._rtol or not rounded)
        if solves <= self._rtol:
            self.end(CONVERGED, f"converged: {words}, {asked}")
        elif minimum <= self._rtol:
            self.end(CONVERGED, f"converged to a least-squares solution: {least}, {asked}")
        elif rounded:
            self.end(CONVERGED, f"converged to rounding: {words}")
        elif 1 + minimum <= 1:
            self.end(CONVERGED, f"converged to a least-squares solution to rounding: {least}")
        elif cond >= 0.1 / eps or not self.beta:
            reason = f"A is singular to rounding: its condition number is {cond:.3g}; {least}"
            self.ended_outside(BREAKDOWN, reason)

    def limits(self) -> str:
        return f", where ‖r‖/(‖A‖ ‖x‖) of at most rtol = {self._rtol:.3g} is asked"
