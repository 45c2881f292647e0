"""Conjugate gradients for least squares. Units of the problem are in `linop.solvers.scaling`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from linop.errors import ArgumentError, DTypeError, SpaceError
from linop.solvers.scaling import ScaledProblem, real
from linop.spaces.finite import not_finite
from linop.spaces.region import integer
from linop.spaces.space import Space
from linop.spaces.vector import Vector, inners

CONVERGED, LIMIT, STOPPED = 1, 2, 3
"""Reasons why a solver ended: see `cgls`."""


def cgls(
    Op: Any,
    y: Vector,
    x0: Vector | None = None,
    niter: int = 10,
    damp: float = 0.0,
    tol: float = 1e-4,
    show: bool = False,
    callback: Callable[[Vector], object] | None = None,
) -> tuple[Vector, int, int, float, float, list[float]]:
    """Conjugate gradients for least squares, min ‖y - Op x‖² + damp² ‖x‖²; PyLops' signature.

    Args:
        Op: an operator, or the plan of one: called on vectors, with an adjoint ``Op.H``; its dtype
            is a floating one.
        y: data, in the codomain. On an SPMD backend made by ``backend.vector``, so that its inner
            products span all workers; every worker makes the same call.
        x0: initial guess, made as y is; zero by default.
        niter: number of iterations, at most.
        damp: damping, the square root of the weight of ‖x‖²; a real number.
        tol: stop when ‖Op* r - damp² x‖² is at most `tol` times its value at x = 0, or at x0 where
            that is larger: independent of the units of y and Op. (PyLops compares with `tol`
            itself.)
        show: print the residual of every iteration, on the first worker.
        callback: called with a copy of the current x after every iteration, on the workers that
            give one. If it returns True, or raises StopIteration, on any worker, all workers end
            with this x; what else it returns is not looked at.

    Returns:
        x; istop (1: converged, 2: niter reached, 3: the callback asked to stop); iterations done;
        ‖r‖; √(‖r‖² + damp² ‖x‖²); and ‖r‖ before the first iteration and after each. Here
        r = y - Op x.

    Raises:
        ArgumentError: Op is no operator; y or x0 is not a `Vector`; another argument is not what it
            should be; or y, x0, or a result of Op or Op.H is not finite, on every worker: the
            message says where.
        SpaceError: y or x0 is of another space, or, for the plan of one worker, not made by its
            backend. DTypeError: an integer dtype.
    """
    if not (callable(Op) and hasattr(Op, "H")):
        raise ArgumentError(
            f"cgls: Op is an operator or a plan, with an adjoint Op.H; given {type(Op).__name__}. "
            f"Of a matrix, linop.local_operators.matrix makes one"
        )
    y = _checked(Op, y, "y")
    x0 = None if x0 is None else _checked(Op, x0, "x0")
    if y.space.dtype.kind in "iu":
        raise DTypeError(
            f"cgls: it divides, so a floating dtype is expected; given {y.space.dtype}"
        )
    damp, tol = real("damp", damp), real("tol", tol, least=0.0)
    if (niter := integer(niter, "niter")) < 0:
        raise ArgumentError(f"cgls: niter is a whole number from 0; given {niter}")
    if not (callback is None or callable(callback)):
        raise ArgumentError(f"cgls: callback is a function of a Vector; given {callback!r}")
    problem = ScaledProblem(Op, y, x0, abs(damp))
    search = _Search(problem, tol)
    while search.iterations < niter and search.reason == LIMIT:
        asked = search.step(lambda x: _stops(callback, problem.given(x)))
        if show and getattr(getattr(Op, "backend", None), "worker", None) in (None, 0):
            print(
                f"cgls {search.iterations:5d}  residual {problem.residual(search.cost[-1]):.6e}  "
                f"gradient {problem.gradient(math.sqrt(search.gamma)):.6e}"
            )
        if asked:
            search.reason = STOPPED
    cost = [problem.residual(one) for one in search.cost]
    damped = problem.residual(math.hypot(search.cost[-1], problem.damp * search.x.norm()))
    return problem.given(search.x), search.reason, search.iterations, cost[-1], damped, cost


class _Search:
    """The state of the iteration.

    Attributes:
        x, r, s, c: solution, residual, gradient Op* r - damp² x, and direction.
        gamma: ‖s‖².
        cost: ‖r‖ before the first iteration, and after each.
        reason: CONVERGED, or LIMIT as long as it is not.
    """

    def __init__(self, problem: ScaledProblem, tol: float) -> None:
        self._problem, self._squared = problem, problem.damp**2
        self.iterations, self.reason = 0, LIMIT
        start, x0 = problem.start, problem.x0
        self.r = problem.y.copy() if x0 is None else problem.y - problem.forward(x0)
        self.s = start if x0 is None else problem.backward(self.r)
        self.x = 0 * start if x0 is None else x0.copy()
        if x0 is not None and self._squared:
            self.s = self.s - self._squared * self.x
        self.c = self.s.copy()
        pairs = [(self.s, self.s), (self.r, self.r), (start, start)]
        self.gamma, rr, at_zero = self._squares(pairs, ("gradient Op* r", "residual r", "Op* y"))
        self.cost = [math.sqrt(rr)]
        self._scale = max(self.gamma, at_zero)
        self._least = tol * self._scale
        self._decide()

    def step(self, asks: Callable[[Vector], bool]) -> bool:
        """One iteration. Returns True if `asks`, called with the new x, did on some worker.

        Inner products are collective: two calls an iteration.
        """
        q = self._problem.forward(self.c)
        names = ("product Op c with the search direction c", "search direction c")
        qq, cc = self._squares([(q, q), (self.c, self.c)], names)
        curvature = qq + self._squared * cc
        if not curvature:
            self._no_curvature()
            return False
        step = self.gamma / curvature
        self.x = self.x + step * self.c
        self.r = self.r - step * q
        self.s = self._problem.backward(self.r)
        if self._squared:
            self.s = self.s - self._squared * self.x
        self.iterations += 1
        last, asked = self.gamma, asks(self.x)
        pairs = [(self.s, self.s), (self.r, self.r)]
        names = ("gradient Op* r", "residual r")
        self.gamma, rr, many = self._squares(pairs, names, int(asked))
        self.c = self.s + (self.gamma / last) * self.c
        self.cost.append(math.sqrt(rr))
        self._decide()
        return many > 0

    def _decide(self) -> None:
        if self.gamma <= self._least:
            self.reason = CONVERGED

    def _squares(
        self, pairs: list[tuple[Vector, Vector]], names: tuple[str, ...], *own: int
    ) -> list[float]:
        """The squared norms, and the sum over all workers of a number of each; collective.

        Raises:
            ArgumentError: a vector is not finite; on every worker.
        """
        found = [float(one.real) for one in inners(pairs, "step of cgls", own=own)]
        for (vector, _), square, name in zip(pairs, found, names, strict=False):
            if not math.isfinite(square):
                what = not_finite(vector) or "its square is beyond floating point: scale Op"
                raise ArgumentError(
                    f"cgls, iteration {self.iterations + 1}: the {name} is not finite: {what}"
                )
        return found

    def _no_curvature(self) -> None:
        """End the search, as ‖Op c‖² is zero: converged, if the gradient is one of rounding errors.

        Raises:
            ArgumentError: it is not.
        """
        if self.gamma > np.finfo(np.float64).eps * self._scale:
            raise ArgumentError(
                f"cgls, iteration {self.iterations + 1}: Op maps the gradient c = Op* r, of norm "
                f"{math.sqrt(self.gamma):.3g}, to zero; Op.H is not the adjoint of Op (see "
                f"linop.testing.check_adjoint), or its numbers are too small: scale Op"
            )
        self.reason = CONVERGED


def _checked(Op: Any, vector: object, name: str) -> Vector:
    """Data, or an initial guess, as a vector that the operator or plan can be applied to.

    Raises:
        ArgumentError, SpaceError: it is none; see `cgls`.
    """
    side = "codomain" if name == "y" else "domain"
    if not isinstance(vector, Vector):
        raise ArgumentError(
            f"cgls: expected a Vector, given {type(vector).__name__} as {name}; make one with "
            f"backend.vector(Op.{side}, array), or Op.{side}.vector(array) in one process"
        )
    if isinstance(space := getattr(Op, side, None), Space):
        space.same_as(vector.space, f"cgls, {name}")
    backend: Any = getattr(Op, "backend", None)
    if getattr(backend, "worker", None) is None or vector.shared is not None:
        return vector
    if backend.workers == 1:
        made: Vector = backend.vector(vector.space, vector)
        return made
    raise SpaceError(
        f"cgls: {name} is a vector of one process, Op the plan of one worker of several; give "
        f"backend.vector(Op.{side}, {name}), which keeps the regions of this worker, and whose "
        f"inner products span all workers: for one worker's part backend.vector(space, arrays)"
    )


def _stops(callback: Callable[[Vector], object] | None, x: Vector) -> bool:
    """Call the user's function; True if it asks to stop."""
    if callback is None:
        return False
    try:
        asked = callback(x.copy())
        return isinstance(asked, bool | np.bool_) and bool(asked)
    except StopIteration:
        return True
