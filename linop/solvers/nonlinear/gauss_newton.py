"""The Gauss-Newton method, and Levenberg's and Marquardt's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Unpack

import numpy as np

from linop.errors import ArgumentError
from linop.solvers.arguments import function_or_none, operator_of, real, whole
from linop.solvers.iteration import Ask, Callback, Control, Method, Named, Reductions, Steps, run
from linop.solvers.krylov.least_squares import cgls
from linop.solvers.result import BREAKDOWN, CONVERGED, Result
from linop.solvers.updates import plus, times
from linop.solvers.values import Place, first_guess, summed_by, total
from linop.spaces.vector import Vector

TRIALS = 20
"""Steps that are tried in an iteration."""


def gauss_newton(
    fun: Callable[[Vector], Vector],
    jac: Any,
    x0: Any,
    *,
    damp: float = 0.0,
    rtol: float = 1e-8,
    atol: float = 0.0,
    maxiter: int = 100,
    inner_niter: int = 100,
    inner_tol: float = 1e-12,
    callback: Callback | None = None,
    **control: Unpack[Control],
) -> Result:
    """Nonlinear least squares, min ‖fun(x)‖² / 2, by the Gauss-Newton method, or with `damp` that
    of Levenberg and Marquardt.

    Steps d minimize ‖J d + fun(x)‖² + damp² ‖d‖² by `cgls`, with two reductions an iteration of
    its own; beside these an iteration takes two reductions and one for each step that is tried.
    Without damping, a step is halved until ‖fun‖² is lower by a share of what its slope promises.
    With damping, it is kept if ‖fun‖² is lower, and damp is adapted to how well the linear model
    predicted that (Nielsen 1999).

    Args:
        fun: function of a vector that returns the residual, a vector.
        jac: function of a vector that returns the derivative of fun there, an operator or the plan
            of one; or that operator, if it is always the same.
        x0: initial guess, a vector.
        damp: damping of the first step; 0 for the Gauss-Newton method.
        rtol, atol: stop when ‖J* fun(x)‖ is at most max(rtol times its value at x0, atol).
        maxiter: number of iterations, at most.
        inner_niter, inner_tol: `niter` and `tol` of `cgls`.
        callback: called with a copy of x after every iteration; see
            `linop.solvers.iteration.run`.
        control: see `Control`.

    Returns:
        A `Result` with `fun`, the residual; `cost`, ‖fun(x)‖² / 2; `optimality`, ‖J* fun(x)‖ at the
        last x where it was computed; `nfev`, calls of fun; `damp`, the last one; `residuals` are
        ‖fun(x)‖; `reductions` includes those of `cgls`. As a tuple: x, cost, iterations.

    Raises:
        ArgumentError: fun or jac is no function, or they return something else; x0 is no vector; a
            residual is not finite at x0, or another vector anywhere; another argument is wrong.
            SpaceError: a residual is not of J's codomain. DTypeError: an integer dtype.

    Example:
        The square root of 2, as the zero of the residual x² - 2:

        >>> X = linop.Space(linop.Region("x", (1,)))
        >>> def residual(x):
        ...     return x * x - 2
        >>> def derivative(x):
        ...     return linop.local_operators.matrix(np.diag(2 * x["x"]), X, X)
        >>> found = linop.solvers.gauss_newton(residual, derivative, X.vector(np.ones(1)))
        >>> found.x["x"].round(6).tolist()
        [1.414214]
    """
    if not (callable(fun) and callable(jac)):
        raise ArgumentError(
            f"gauss_newton: fun and jac are functions of a Vector, or jac an operator; given "
            f"{fun!r:.60}, {jac!r:.60}"
        )
    x0 = first_guess("gauss_newton", x0)
    damp, rtol, atol, inner_tol = (
        real("gauss_newton", name, value, least=0.0)
        for name, value in (
            ("damp", damp),
            ("rtol", rtol),
            ("atol", atol),
            ("inner_tol", inner_tol),
        )
    )
    maxiter = whole("gauss_newton", "maxiter", maxiter)
    inner_niter = whole("gauss_newton", "inner_niter", inner_niter, 1)
    function_or_none("gauss_newton", "callback", callback)
    reductions = Reductions("gauss_newton")
    method = _GaussNewton(fun, jac, x0, damp, (rtol, atol), (inner_niter, inner_tol), reductions)
    problem = [damp, rtol, atol, inner_niter, inner_tol]
    return run(Place(x0), [method], maxiter, reductions, callback, problem, [x0], **control)[0]


class _GaussNewton(Method):
    """The state of the iteration.

    Attributes:
        r: the residual at x.
        square: ‖r‖².
        damp, growth: damping, and the factor of its square after a step that is not kept.
        limit, gradient: ‖J* r‖ that is asked for, and the last one.
        nfev: calls of the residual function.
    """

    name = "gauss_newton"

    def __init__(
        self,
        fun: Callable[[Vector], Vector],
        jac: Any,
        x0: Vector,
        damp: float,
        tolerances: tuple[float, float],
        inner: tuple[int, float],
        reductions: Reductions,
    ) -> None:
        super().__init__()
        self._fun, self._jac, self._x0, self._inner = fun, jac, x0, inner
        self._damp, self._tolerances, self._reductions = damp, tolerances, reductions

    def start(self) -> Steps:
        self.x, self.nfev, self.damp, self.growth = self._x0.copy(), 0, self._damp, 2.0
        self.limit, self.gradient = math.nan, math.nan
        self.r = self._residual(self.x)
        guess = ("initial guess x0", self.x, self.x)
        _, self.square = yield Ask([guess, ("residual fun(x0)", self.r, self.r)])
        self.residuals.append(math.sqrt(self.square))

    def step(self) -> Steps:
        J = self._derivative()
        back = J.H(self.r)
        (square,) = yield Ask([("gradient J* r", back, back)])
        self.gradient = math.sqrt(square)
        if self._decide():
            return
        taken = yield from (self._damped(J) if self._damp else self._halved(J))
        if taken is None:
            self._no_decrease()
            return
        d, self.r, self.square = taken
        self.x = self.x + d
        self.nit += 1
        self.residuals.append(math.sqrt(self.square))
        yield Ask([("step of x", d, d)], final=True)

    def _halved(self, J: Any) -> Any:
        """A step, its residual and that one's square; None if no step makes it smaller."""
        d = self._solved(J)
        image, t = J(d), 1.0
        for _ in range(TRIALS):
            r = self._residual(plus(self.x, t, d))
            named: Named = ("product of the residual r and J d", self.r, image)
            found, slope = yield Ask([self._trial(r), named])
            if total(found) <= self.square + 2e-4 * t * min(slope.real, 0.0):
                return times(t, d), r, found
            t /= 2
        return None

    def _damped(self, J: Any) -> Any:
        """As `_halved`, with more damping where a step is not kept."""
        for _ in range(TRIALS):
            d = self._solved(J)
            r, model = self._residual(self.x + d), plus(self.r, 1, J(d))
            found, predicted = yield Ask([self._trial(r), ("linear model r + J d", model, model)])
            gain = (self.square - total(found)) / max(self.square - predicted, 1e-300)
            if gain > 1e-4:
                self.damp *= math.sqrt(max(1 / 3, 1 - (2 * gain - 1) ** 3))
                self.growth = 2.0
                return d, r, found
            self.damp *= math.sqrt(self.growth)
            self.growth *= 2
        return None

    def _solved(self, J: Any) -> Vector:
        """The minimizer d of ‖J d + r‖² + damp² ‖d‖²."""
        niter, tol = self._inner
        found = cgls(J, times(-1, self.r), niter=niter, damp=self.damp, tol=tol)
        self._reductions.count += found.reductions
        return found.x  # type: ignore[no-any-return]

    def _trial(self, r: Vector) -> Named:
        """‖r‖² as a product that may be infinite: such a step is not kept."""
        partial = r.space.partial_inners(r, r)
        squares = {worker: float(one.real) for worker, one in partial.items()}
        finite = {w: one if math.isfinite(one) else math.inf for w, one in squares.items()}
        return summed_by("a residual", r, finite)

    def _residual(self, x: Vector) -> Vector:
        self.nfev += 1
        r = self._fun(x)
        if not isinstance(r, Vector):
            raise ArgumentError(f"gauss_newton: fun returns a Vector; given {type(r).__name__}")
        return r

    def _derivative(self) -> Any:
        constant = hasattr(self._jac, "H") and not isinstance(self._jac, type)
        J = self._jac if constant else self._jac(self.x)
        return operator_of("gauss_newton", J, "jac(x)", adjoint=True)

    def _decide(self) -> bool:
        """True if the gradient is small enough; the first one decides what is."""
        rtol, atol = self._tolerances
        if math.isnan(self.limit):
            self.limit = max(rtol * self.gradient, atol)
        if self.gradient <= self.limit or not self.square:
            self.end(CONVERGED, f"converged: ‖J* r‖ = {self.gradient:.3g}{self.limits()}")
        return self.status is not None

    def _no_decrease(self) -> None:
        """End: at rounding errors converged, else a breakdown."""
        words = (
            f"iteration {self.nit + 1}: ‖fun(x)‖ is not lower after any of {TRIALS} steps: it is "
            f"at its rounding errors, not finite, or jac is not its derivative"
        )
        self.ended_outside(BREAKDOWN, words)

    def progress(self) -> dict[str, float]:
        return {"residual": self.residuals[-1], "gradient": self.gradient}

    def limits(self) -> str:
        return f", where at most max(rtol ‖J* r at x0‖, atol) = {self.limit:.3g} is asked"

    def result(self, reductions: Reductions) -> Result:
        cost = float(np.float64(self.square) / 2)
        others = {
            "fun": self.r,
            "cost": cost,
            "optimality": self.gradient,
            "nfev": self.nfev,
            "damp": self.damp,
        }
        values = self.x, cost, self.nit
        return self.finished(values, self.x, self.residuals, reductions, **others)
