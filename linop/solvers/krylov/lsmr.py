"""LSMR of Fong & Saunders: least squares with a gradient that falls in every iteration."""

from __future__ import annotations

import math
from typing import Any, Unpack

from linop.solvers.arguments import real
from linop.solvers.iteration import Ask, Callback, Control, Reductions, Steps
from linop.solvers.krylov.golub_kahan import Bidiagonalisation, rotation
from linop.solvers.krylov.systems import solve, tolerances, unknowns
from linop.solvers.result import Result
from linop.solvers.updates import plus
from linop.spaces.vector import Vector


def lsmr(
    A: Any,
    b: Any,
    damp: float = 0.0,
    atol: float = 1e-6,
    btol: float = 1e-6,
    conlim: float = 1e8,
    maxiter: int | None = None,
    x0: Any = None,
    callback: Callback | None = None,
    **control: Unpack[Control],
) -> Any:
    """LSMR for min ‖b - A x‖² + damp² ‖x - x0‖²; SciPy's arguments (Fong & Saunders, SIAM J. Sci.
    Comput. 33, 2011). Two reductions an iteration. It is MINRES on the normal equations, and may
    be stopped earlier than LSQR, which is CG on them.

    Args:
        A: an operator, or the plan of one, with an adjoint ``A.H``; of any shape.
        b: right-hand side, or a list of vectors; see `linop.solvers.cg`.
        damp: damping.
        atol, btol: stop when ‖r‖ is at most btol ‖b‖ + atol ‖A‖ ‖x‖, or ‖A* r‖ at most
            atol ‖A‖ ‖r‖; ‖A‖ is estimated.
        conlim: stop when the estimated condition number is above it; 0 for no limit.
        maxiter: the smaller dimension of A by default.
        x0: initial guess; zero by default.
        callback: see `linop.solvers.cg`. That it asked to stop travels with the next iteration's
            first reduction.
        control: see `Control`.

    Returns:
        A `Result` that unpacks as SciPy's eight: x, istop, itn, normr, normar, norma, conda, normx.

    Raises:
        ArgumentError, SpaceError, ShapeError, DTypeError: as `linop.solvers.cg`.

    Example:
        Two measurements of one number, which differ; the least squares solution is their mean:

        >>> A = linop.local_operators.matrix(np.array([[1.0], [1.0]]))
        >>> x, istop, itn, normr, *_ = linop.solvers.lsmr(A, np.array([2.0, 4.0]))
        >>> x["x"].round(6).tolist(), round(float(normr) ** 2, 6)
        ([3.0], 2.0)
    """
    damp = real("lsmr", "damp", damp)
    numbers = tolerances("lsmr", atol=atol, btol=btol, conlim=conlim)
    codomain = getattr(A, "codomain", None)
    return solve(
        lambda system: _Lsmr(system, damp, *numbers),
        A,
        b,
        x0,
        maxiter=maxiter,
        most=lambda size: min(size, unknowns(A, codomain) if codomain else size),
        callback=callback,
        problem=[damp, *numbers],
        adjoint=True,
        name="lsmr",
        **control,
    )


class _Lsmr(Bidiagonalisation):
    """The state of the iteration, in the names of SciPy's source."""

    name = "lsmr"

    def begin(self, x: Vector | None) -> Steps:
        yield from self.begin_vectors(x)
        (self.xx,) = yield Ask([("initial guess x0", self.x, self.x)])
        self.h, self.hbar = self.v, 0 * self.v
        self.zetabar, self.alphabar = self.alpha * self.beta, self.alpha
        self.rho = self.rhobar = self.cbar = 1.0
        self.sbar = self.zeta = 0.0
        self.betadd, self.rhodold = self.beta, 1.0
        self.betad = self.tautildeold = self.thetatilde = self.d = 0.0
        self.squares = self.alpha**2
        self.anorm, self.cond, self.maxrbar, self.minrbar = self.alpha, 1.0, 0.0, math.inf

    def step(self) -> Steps:
        yield from self.advance_u()
        chat, shat, alphahat = rotation(self.alphabar, self._damp)
        rhoold, rhobarold, zetaold = self.rho, self.rhobar, self.zeta
        c, s, self.rho = rotation(alphahat, self.beta)
        thetabar, rhotemp = self.sbar * self.rho, self.cbar * self.rho
        self.hbar = plus(self.h, -thetabar * self.rho / (rhoold * rhobarold), self.hbar)
        v = self.next_v()
        pairs = [("product A* u", v, v), ("direction", self.hbar, self.hbar)]
        square, hh, xh = yield Ask([*pairs, ("solution x", self.x, self.hbar)])
        self.advance_v(v, square)
        thetanew, self.alphabar = s * self.alpha, c * self.alpha
        self.cbar, self.sbar, self.rhobar = rotation(rhotemp, thetanew)
        self.zeta, self.zetabar = self.cbar * self.zetabar, -self.sbar * self.zetabar
        step = self.zeta / (self.rho * self.rhobar)
        self.x = plus(self.x, step, self.hbar)
        self.xx = max(0.0, self.xx + 2 * step * xh.real + step**2 * hh)
        self.h = plus(self.v, -thetanew / self.rho, self.h)
        self.nit += 1
        acute, check = chat * self.betadd, -shat * self.betadd
        self.d, self.betadd = self.d + check**2, -s * acute
        rnorm = self._residual(c * acute, thetabar, zetaold)
        self._estimates(rhobarold, rhotemp)
        self.decide(rnorm, abs(self.zetabar), self.anorm, math.sqrt(self.xx), self.cond)

    def _residual(self, betahat: float, thetabar: float, zetaold: float) -> float:
        """‖r‖ of the damped problem, by the rotations."""
        thetatildeold = self.thetatilde
        ctilde, stilde, rhotilde = rotation(self.rhodold, thetabar)
        self.thetatilde, self.rhodold = stilde * self.rhobar, ctilde * self.rhobar
        self.betad = -stilde * self.betad + ctilde * betahat
        self.tautildeold = (zetaold - thetatildeold * self.tautildeold) / rhotilde
        taud = (self.zeta - self.thetatilde * self.tautildeold) / self.rhodold
        return math.sqrt(self.d + (self.betad - taud) ** 2 + self.betadd**2)

    def _estimates(self, rhobarold: float, rhotemp: float) -> None:
        """Norm and condition number of A."""
        self.squares += self.beta**2
        self.anorm = math.sqrt(self.squares)
        self.squares += self.alpha**2
        if self.nit > self.begun + 1:  # before, it is 1, whichever the units
            self.maxrbar = max(self.maxrbar, rhobarold)
            self.minrbar = min(self.minrbar, rhobarold)
        self.cond = max(self.maxrbar, rhotemp) / min(self.minrbar, rhotemp)

    def result(self, reductions: Reductions) -> Result:
        given = self._system.norm_given
        numbers = given(self.residuals[-1]), given(self.gradient), self.anorm, self.cond
        return self._result(reductions, *numbers, given(math.sqrt(self.xx)))
