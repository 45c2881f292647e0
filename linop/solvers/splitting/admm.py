"""The alternating direction method of multipliers."""

from __future__ import annotations

import math
from typing import Any, Unpack

from linop.errors import ArgumentError
from linop.solvers.arguments import function_or_none, operator_of, real, vector_of, whole
from linop.solvers.iteration import Ask, Callback, Control, Method, Reductions, Steps, run
from linop.solvers.prox.maps import ProximalMap, positive
from linop.solvers.prox.quadratic import SquaredL2
from linop.solvers.result import CONVERGED, Result
from linop.solvers.updates import times
from linop.solvers.values import Place, Value, first_guess, map_or_none
from linop.spaces.vector import Vector


def admm(
    f: ProximalMap,
    g: ProximalMap,
    x0: Any,
    *,
    Op: Any = None,
    tau: float = 1.0,
    niter: int = 500,
    tol: float = 1e-6,
    callback: Callback | None = None,
    **control: Unpack[Control],
) -> Result:
    """Alternating direction method of multipliers for min f(x) + g(z), where z = x, or z = Op x.

    The scaled form of Boyd et al. (2011), section 3.1.1. An iteration takes one reduction, beside
    those that the maps take; with Op, here or in f, conjugate gradients minimize over x, with two
    reductions an iteration of theirs, from the last x. Other maps that iterate begin at the last x
    and z.

    Args:
        f, g: maps of `linop.solvers.prox`. With Op, f is `prox.squared_l2`, whose niter and rtol
            are those of conjugate gradients; for other f take `primal_dual`.
        x0: initial guess, a vector; with Op also an array, on workers of an SPMD program theirs.
        Op: an operator, or the plan of one.
        tau: step of the proximal maps: 1 / the weight of ‖Op x - z‖² / 2.
        niter: number of iterations, at most.
        tol: stop when ‖Op x - z‖ and the change of z are at most tol times the larger of ‖Op x‖
            and ‖z‖.
        callback: called with a copy of x after every iteration; see
            `linop.solvers.iteration.run`.
        control: see `Control`.

    Returns:
        A `Result` with `z`; `cost`, f(x) + g(z) after each iteration (empty if a map has no value),
        and `fun`, the last of them; `residuals` are the larger of the two quotients that the
        criterion compares; `reductions` includes those of conjugate gradients, not those in other
        maps. As a tuple: x, z.

    Raises:
        ArgumentError: f or g is no map, or f not squared_l2 where Op is given; x0 is no vector, a
            vector is not finite, or another argument is wrong. SpaceError, ShapeError, DTypeError:
            see `linop.solvers.arguments.vector_of`.

    Example:
        The number in [0, 2] that is closest to 5, and to 1:

        >>> X = linop.Space(linop.Region("x", (2,)))
        >>> prox = linop.solvers.prox
        >>> distance = prox.squared_l2(1.0, X.vector(np.array([5.0, 1.0])))
        >>> found = linop.solvers.admm(distance, prox.box(0, 2), X.zeros())
        >>> found.z["x"].round(4).tolist(), found.success
        ([2.0, 1.0], True)
    """
    map_or_none("admm", "f", f, none=False)
    map_or_none("admm", "g", g, none=False)
    if Op is None:
        x0 = first_guess("admm", x0)
    else:
        operator_of("admm", Op, "Op", adjoint=True)
        x0 = vector_of("admm", Op, x0, "x0", "domain", "Op")
        if not isinstance(f, SquaredL2):
            raise ArgumentError(
                f"admm: with Op, f is prox.squared_l2, whose minimizer over x is that of linear "
                f"equations; given {f!r}: linop.solvers.primal_dual takes any map"
            )
    tau, tol = positive("admm: tau", tau), real("admm", "tol", tol, least=0.0)
    niter = whole("admm", "niter", niter)
    function_or_none("admm", "callback", callback)
    reductions = Reductions("admm")
    method = _Admm(f, g, x0, Op, tau, tol, reductions)
    where, problem = Place(x0) if Op is None else Op, [tau, tol, repr(f), repr(g)]
    return run(where, [method], niter, reductions, callback, problem, [x0], **control)[0]


class _Admm(Method):
    """The state of the iteration.

    Attributes:
        z, u: the second variable, and the scaled dual variable.
        cost: f(x) + g(z) after each iteration.
    """

    name = "admm"

    def __init__(
        self,
        f: Any,
        g: ProximalMap,
        x0: Vector,
        Op: Any,
        tau: float,
        tol: float,
        reductions: Reductions,
    ) -> None:
        super().__init__()
        self._f, self._g, self._x0, self._op = f, g, x0, Op
        self._tau, self._tol, self._reductions = tau, tol, reductions

    def start(self) -> Steps:
        self.x = self._x0.copy()
        self.z = self.x if self._op is None else self._op(self.x)
        self.u = times(0, self.z)
        self.cost: list[float] = []
        yield Ask([("initial guess x0", self.x, self.x), ("product Op x0", self.z, self.z)])

    def step(self) -> Steps:
        x = self._minimizer()
        image = x if self._op is None else self._op(x)
        z = self._g.prox(image + self.u, self._tau, self.z)
        gap, change = image - z, z - self.z
        self.x, self.z, self.u = x, z, self.u + gap
        self.nit += 1
        named = [("difference Op x - z", gap), ("step of z", change), ("product Op x", image)]
        value = Value((self._f, x), (self._g, z))
        squares = [(what, v, v) for what, v in [*named, ("variable z", z)]]
        sources = [(f"minimizer x, of {self._f},", x), ("product Op x", image)]
        sources.append((f"result of {self._g}.prox", z))
        numbers = yield Ask([*squares, *value.pairs], True, sources)
        if value.known:
            self.cost.append(value.of(numbers[4:]))
        self._decide(*(math.sqrt(one) for one in numbers[:4]))

    def _minimizer(self) -> Vector:
        """Of f(x) + ‖Op x - z + u‖² / (2 tau)."""
        target = self.z - self.u
        if self._op is None and not (isinstance(self._f, SquaredL2) and self._f.starts):
            return self._f.prox(target, self._tau, self.x)  # type: ignore[no-any-return]
        found = self._f.minimizer(self._op, target, 1 / self._tau, self.x)
        self._reductions.count += found.reductions
        return found.x  # type: ignore[no-any-return]

    def _decide(self, gap: float, change: float, image: float, z: float) -> None:
        scale = max(image, z)
        self.residuals.append(max(gap, change) / scale if scale else 0.0)
        if self.residuals[-1] <= self._tol:
            self.end(
                CONVERGED,
                f"converged: ‖Op x - z‖ = {gap:.3g} and the change of z, {change:.3g}, are at most "
                f"tol = {self._tol:.3g} times {scale:.3g}, the larger of ‖Op x‖ and ‖z‖",
            )

    def progress(self) -> dict[str, float]:
        objective = {"objective": self.cost[-1]} if self.cost else {}
        return {"change": self.residuals[-1] if self.residuals else math.inf, **objective}

    def limits(self) -> str:
        return f", where a change of {self._tol:.3g} is asked"

    def result(self, reductions: Reductions) -> Result:
        others = {"z": self.z, "cost": self.cost, "fun": self.cost[-1] if self.cost else None}
        values = self.x, self.z
        return self.finished(values, self.x, self.residuals, reductions, **others)
