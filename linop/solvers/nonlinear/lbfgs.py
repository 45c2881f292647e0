"""Limited-memory BFGS."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from numbers import Real
from typing import Any, Unpack

import numpy as np

from linop.errors import ArgumentError
from linop.solvers.arguments import function_or_none, real, whole
from linop.solvers.iteration import Ask, Callback, Control, Method, Named, Reductions, Steps, run
from linop.solvers.nonlinear.wolfe import Point, search
from linop.solvers.result import BREAKDOWN, CONVERGED, Result
from linop.solvers.updates import combined, plus, times
from linop.solvers.values import Place, differs, first_guess, same_on_all
from linop.spaces.vector import Vector

Function = Callable[[Vector], tuple[float, Vector]]


def lbfgs(
    fun: Function,
    x0: Any,
    *,
    maxcor: int = 10,
    rtol: float = 1e-6,
    atol: float = 0.0,
    maxiter: int = 1000,
    maxls: int = 20,
    callback: Callback | None = None,
    **control: Unpack[Control],
) -> Result:
    """Limited-memory BFGS for the minimum of a smooth function of a vector.

    The two-loop recursion (Nocedal & Wright 2006, algorithm 7.4) on the table of the inner products
    of its vectors (Chen, Wang & Zhou 2014), of which an iteration computes 5 maxcor new ones, in
    one reduction; one more for each evaluation, of which most iterations take one: 2 an iteration.

    Args:
        fun: function of a vector that returns its value and its gradient, a vector of the same
            space; the value is the same on all workers, as that of ``v.inner(w)``. Of complex
            vectors the gradient is that for Re <v, w>.
        x0: initial guess, a vector.
        maxcor: number of corrections that are kept, as in SciPy's L-BFGS-B.
        rtol, atol: stop when the norm of the gradient is at most max(rtol ‖gradient at x0‖, atol).
        maxiter: number of iterations, at most.
        maxls: evaluations of a line search (strong Wolfe conditions), at most.
        callback: called with a copy of x after every iteration; see
            `linop.solvers.iteration.run`.
        control: see `Control`.

    Returns:
        A `Result` with `fun`, the value; `jac`, the gradient; `nfev`, evaluations; `cost`, the
        values at x0 and after each iteration; `residuals` are norms of the gradient. status is 3
        where a line search finds no lower value. As a tuple: x, fun, and a dict with grad, task,
        nit, funcalls, as SciPy's ``fmin_l_bfgs_b``.

    Raises:
        ArgumentError: fun is no function, or returns something else, or other values on other
            workers, or no finite value at x0; x0 is no vector; a gradient is not finite; another
            argument is wrong. DTypeError: an integer dtype. SpaceError: a gradient of another
            space.

    Example:
        The function ‖x - 3‖² / 2, whose gradient is x - 3:

        >>> X = linop.TensorSpace((4,), linop.Partition((2,)))
        >>> def fun(x):
        ...     gradient = x - 3
        ...     return gradient.inner(gradient) / 2, gradient
        >>> found = linop.solvers.lbfgs(fun, X.zeros())
        >>> X.gather(found.x).round(6).tolist(), found.fun < 1e-10
        ([3.0, 3.0, 3.0, 3.0], True)
    """
    if not callable(fun):
        raise ArgumentError(f"lbfgs: fun is a function of a Vector; given {fun!r}")
    x0 = first_guess("lbfgs", x0)
    rtol, atol = real("lbfgs", "rtol", rtol, least=0.0), real("lbfgs", "atol", atol, least=0.0)
    numbers = {"maxcor": (maxcor, 1), "maxls": (maxls, 1), "maxiter": (maxiter, 0)}
    maxcor, maxls, maxiter = (whole("lbfgs", n, *given) for n, given in numbers.items())
    function_or_none("lbfgs", "callback", callback)
    method = _Lbfgs(fun, x0, maxcor, rtol, atol, maxls)
    problem = [maxcor, rtol, atol, maxls]
    reductions = Reductions("lbfgs")
    return run(Place(x0), [method], maxiter, reductions, callback, problem, [x0], **control)[0]


class _Lbfgs(Method):
    """The state of the iteration.

    Attributes:
        fun, jac: value and gradient at x.
        s, y: steps and changes of the gradient, the latest last.
        sy, yy, sg, yg: tables of Re <s, y>, Re <y, y>, Re <s, jac> and Re <y, jac>.
        limit: the norm of the gradient that is asked for.
        nfev: evaluations.
        cost: values at x0 and after each iteration.
    """

    name = "lbfgs"

    def __init__(
        self, fun: Function, x0: Vector, maxcor: int, rtol: float, atol: float, maxls: int
    ) -> None:
        super().__init__()
        self._fun, self._x0, self._most, self._maxls = fun, x0, maxcor, maxls
        self._rtol, self._atol = rtol, atol

    def start(self) -> Steps:
        self.x, self.nfev = self._x0.copy(), 0
        self.fun, self.jac = self._evaluated(self.x)
        if not math.isfinite(self.fun):
            raise ArgumentError(f"lbfgs: fun(x0) is {self.fun}: give an x0 where it is finite")
        guess = ("initial guess x0", self.x, self.x)
        named = [guess, ("gradient", self.jac, self.jac), *same_on_all(self.x, self.fun)]
        _, square, *codes = yield Ask(named)
        self._same(codes)
        self.cost, self.residuals = [self.fun], [math.sqrt(square)]
        self.limit = max(self._rtol * self.residuals[0], self._atol)
        self._forget()
        self._decide()

    def _forget(self) -> None:
        self.s: list[Vector] = []
        self.y: list[Vector] = []
        self.sy, self.yy = np.zeros((0, 0)), np.zeros((0, 0))
        self.sg, self.yg = np.zeros(0), np.zeros(0)

    def step(self) -> Steps:
        p, slope = self._direction()
        if not slope < 0 and self.s:  # of rounding errors
            self._forget()
            p, slope = self._direction()
        first = 1.0 if self.s else min(1.0, 1 / self.residuals[-1])
        start = Point(0.0, self.fun, slope)
        found = yield from search(lambda t: self._at(p, t), start, first, self._maxls)
        if found is None:
            self._no_decrease()
            return
        x, jac = found.found
        s, y = times(found.t, p), jac - self.jac
        self.x, self.jac, self.fun = x, jac, found.value
        self.nit += 1
        numbers = yield Ask(self._products(s, y), final=True)
        self._keep(s, y, [float(one.real) for one in numbers])
        self._decide()

    def _evaluated(self, x: Vector) -> tuple[float, Vector]:
        """Value and gradient.

        Raises:
            ArgumentError, SpaceError: they are none.
        """
        self.nfev += 1
        found = self._fun(x)
        value, jac = found if isinstance(found, tuple) and len(found) == 2 else (None, None)
        if (
            not isinstance(value, Real | np.ndarray)
            or np.size(value) != 1
            or np.iscomplexobj(value)
        ):
            raise ArgumentError(
                f"lbfgs: fun returns a real value and a gradient, (value, Vector); given "
                f"{found!r:.80}"
            )
        if not isinstance(jac, Vector):
            raise ArgumentError(
                f"lbfgs: the gradient that fun returns is a Vector; given {type(jac).__name__}"
            )
        x.space.same_as(jac.space, "lbfgs, gradient")
        return float(np.reshape(value, ())), jac

    def _at(self, p: Vector, t: float) -> Generator[Ask, list[Any], Point]:
        """The point x + t p of a line search."""
        x = plus(self.x, t, p)
        value, jac = self._evaluated(x)
        codes = same_on_all(x, value)
        finite = math.isfinite(value)
        slopes: list[Named] = [("product of gradient and direction", p, jac)] * finite
        found = yield Ask([*codes, *slopes])
        self._same(found[: len(codes)])
        return Point(t, value, float(found[-1].real) if finite else 0.0, (x, jac))

    def _same(self, codes: list[Any]) -> None:
        if differs(codes):
            raise ArgumentError(
                "lbfgs: fun returns different values on the workers; return the sum over all "
                "workers, as of v.inner(w), on each of them"
            )

    def _direction(self) -> tuple[Vector, float]:
        """- H jac, with H the approximate inverse of the Hessian, and its product with jac."""
        square, k = self.residuals[-1] ** 2, len(self.s)
        if not k:
            return times(-1, self.jac), -square
        rho = 1 / np.diagonal(self.sy)
        scale = self.sy[-1, -1] / self.yy[-1, -1]
        alpha, delta = np.zeros(k), np.zeros(k)
        for i in reversed(range(k)):
            alpha[i] = rho[i] * (self.sg[i] - self.sy[i] @ alpha)
        for i in range(k):
            rest = scale * (self.yg[i] - self.yy[i] @ alpha) + self.sy[:, i] @ delta
            delta[i] = alpha[i] - rho[i] * rest
        factors = [-scale, *(scale * alpha), *(-delta)]
        p = combined(factors, [self.jac, *self.y, *self.s])
        return p, float(-scale * (square - alpha @ self.yg) - delta @ self.sg)

    def _products(self, s: Vector, y: Vector) -> list[Named]:
        """The vectors that the next direction needs, beside the ones kept."""
        jac, steps, changes = self.jac, [*self.s, s], [*self.y, y]
        return [
            ("gradient", jac, jac),
            *(("product of gradient and step", one, jac) for one in steps),
            *(("product of gradients", one, jac) for one in changes),
            *(("product of step and change of the gradient", one, y) for one in steps),
            *(("product of step and change of the gradient", s, one) for one in self.y),
            *(("product of changes of the gradient", one, y) for one in changes),
        ]

    def _keep(self, s: Vector, y: Vector, numbers: list[float]) -> None:
        """Enter a step, and drop the oldest one of more than are kept; one without curvature is
        not entered."""
        k = len(self.s)
        parts = np.split(np.array(numbers), np.cumsum([1, k + 1, k + 1, k + 1, k]))
        (square,), sg, yg, sy, ys, yy = parts
        self.cost.append(self.fun)
        self.residuals.append(math.sqrt(square))
        if not sy[k] > np.finfo(float).eps * yy[k]:
            self.sg, self.yg = sg[:k], yg[:k]
            return
        first = max(0, k + 1 - self._most)
        self.s, self.y = [*self.s, s][first:], [*self.y, y][first:]
        self.sg, self.yg = sg[first:], yg[first:]
        self.sy = np.block([[self.sy, sy[:k, None]], [ys[None], sy[k:, None]]])[first:, first:]
        self.yy = np.block([[self.yy, yy[:k, None]], [yy[None]]])[first:, first:]

    def _decide(self) -> None:
        norm = self.residuals[-1]
        if norm <= self.limit:
            self.end(CONVERGED, f"converged: ‖gradient‖ = {norm:.3g}{self.limits()}")

    def _no_decrease(self) -> None:
        self.ended_outside(
            BREAKDOWN,
            f"iteration {self.nit + 1}: no lower value in {self._maxls} evaluations along the "
            f"direction: the value is at its rounding errors, not finite, or the gradient is not "
            f"its derivative",
        )

    def progress(self) -> dict[str, float]:
        return {"gradient": self.residuals[-1], "value": self.fun}

    def limits(self) -> str:
        return f", where at most max(rtol ‖gradient at x0‖, atol) = {self.limit:.3g} is asked"

    def result(self, reductions: Reductions) -> Result:
        said = {"grad": self.jac, "task": self.message, "nit": self.nit, "funcalls": self.nfev}
        others = {"fun": self.fun, "jac": self.jac, "nfev": self.nfev, "cost": self.cost}
        values = self.x, self.fun, said
        return self.finished(values, self.x, self.residuals, reductions, **others)
