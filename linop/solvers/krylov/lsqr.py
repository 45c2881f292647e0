"""LSQR of Paige & Saunders: least squares by Golub-Kahan bidiagonalisation."""

from __future__ import annotations

import math
from typing import Any, Unpack

from linop.solvers.arguments import real
from linop.solvers.iteration import Ask, Callback, Control, Reductions, Steps
from linop.solvers.krylov.golub_kahan import Bidiagonalisation, rotation
from linop.solvers.krylov.systems import solve, tolerances
from linop.solvers.result import Result
from linop.solvers.updates import plus
from linop.spaces.vector import Vector


def lsqr(
    A: Any,
    b: Any,
    damp: float = 0.0,
    atol: float = 1e-6,
    btol: float = 1e-6,
    conlim: float = 1e8,
    iter_lim: int | None = None,
    x0: Any = None,
    callback: Callback | None = None,
    maxiter: int | None = None,
    **control: Unpack[Control],
) -> Any:
    """LSQR for min ‖b - A x‖² + damp² ‖x - x0‖²; SciPy's arguments (Paige & Saunders, ACM TOMS 8,
    1982). Two reductions an iteration.

    Args:
        A: an operator, or the plan of one, with an adjoint ``A.H``; of any shape.
        b: right-hand side, or a list of vectors; see `linop.solvers.cg`.
        damp: damping.
        atol, btol: stop when ‖r‖ is at most btol ‖b‖ + atol ‖A‖ ‖x‖, or ‖A* r‖ at most
            atol ‖A‖ ‖r‖; ‖A‖ is estimated.
        conlim: stop when the estimated condition number is above it; 0 for no limit.
        iter_lim, maxiter: iterations, at most; twice the dimension of the domain by default.
        x0: initial guess; zero by default.
        callback: see `linop.solvers.cg`.
        control: see `Control`.

    Returns:
        A `Result` that unpacks as SciPy's ten: x, istop, itn, r1norm, r2norm, anorm, acond, arnorm,
        xnorm and var, which is None (no variances are computed).

    Raises:
        ArgumentError, SpaceError, ShapeError, DTypeError: as `linop.solvers.cg`.

    Example:
        Two measurements of one number, which differ; the least squares solution is their mean:

        >>> A = linop.local_operators.matrix(np.array([[1.0], [1.0]]))
        >>> x, istop, itn, r1norm, *_ = linop.solvers.lsqr(A, np.array([2.0, 4.0]))
        >>> x["x"].round(6).tolist(), round(float(r1norm) ** 2, 6)
        ([3.0], 2.0)
    """
    damp = real("lsqr", "damp", damp)
    numbers = tolerances("lsqr", atol=atol, btol=btol, conlim=conlim)
    return solve(
        lambda system: _Lsqr(system, damp, *numbers),
        A,
        b,
        x0,
        maxiter=iter_lim if maxiter is None else maxiter,
        most=lambda size: 2 * size,
        callback=callback,
        problem=[damp, *numbers],
        adjoint=True,
        name="lsqr",
        **control,
    )


class _Lsqr(Bidiagonalisation):
    """The state of the iteration, in the names of SciPy's source."""

    name = "lsqr"

    def begin(self, x: Vector | None) -> Steps:
        yield from self.begin_vectors(x)
        self.w = self.v
        self.rhobar, self.phibar = self.alpha, self.beta
        self.anorm = self.acond = self.ddnorm = self.res2 = 0.0
        self.xnorm = self.xxnorm = self.z = self.sn2 = 0.0
        self.cs2 = -1.0

    def step(self) -> Steps:
        before, w = self.alpha, self.w
        (ww,) = yield from self.advance_u(("direction w", w, w))
        if self.beta:
            self.anorm = math.hypot(self.anorm, before, self.beta, self._damp)
        rhobar1, psi = self._damped()
        cs, sn, rho = rotation(rhobar1, self.beta)
        phi = cs * self.phibar
        self.phibar *= sn
        self.x = plus(self.x, phi / rho, w)
        self.ddnorm += ww / rho**2
        self.nit += 1
        v = self.next_v()
        (square,) = yield Ask([("product A* u", v, v)], final=True)
        self.advance_v(v, square)
        theta = sn * self.alpha
        self.rhobar = -cs * self.alpha
        self.w = plus(self.v, -theta / rho, w)
        self._solution_norm(rho, theta, phi)
        self.acond = self.anorm * math.sqrt(self.ddnorm)
        self.res2 += psi**2
        rnorm = math.sqrt(self.phibar**2 + self.res2)
        gradient = self.alpha * abs(sn * phi)
        self.decide(rnorm, gradient, self.anorm, self.xnorm, self.acond)

    def _damped(self) -> tuple[float, float]:
        """Eliminate the damping's row."""
        if not self._damp:
            return self.rhobar, 0.0
        rhobar1 = math.hypot(self.rhobar, self._damp)
        psi = self._damp / rhobar1 * self.phibar
        self.phibar *= self.rhobar / rhobar1
        return rhobar1, psi

    def _solution_norm(self, rho: float, theta: float, phi: float) -> None:
        """Estimate ‖x‖ from the rotations."""
        delta, gambar = self.sn2 * rho, -self.cs2 * rho
        rhs = phi - delta * self.z
        self.xnorm = math.sqrt(self.xxnorm + (rhs / gambar) ** 2) if gambar else self.xnorm
        gamma = math.hypot(gambar, theta)
        if gamma:
            self.cs2, self.sn2, self.z = gambar / gamma, theta / gamma, rhs / gamma
        self.xxnorm += self.z**2

    def result(self, reductions: Reductions) -> Result:
        given = self._system.norm_given
        r2norm = self.residuals[-1]
        square = r2norm**2 - self._damp**2 * self.xxnorm
        r1norm = math.copysign(math.sqrt(abs(square)), square)
        numbers = given(r1norm), given(r2norm), self.anorm, self.acond
        return self._result(reductions, *numbers, given(self.gradient), given(self.xnorm), None)
