"""Proximal gradient methods for least squares with a proximal map: ISTA and FISTA."""

from __future__ import annotations

import math
from typing import Any, Unpack

from linop.solvers.arguments import function_or_none, operator_of, real, vector_of, whole
from linop.solvers.iteration import Ask, Callback, Control, Method, Reductions, Steps, run
from linop.solvers.prox.maps import ProximalMap, positive
from linop.solvers.result import CONVERGED, Result
from linop.solvers.splitting.operator_norm import squared_norm
from linop.solvers.updates import beyond, makes_vectors, minus, plus, times
from linop.solvers.values import Value, map_or_none
from linop.spaces.vector import Vector


def ista(
    Op: Any,
    y: Any,
    g: ProximalMap | None = None,
    x0: Any = None,
    *,
    sigma: float = 1.0,
    tau: float | None = None,
    niter: int = 500,
    tol: float = 1e-6,
    callback: Callback | None = None,
    **control: Unpack[Control],
) -> Result:
    """Proximal gradient method for min ‖Op x - y‖² / 2 + sigma g(x), without momentum.

    Arguments, result and errors are those of `fista`.

    Example:
        With a diagonal Op each number is a problem of its own: the small ones become zero:

        >>> Op, g = linop.local_operators.matrix(np.eye(3)), linop.solvers.prox.l1()
        >>> found = linop.solvers.ista(Op, np.array([3.0, 0.5, -2.0]), g, tau=1)
        >>> found.x["x"].round(6).tolist()
        [2.0, 0.0, -1.0]
    """
    given = (y, g, x0, sigma, tau, niter, tol, callback)
    return _solve("ista", False, Op, *given, **control)


def fista(
    Op: Any,
    y: Any,
    g: ProximalMap | None = None,
    x0: Any = None,
    *,
    sigma: float = 1.0,
    tau: float | None = None,
    niter: int = 500,
    tol: float = 1e-6,
    callback: Callback | None = None,
    **control: Unpack[Control],
) -> Result:
    """Fast proximal gradient method (Beck & Teboulle 2009) for min ‖Op x - y‖² / 2 + sigma g(x).

    Each iteration applies Op and Op.H once, takes one proximal map and one reduction (and those
    that the map takes). A map that iterates begins at the last x.

    Args:
        Op: an operator, or the plan of one.
        y: data: a vector, or an array; on workers of an SPMD program that of ``backend.vector``,
            or this worker's array or arrays by region name, as the plan takes them.
        g: a map of `linop.solvers.prox`; None for g = 0.
        x0: initial guess; zero by default.
        sigma: weight of g, beside g's own.
        tau: step, at most 1 / ‖Op‖²; by default that of at most 20 power iterations, which is
            shortened where the iterates show it to be too long.
        niter: number of iterations, at most.
        tol: stop when a step's length is at most tol ‖x‖.
        callback: called with a copy of x after every iteration; see
            `linop.solvers.iteration.run`.
        control: see `Control`.

    Returns:
        A `Result` with `cost`, the objective after each iteration (empty if g has no value), `fun`,
        the last of them, and `tau`; `residuals` are ‖Op x - y‖. As a tuple: x, iterations, cost, as
        PyLops' ``fista``.

    Raises:
        ArgumentError: Op is no operator, g no map, y or x0 no vector, a vector is not finite, or
            another argument is wrong. SpaceError, ShapeError, DTypeError: see
            `linop.solvers.arguments.vector_of`.

    Example:
        A LASSO whose solution has two numbers of three that are zero:

        >>> Op = linop.local_operators.matrix(np.array([[2.0, 0.0, 0.0], [0.0, 1.0, 1.0]]))
        >>> found = linop.solvers.fista(Op, np.array([4.0, 1.0]), linop.solvers.prox.l1(), sigma=2)
        >>> found.x["x"].round(4).tolist(), found.success
        ([1.5, 0.0, 0.0], True)
    """
    given = (y, g, x0, sigma, tau, niter, tol, callback)
    return _solve("fista", True, Op, *given, **control)


def _solve(
    name: str,
    fast: bool,
    Op: Any,
    y: Any,
    g: Any,
    x0: Any,
    sigma: float,
    tau: float | None,
    niter: int,
    tol: float,
    callback: Callback | None,
    **control: Any,
) -> Result:
    operator_of(name, Op, "Op", adjoint=True)
    y = vector_of(name, Op, y, "y", "codomain", "Op")
    x0 = None if x0 is None else vector_of(name, Op, x0, "x0", "domain", "Op")
    map_or_none(name, "g", g)
    sigma, tol = positive(f"{name}: sigma", sigma), real(name, "tol", tol, least=0.0)
    tau = None if tau is None else positive(f"{name}: tau", tau)
    niter = whole(name, "niter", niter)
    function_or_none(name, "callback", callback)
    method = _ProximalGradient(name, fast, Op, y, g, x0, sigma, tau, tol)
    likes = [y] if x0 is None else [y, x0]
    problem = [name, sigma, tau, tol, repr(g)]
    return run(Op, [method], niter, Reductions(name), callback, problem, likes, **control)[0]


