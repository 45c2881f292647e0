"""Conjugate gradients for least squares. Units of the problem: `linop.solvers.krylov.scaling`."""

from __future__ import annotations

import math
from typing import Any, Unpack

import numpy as np

from linop.errors import ArgumentError
from linop.solvers.arguments import function_or_none, operator_of, real, vector_of, whole
from linop.solvers.iteration import Ask, Callback, Method, Reductions, Steps, run
from linop.solvers.krylov.scaling import ScaledProblem
from linop.solvers.result import CONVERGED, LIMIT, STOPPED, Result
from linop.solvers.saving import Checkpoints
from linop.solvers.updates import plus
from linop.spaces.vector import Vector

_ISTOP = {CONVERGED: 1, LIMIT: 2, STOPPED: 3}
"""PyLops' numbers, and ours for a callback."""


def cgls(
    Op: Any,
    y: Any,
    x0: Any = None,
    niter: int = 10,
    damp: float = 0.0,
    tol: float = 1e-4,
    show: bool | str = False,
    callback: Callback | None = None,
    **control: Unpack[Checkpoints],
) -> Result:
    """Conjugate gradients for least squares, min ‖y - Op x‖² + damp² ‖x‖²; PyLops' signature.

    Two reductions an iteration.

    Args:
        Op: an operator, or the plan of one: called on vectors, with an adjoint ``Op.H``; its dtype
            is a floating one.
        y: data, in the codomain: a vector, or an array; on an SPMD backend that of
            ``backend.vector``, so that its inner products span all workers, or this worker's array
            or arrays by region name, as the plan takes them. Every worker makes the same call.
        x0: initial guess, made as y is; zero by default.
        niter: number of iterations, at most.
        damp: damping, the square root of the weight of ‖x‖²; a real number.
        tol: stop when ‖Op* r - damp² x‖² is at most `tol` times its value at x = 0, or at x0 where
            that is zero: independent of the units of y and Op. (PyLops compares with `tol` itself.)
        show: print the residual of every iteration, on the first worker; "bar" shows a bar.
        callback: called with a copy of the current x after every iteration, on the workers that
            give one. If it returns True, or raises StopIteration, on any worker, all workers end
            with this x; what else it returns is not looked at.
        control: checkpoints; see `Checkpoints`.

    Returns:
        A `Result`. As a tuple: x; istop (1: converged, 2: niter reached, 3: the callback asked to
        stop); iterations done; ‖r‖; √(‖r‖² + damp² ‖x‖²); and ‖r‖ before the first iteration and
        after each. Here r = y - Op x.

    Raises:
        ArgumentError: Op is no operator; y or x0 is no vector; another argument is not what it
            should be; or y, x0, or a result of Op or Op.H is not finite, on every worker: the
            message says where.
        SpaceError: y or x0 is of another space, or, for the plan of one worker, not made by its
            backend. ShapeError: an array of another size. DTypeError: an integer dtype.

    Example:
        The line a + b t closest to three points, which lie on 1 + 2 t:

        >>> t = np.array([0.0, 1.0, 2.0])
        >>> Op = linop.local_operators.matrix(np.stack([np.ones(3), t], axis=1))
        >>> found = linop.solvers.cgls(Op, 1 + 2 * t, tol=1e-20)
        >>> found.x["x"].round(6).tolist(), found.nit
        ([1.0, 2.0], 2)
    """
    operator_of("cgls", Op, "Op", adjoint=True)
    y = vector_of("cgls", Op, y, "y", "codomain", "Op")
    x0 = None if x0 is None else vector_of("cgls", Op, x0, "x0", "domain", "Op")
    damp, tol = real("cgls", "damp", damp), real("cgls", "tol", tol, least=0.0)
    niter = whole("cgls", "niter", niter)
    function_or_none("cgls", "callback", callback)
    reductions = Reductions("cgls")
    method = _Cgls(ScaledProblem(Op, y, x0, abs(damp), reductions), tol)
    likes = [y] if x0 is None else [y, x0]
    shown: Any = {"show": show, **control}
    return run(Op, [method], niter, reductions, callback, [damp, tol], likes, **shown)[0]


