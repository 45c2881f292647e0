"""The primal-dual method of Chambolle and Pock."""

from __future__ import annotations

import math
from typing import Any, Unpack

from linop.errors import ArgumentError
from linop.solvers.arguments import function_or_none, operator_of, real, vector_of, whole
from linop.solvers.iteration import Ask, Callback, Control, Method, Reductions, Steps, run
from linop.solvers.prox.maps import ProximalMap, positive
from linop.solvers.result import CONVERGED, Result
from linop.solvers.splitting.operator_norm import squared_norm
from linop.solvers.updates import plus, times
from linop.solvers.values import Value, map_or_none
from linop.spaces.vector import Vector


def primal_dual(
    K: Any,
    f: ProximalMap,
    g: ProximalMap | None,
    x0: Any,
    *,
    tau: float | None = None,
    mu: float | None = None,
    theta: float = 1.0,
    niter: int = 500,
    tol: float = 1e-6,
    callback: Callback | None = None,
    **control: Unpack[Control],
) -> Result:
    """Primal-dual method (Chambolle & Pock 2011, algorithm 1) for min f(K x) + g(x).

    Each iteration applies K and K.H once, takes both proximal maps and one reduction (and those
    that the maps take). Maps that iterate begin at the last x and dual variable.

    Args:
        K: an operator, or the plan of one.
        f, g: maps of `linop.solvers.prox`; g may be None, for 0. PyProximal's PrimalDual calls them
            proxg and proxf.
        x0: initial guess: a vector, or an array; on workers of an SPMD program that of
            ``backend.vector``, or this worker's array or arrays by region name.
        tau, mu: steps of x and of the dual variable, tau mu ‖K‖² <= 1. By default of an estimate of
            ‖K‖, equal if both are missing, and shortened where the iterates show that they are too
            long.
        theta: extrapolation, from 0 to 1.
        niter: number of iterations, at most.
        tol: stop when the changes of x and of the dual variable are at most tol times their norms.
        callback: called with a copy of x after every iteration; see
            `linop.solvers.iteration.run`.
        control: see `Control`.

    Returns:
        A `Result` with `y`, the dual variable; `cost`, the objective after each iteration (empty if
        a map has no value, infinity where x is not feasible yet), `fun`, the last of them, `tau`
        and `mu`; `residuals` are the larger of the two relative changes. As a tuple: x, y.

    Raises:
        ArgumentError: K is no operator, f or g no map, x0 no vector, a vector is not finite, or
            another argument is wrong. SpaceError, ShapeError, DTypeError: see
            `linop.solvers.arguments.vector_of`.

    Example:
        Total variation, f(K x), and the distance from a noisy step of height 4:

        >>> X = linop.TensorSpace((4,), linop.Partition((2,)))
        >>> prox, data = linop.solvers.prox, X.scatter(np.array([1.0, 0.0, 5.0, 4.0]))
        >>> K = prox.gradient(X)
        >>> found = linop.solvers.primal_dual(K, prox.l1(0.5), prox.squared_l2(1.0, data), data)
        >>> X.gather(found.x).round(3).tolist()  # two flat pieces
        [0.75, 0.75, 4.25, 4.25]
    """
    name = "primal_dual"
    operator_of(name, K, "K", adjoint=True)
    x0 = vector_of(name, K, x0, "x0", "domain", "K")
    map_or_none(name, "f", f, none=False)
    map_or_none(name, "g", g)
    tau, mu = (
        None if step is None else positive(f"{name}: {what}", step)
        for what, step in (("tau", tau), ("mu", mu))
    )
    theta, tol = real(name, "theta", theta, least=0.0), real(name, "tol", tol, least=0.0)
    if theta > 1:
        raise ArgumentError(f"{name}: theta is a number from 0 to 1; given {theta:g}")
    niter = whole(name, "niter", niter)
    function_or_none(name, "callback", callback)
    method = _PrimalDual(K, f, g, x0, (tau, mu), theta, tol)
    problem = [tau, mu, theta, tol, repr(f), repr(g)]
    return run(K, [method], niter, Reductions(name), callback, problem, [x0], **control)[0]