class _ProximalGradient(Method):
    """The state of the iteration.

    Attributes:
        r: Op x - y.
        z, s: the point that steps start from, and Op z - y.
        tau, t: step, and the number that the momentum is computed of.
        change: length of the last step, relative to ‖x‖.
        cost: the objective after each iteration.
    """

    def __init__(
        self,
        name: str,
        fast: bool,
        Op: Any,
        y: Vector,
        g: ProximalMap | None,
        x0: Vector | None,
        sigma: float,
        tau: float | None,
        tol: float,
    ) -> None:
        super().__init__()
        self._name, self._fast, self._op, self._y, self._g = name, fast, Op, y, g
        self._x0, self._sigma, self._tau, self._tol = x0, sigma, tau, tol
        self._new = makes_vectors(Op)  # so that its results may be overwritten
        self._own = False  # z and s are of memory of their own, not that of x and r
        self._room: tuple[Vector, Vector] | tuple[None, None] = (None, None)

    @property
    def name(self) -> str:  # type: ignore[override]
        return self._name

    def start(self) -> Steps:
        self.x = times(0, self._op.H(self._y)) if self._x0 is None else self._x0.copy()
        self.r = times(-1, self._y) if self._x0 is None else self._op(self.x) - self._y
        self.z, self.s, self.t, self.change = self.x, self.r, 1.0, math.inf
        self.cost: list[float] = []
        start = ("initial guess x0", self.x, self.x)
        rr, _ = yield Ask([("residual Op x - y", self.r, self.r), start])
        self.residuals.append(math.sqrt(rr))
        if self._tau is None:
            square = yield from squared_norm(self._op, self.x)
            self.tau = 1 / square if square else 1.0
        else:
            self.tau = self._tau

    def step(self) -> Steps:
        slope = self._op.H(self.s)
        v = plus(self.z, -self.tau, slope, slope if self._new else None)
        x = v if self._g is None else self._g.prox(v, self.tau * self._sigma, self.x)
        r = self._op(x)
        r = minus(r, self._y, r if self._new else None)
        move, image = (
            minus(a, b, room)
            for a, b, room in zip((x, r), (self.z, self.s), self._room, strict=True)
        )
        value = Value((self._g, x))
        last, self.x, self.r = (self.x, self.r), x, r
        self.nit += 1
        named = [("step of x", move), ("solution x", x), ("residual Op x - y", r)]
        squares = [(what, v, v) for what, v in [*named, ("image of a step", image)]]
        sources = [("product Op* r", v), (f"result of {self._g}.prox", x), ("product Op x", r)]
        numbers = yield Ask([*squares, *value.pairs], True, sources)
        moved, xx, rr, gain = numbers[:4]
        self.residuals.append(math.sqrt(rr))
        if value.known:
            self.cost.append(rr / 2 + self._sigma * value.of(numbers[4:]))
        self._decide(moved, xx)
        too_long = self._tau is None and gain * self.tau > moved * (1 + 1e-6)
        if too_long:
            self.tau = min(moved / gain, 0.9 * self.tau)
        self._go_on(*last, too_long, move, image)

    def _decide(self, moved: float, xx: float) -> None:
        self.change = math.sqrt(moved / xx) if xx else math.inf if moved else 0.0
        if self.change <= self._tol:
            self.end(
                CONVERGED,
                f"converged: the length of a step, {self.change:.3g} ‖x‖, is at most tol = "
                f"{self._tol:.3g} times ‖x‖",
            )

    def _go_on(self, x: Vector, r: Vector, too_long: bool, ahead: Vector, image: Vector) -> None:
        """The point from which the next step starts: beyond the last two, x and the current one;
        the current one where the step was too long.

        Args:
            ahead, image: vectors whose memory is free. That of z and s is, after this.
        """
        if too_long or not self._fast:
            self.z, self.s, self.t = self.x, self.r, 1.0
            self._own, self._room = False, (ahead, image)
            return
        self._room = (self.z, self.s) if self._own else (None, None)
        self._own = True
        t, self.t = self.t, (1 + math.sqrt(1 + 4 * self.t**2)) / 2
        momentum = (t - 1) / self.t
        self.z = beyond(self.x, momentum, x, ahead)
        self.s = beyond(self.r, momentum, r, image)

    def progress(self) -> dict[str, float]:
        objective = {"objective": self.cost[-1]} if self.cost else {}
        return {"change": self.change, **objective, "residual": self.residuals[-1]}

    def limits(self) -> str:
        return f", where a change of {self._tol:.3g} is asked"

    def result(self, reductions: Reductions) -> Result:
        fun = self.cost[-1] if self.cost else None
        values = self.x, self.nit, self.cost
        others = {"cost": self.cost, "fun": fun, "tau": self.tau}
        return self.finished(values, self.x, self.residuals, reductions, **others)