class _Cgls(Method):
    """The state of the iteration.

    Attributes:
        r, s, c: residual, gradient Op* r - damp² x, and direction.
        gamma: ‖s‖².
        scale: the gradient's square that the criterion compares with.
        gain: estimate, from below, of ‖Op‖² + damp².
    """

    name = "cgls"
    recurs = True

    def __init__(self, problem: ScaledProblem, tol: float) -> None:
        super().__init__()
        self._problem, self._squared, self._tol = problem, problem.damp**2, tol

    def start(self) -> Steps:
        problem = self._problem
        start, x0 = problem.start, problem.x0
        self.r = problem.y.copy() if x0 is None else problem.y - problem.forward(x0)
        self.s = start if x0 is None else problem.backward(self.r)
        self.x = 0 * start if x0 is None else x0.copy()
        if x0 is not None and self._squared:
            self.s = plus(self.s, -self._squared, self.x)
        self.c = self.s.copy()
        self.gamma, rr, at_zero = yield Ask(
            [
                ("gradient Op* r", self.s, self.s),
                ("residual r", self.r, self.r),
                ("Op* y", start, start),
            ]
        )
        self.scale, self.gain = at_zero or self.gamma, 0.0
        self._decide(rr)

    def step(self) -> Steps:
        q = self._problem.forward(self.c)
        named = ("product Op c with the search direction c", q, q)
        qq, cc = yield Ask([named, ("search direction c", self.c, self.c)])
        curvature = qq + self._squared * cc
        self.gain = max(self.gain, curvature / cc if cc else 0.0)
        if not curvature:
            self._no_curvature()
            return
        step = self.gamma / curvature
        self.x = plus(self.x, step, self.c, self.x)
        self.r = plus(self.r, -step, q, self.r)
        self.s = self._problem.backward(self.r)
        if self._squared:
            self.s = plus(self.s, -self._squared, self.x)
        self.nit += 1
        last = self.gamma
        pairs = [("gradient Op* r", self.s, self.s), ("residual r", self.r, self.r)]
        self.gamma, rr = yield Ask(pairs, final=True)
        self.c = plus(self.s, self.gamma / last, self.c, self.c)
        self._decide(rr)
        if self.status is None and self.gamma >= last and last <= self._rounding(rr):
            self.end(CONVERGED, "converged to rounding: the gradient falls no more")

    def verify(self) -> Steps:
        problem, y = self._problem, self._problem.y
        self.r = y - problem.forward(self.x)
        self.s = problem.backward(self.r)
        if self._squared:
            self.s = plus(self.s, -self._squared, self.x)
        self.c = self.s.copy()
        named = ("gradient Op* r", self.s), ("residual r", self.r), ("solution x", self.x), ("y", y)
        self.gamma, rr, xx, yy = yield Ask([(name, v, v) for name, v in named])
        self.residuals[-1] = math.sqrt(rr)
        rounding = 100 * self._rounding(self.gain * xx + yy)
        met = self.gamma <= 1.001 * self._tol * self.scale + rounding
        self.confirmed(met, math.sqrt(self.gamma))

    def _rounding(self, square: float) -> float:
        """The square of a gradient that is made of rounding errors, which more steps magnify, of a
        residual of this square."""
        dtype = self.x.space.dtype
        eps = float(np.finfo(dtype if dtype.kind in "fc" else np.float16).eps)
        return (10 * eps) ** 2 * self.gain * square

    def _decide(self, rr: float) -> None:
        self.residuals.append(math.sqrt(rr))
        if self.gamma <= self._tol * self.scale:
            gradient, scale = self.progress()["gradient"], self._gradient(self.scale)
            self.end(
                CONVERGED,
                f"converged: the gradient's norm {gradient:.3g} is at most √tol = "
                f"{math.sqrt(self._tol):.3g} times {scale:.3g}, its norm at x = 0",
            )

    def _no_curvature(self) -> None:
        """End the search, as ‖Op c‖² is zero: converged, if the gradient is one of rounding errors.

        Raises:
            ArgumentError: it is not.
        """
        if self.gamma > np.finfo(np.float64).eps * self.scale:
            raise ArgumentError(
                f"cgls, iteration {self.nit + 1}: Op maps the gradient c = Op* r, of norm "
                f"{math.sqrt(self.gamma):.3g}, to zero; Op.H is not the adjoint of Op (see "
                f"linop.testing.check_adjoint), or its numbers are too small: scale Op"
            )
        self.end(CONVERGED, "converged: the gradient is zero to rounding")

    def _gradient(self, square: float) -> float:
        return self._problem.gradient(math.sqrt(square))

    def current(self) -> Vector:
        return self._problem.given(self.x)

    def progress(self) -> dict[str, float]:
        residual = self._problem.residual(self.residuals[-1])
        return {"residual": residual, "gradient": self._gradient(self.gamma)}

    def limits(self) -> str:
        return f", where {math.sqrt(self._tol):.3g} times {self._gradient(self.scale):.3g} is asked"

    def result(self, reductions: Reductions) -> Result:
        problem, x = self._problem, self.current()
        cost = [problem.residual(one) for one in self.residuals]
        damped = cost[-1]
        if self._squared:
            norm = reductions.norm(self.x, "the solution x")
            damped = problem.residual(math.hypot(self.residuals[-1], problem.damp * norm))
        values = x, _ISTOP[self.status or 0], self.nit, cost[-1], damped, cost
        return self.finished(values, x, cost, reductions)
