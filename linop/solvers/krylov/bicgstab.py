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
    has four. ω needs an operator application that needs α, so that two is the least for this
    recurrence. At the end ‖b - A x‖ is computed, by one application and one reduction; where the
    updated r has lost it, the method goes on from the true one.

    Args:
        A: an operator, the plan of one, or a function of vectors, of a space to itself.
        b: right-hand side, or a list of vectors; see `linop.solvers.cg`.
        x0: initial guess; zero by default.
        rtol, atol: stop when ‖b - A x‖ is at most max(rtol ‖b‖, atol).
        maxiter: 10 times the dimension by default.
        M: approximate inverse of A, applied on the right.
        callback: see `linop.solvers.cg`. That it asked to stop travels with the next iteration's
            first reduction.
        control: see `Control`.

    Returns:
        A `Result` that unpacks as SciPy's x, info (0: converged, -10: ρ is zero, -11: α or ω
        is zero or not defined; else iterations done).

    Raises:
        ArgumentError, SpaceError, ShapeError, DTypeError: as `linop.solvers.cg`.

    Example:
        A matrix that is not Hermitian, with six vectors of memory, however many iterations:

        >>> A = linop.local_operators.matrix(np.array([[2.0, 1.0], [0.0, 4.0]]))
        >>> x, info = linop.solvers.bicgstab(A, np.array([4.0, 8.0]), rtol=1e-10)
        >>> x["x"].round(6).tolist(), info
        ([1.0, 2.0], 0)
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
        r = system.residual_at(system.x0)
        self.x = system.first(r)
        self.broken, self.anorm = -10, 0.0
        yield from self._begin(r, False)

    def _begin(self, r: Vector, final: bool) -> Steps:
        """Begin from a residual b - A x, unless it is small enough."""
        self.r = self.shadow = self.p = r
        (rr,) = yield Ask([("residual b - A x", r, r)], final)
        self.rho: complex = rr
        self.first = math.sqrt(rr)
        self.converged(self.first)

    def step(self) -> Steps:
        phat = self._precondition(self.p)
        v = self._system.A(phat)
        sigma, vv, pp = yield Ask(
            [
                ("product A p with the first residual", self.shadow, v),
                ("product A p", v, v),
                ("direction p", phat, phat),
            ]
        )
        if self._vanishes(vv, pp) or not abs(sigma):
            self._breaks(-11, "A p, p the direction, is zero or orthogonal to the first residual")
            return
        alpha = self.rho / sigma
        self.r = plus(self.r, -alpha, v)
        yield from self._stabilise(alpha, phat, v)

    def _stabilise(self, alpha: complex, phat: Vector, v: Vector) -> Steps:
        """The second half of a step, after α and s, which is in `r`."""
        s = self.r
        shat = self._precondition(s)
        t = self._system.A(shat)
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
        if math.sqrt(ss) <= self._limit:
            yield from self._begin(self._system.residual_at(self.x), True)
            return
        if self._vanishes(tt, ss) or not abs(ts):
            self.residuals.append(math.sqrt(ss))
            self._breaks(-11, "A s is zero or orthogonal to s, the residual after half a step")
            return
        omega = ts / tt
        self.x, self.r = plus(self.x, omega, shat), plus(s, -omega, t)
        rr, rho = ss - abs(ts) * (abs(ts) / tt), rs - omega * rt
        if rr <= _CANCELLED * ss:
            pairs = [("residual r", self.r, self.r), ("residual r", self.shadow, self.r)]
            rr, rho = yield Ask(pairs)
        yield from self._finish(math.sqrt(rr), rho, rho / self.rho * (alpha / omega), omega, v)

    def _finish(self, norm: float, rho: complex, beta: complex, omega: complex, v: Vector) -> Steps:
        """The next direction, unless ‖r‖ is small enough."""
        if norm <= self._limit:
            yield from self._begin(self._system.residual_at(self.x), True)
        elif not self.converged(norm) and not self._stagnates(rho, norm):
            self.p = plus(self.r, beta, plus(self.p, -omega, v))
            self.rho = rho

    def _vanishes(self, image: float, square: float) -> bool:
        """True if ‖A p‖², p of this squared norm, is zero to rounding."""
        norm = math.sqrt(image / square) if square else 0.0
        self.anorm = max(self.anorm, norm)
        return norm <= self._system.eps * self.anorm

    def _precondition(self, r: Vector) -> Vector:
        M = self._system.M
        return r if M is None else M(r)

    def _stagnates(self, rho: complex, norm: float) -> bool:
        """True, and the method ended, if the next direction is not defined to rounding."""
        if abs(rho) <= self._system.eps**2 * self.first * norm:
            self._breaks(-10, "the residual is orthogonal to the first one: another x0 may help")
        return self.status is not None

    def _breaks(self, number: int, reason: str) -> None:
        self.broken = number
        self.breakdown(reason)

    def info(self) -> int:
        return self.broken if self.status == 3 else super().info()