class _PrimalDual(Method):
    """The state of the iteration.

    Attributes:
        y: the dual variable.
        k, bar: K x, and K of the extrapolated x.
        tau, mu: steps.
        cost: the objective after each iteration.
    """

    name = "primal_dual"

    def __init__(
        self,
        K: Any,
        f: ProximalMap,
        g: ProximalMap | None,
        x0: Vector,
        steps: tuple[float | None, float | None],
        theta: float,
        tol: float,
    ) -> None:
        super().__init__()
        self._K, self._f, self._g, self._x0 = K, f, g, x0
        self._dual = f.conjugate()
        self._steps, self._theta, self._tol = steps, theta, tol

    def start(self) -> Steps:
        self.x = self._x0.copy()
        self.k = self.bar = self._K(self.x)
        self.y = times(0, self.k)
        self.cost: list[float] = []
        yield Ask([("initial guess x0", self.x, self.x), ("product K x0", self.k, self.k)])
        self.tau, self.mu = yield from self._lengths()

    def _lengths(self) -> Any:
        """Both steps: those given, the others of the norm of K."""
        tau, mu = self._steps
        if tau is not None and mu is not None:
            return tau, mu
        square = (yield from squared_norm(self._K, self.x)) or 1.0
        if tau is None and mu is None:
            return 1 / math.sqrt(square), 1 / math.sqrt(square)
        return tau or 1 / (square * (mu or 1.0)), mu or 1 / (square * (tau or 1.0))

    def step(self) -> Steps:
        y = self._dual.prox(plus(self.y, self.mu, self.bar), self.mu, self.y)
        v = plus(self.x, -self.tau, self._K.H(y))
        x = v if self._g is None else self._g.prox(v, self.tau, self.x)
        k = self._K(x)
        moves = x - self.x, y - self.y, k - self.k
        self.x, self.y, self.k = x, y, k
        self.bar = plus(k, self._theta, moves[2])
        self.nit += 1
        what = "step of x", "step of the dual variable", "image K of a step"
        named = [*zip(what, moves, strict=True), ("solution x", x), ("dual variable y", y)]
        value = Value((self._f, k), (self._g, x))
        sources = [
            *((f"result of {self._dual}.prox", y), ("product K* y", v)),
            *((f"result of {self._g}.prox", x), ("product K x", k)),
        ]
        numbers = yield Ask([*((n, w, w) for n, w in named), *value.pairs], True, sources)
        moved, dual, image, xx, yy = numbers[:5]
        if value.known:
            self.cost.append(value.of(numbers[5:]))
        self._decide(_relative(moved, xx), _relative(dual, yy))
        longest = self.tau * self.mu * image
        if None in self._steps and longest > moved * (1 + 1e-6):
            self._shorten(max(longest / moved, 1.1) if moved else 1.1)

    def _shorten(self, factor: float) -> None:
        """Divide the product of the steps by a factor, which is shared by those not given."""
        tau, mu = self._steps
        root = math.sqrt(factor) if tau is mu is None else factor
        self.tau /= root if tau is None else 1
        self.mu /= root if mu is None else 1

    def _decide(self, moved: float, dual: float) -> None:
        self.residuals.append(max(moved, dual))
        if self.residuals[-1] <= self._tol:
            self.end(
                CONVERGED,
                f"converged: the changes of x and of the dual variable, {moved:.3g} and "
                f"{dual:.3g} times their norms, are at most tol = {self._tol:.3g}",
            )

    def progress(self) -> dict[str, float]:
        objective = {"objective": self.cost[-1]} if self.cost else {}
        return {"change": self.residuals[-1] if self.residuals else math.inf, **objective}

    def limits(self) -> str:
        return f", where a change of {self._tol:.3g} is asked"

    def result(self, reductions: Reductions) -> Result:
        others = {
            "y": self.y,
            "cost": self.cost,
            "fun": self.cost[-1] if self.cost else None,
            "tau": self.tau,
            "mu": self.mu,
        }
        values = self.x, self.y
        return self.finished(values, self.x, self.residuals, reductions, **others)


def _relative(change: float, square: float) -> float:
    """The change relative to the norm, of their squares."""
    return math.sqrt(change / square) if square else math.inf if change else 0.0
