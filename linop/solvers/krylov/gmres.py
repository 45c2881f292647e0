"""GMRES of Saad & Schultz, restarted, with classical Gram-Schmidt done twice."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Unpack

import numpy as np

from linop.errors import ArgumentError
from linop.solvers.arguments import whole
from linop.solvers.iteration import Ask, Control, Reductions, Steps
from linop.solvers.krylov.orthogonal import orthogonalised
from linop.solvers.krylov.systems import LinearMethod, System, solve, tolerances, unknowns
from linop.solvers.result import Result
from linop.solvers.updates import combined, plus, times
from linop.spaces.vector import Vector


def gmres(
    A: Any,
    b: Any,
    x0: Any = None,
    *,
    rtol: float = 1e-5,
    atol: float = 0.0,
    restart: int | None = None,
    maxiter: int | None = None,
    M: Any = None,
    callback: Callable[..., object] | None = None,
    callback_type: str = "x",
    **control: Unpack[Control],
) -> Any:
    """The generalised minimum residual method for A x = b, restarted; SciPy's signature (Saad &
    Schultz, SIAM J. Sci. Stat. Comput. 7, 1986).

    Two reductions an iteration, and one a cycle: vectors are made orthogonal to all before them by
    classical Gram-Schmidt, done twice (SciPy's modified Gram-Schmidt needs one for each of them).

    Args:
        A: an operator, the plan of one, or a function of vectors, of a space to itself.
        b: right-hand side, or a list of vectors; see `linop.solvers.cg`.
        x0: initial guess; zero by default.
        rtol, atol: stop when ‖b - A x‖ is at most max(rtol ‖b‖, atol). It is computed after every
            cycle, and estimated in between.
        restart: iterations in a cycle, and vectors kept; at most 20, and the dimension, by default.
        maxiter: number of cycles, at most; 10 times the dimension by default.
        M: approximate inverse of A, applied on the right, so that residuals are those of A x = b
            (SciPy applies it on the left).
        callback: called after every cycle with a copy of x; see `linop.solvers.cg`.
        callback_type: "x"; or "pr_norm", where the callback gets ‖r‖/‖b‖ after every iteration.
        control: see `Control`.

    Returns:
        A `Result` that unpacks as SciPy's x, info (0: converged, -1: breakdown, else iterations
        done). `nit` counts iterations of all cycles.

    Raises:
        ArgumentError, SpaceError, ShapeError, DTypeError: as `linop.solvers.cg`.

    Example:
        A rotation by 90 degrees, which is not Hermitian:

        >>> A = linop.local_operators.matrix(np.array([[0.0, -1.0], [1.0, 0.0]]))
        >>> x, info = linop.solvers.gmres(A, np.array([-2.0, 1.0]))
        >>> x["x"].round(6).tolist(), info
        ([1.0, 2.0], 0)
    """
    rtol, atol = tolerances("gmres", rtol=rtol, atol=atol)
    size = unknowns(A, A.domain) if hasattr(A, "domain") else 20
    cycle = max(1, min(20, size) if restart is None else whole("gmres", "restart", restart, 1))
    if callback_type not in ("x", "pr_norm"):
        raise ArgumentError(f"gmres: callback_type is 'x' or 'pr_norm'; given {callback_type!r}")
    maxiter = None if maxiter is None else cycle * whole("gmres", "maxiter", maxiter)
    return solve(
        lambda system: _Gmres(system, rtol, atol, cycle, callback_type == "pr_norm"),
        A,
        b,
        x0,
        M,
        maxiter=maxiter,
        most=lambda size: 10 * size * cycle,
        callback=callback,
        problem=[rtol, atol, cycle],
        name="gmres",
        **control,
    )


class _Gmres(LinearMethod):
    """The state of the iteration.

    Attributes:
        basis: orthonormal vectors of this cycle.
        triangle: (restart, restart) array, the Hessenberg matrix after the rotations.
        rotations: (c, s) of each column.
        first: ‖b - A x‖ at the start of the cycle.
        rest: (restart + 1) array, the right-hand side after the rotations.
    """

    name = "gmres"

    def __init__(self, system: System, rtol: float, atol: float, cycle: int, norms: bool) -> None:
        super().__init__(system, rtol, atol)
        self._cycle, self._norms = cycle, norms

    def start(self) -> Steps:
        system = self._system
        r = system.residual_at(system.x0)
        self.x = system.first(r)
        self.fresh = False
        (rr,) = yield Ask([("residual r", r, r)])
        if not self.converged(math.sqrt(rr)):
            self._begin(r, math.sqrt(rr))

    def _begin(self, r: Vector, norm: float) -> None:
        """Begin a cycle from a residual."""
        self.basis = [times(1 / norm, r)]
        self.triangle = np.zeros((self._cycle, self._cycle), complex)
        self.rotations: list[Any] = []
        self.rest = np.zeros(self._cycle + 1, complex)
        self.rest[0] = self.first = norm

    def step(self) -> Steps:
        system, k = self._system, len(self.basis) - 1
        z = self.basis[k] if system.M is None else system.M(self.basis[k])
        w = system.A(z)
        w, column, norm, before = yield from orthogonalised(w, self.basis, "product A v")
        broken = norm <= system.eps * before
        self.nit += 1
        estimate = self._rotate(k, column, 0.0 if broken else norm)
        self.residuals.append(estimate)
        self.fresh = False
        if not (broken or estimate <= self._limit or k + 1 == self._cycle):
            self.basis.append(times(1 / norm, w))
            return
        self.x, self.fresh = self._corrected(k + 1), True
        r = system.residual_at(self.x)
        (rr,) = yield Ask([("residual b - A x", r, r)], final=True)
        self.residuals.pop()  # the estimate of the number that is known now
        if self.converged(math.sqrt(rr)):
            return
        if broken and math.sqrt(rr) > self.first / 2:
            self.breakdown("A maps the Krylov space to itself, and x is its best: A is singular")
        else:
            self._begin(r, math.sqrt(rr))

    def _rotate(self, k: int, column: list[Any], below: float) -> float:
        """Enter a column of the Hessenberg matrix; returns the estimated ‖r‖."""
        h = np.array([*column, below], complex)
        for j, (c, s) in enumerate(self.rotations):
            h[j], h[j + 1] = c * h[j] + s * h[j + 1], -np.conj(s) * h[j] + c * h[j + 1]
        top = abs(h[k])
        r = math.hypot(top, below)
        phase = h[k] / top if top else 1.0
        c, s = (top / r, phase * below / r) if r else (1.0, 0.0)
        self.rotations.append([float(c), complex(s)])
        self.triangle[:k, k], self.triangle[k, k] = h[:k], phase * r
        self.rest[k], self.rest[k + 1] = c * self.rest[k], -np.conj(s) * self.rest[k]
        return float(abs(self.rest[k + 1]))

    def _corrected(self, count: int) -> Vector:
        """x and the best combination of the basis; a zero on the diagonal, of singular operators,
        takes no part."""
        y = np.zeros(count, complex)
        for k in range(count - 1, -1, -1):
            if pivot := self.triangle[k, k]:
                y[k] = (self.rest[k] - self.triangle[k, k + 1 : count] @ y[k + 1 :]) / pivot
        step = combined(y.tolist(), self.basis[:count])
        return plus(self.x, 1.0, step if self._system.M is None else self._system.M(step))

    def current(self) -> Any:
        if self._norms:
            return _Number(self.residuals[-1] / (self._system.norm or 1.0))
        return super().current() if self.fresh else None

    def result(self, reductions: Reductions) -> Result:
        if not self.fresh and self.nit and self.status != 0:  # the limit, within a cycle
            self.x = self._corrected(len(self.rotations))
        return super().result(reductions)


class _Number(float):
    """A float that has a copy, as the vectors that other callbacks get."""

    def copy(self) -> float:
        return float(self)
