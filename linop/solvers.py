"""Iterative solvers on linop vectors, for operators and plans, distributed or in one process.

SciPy's solvers, through ``op.to_scipy()``, run in one process only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from linop.errors import ArgumentError
from linop.spaces.vector import Vector, inners


def cgls(
    Op: Any,
    y: Vector,
    x0: Vector | None = None,
    niter: int = 10,
    damp: float = 0.0,
    tol: float = 1e-4,
    show: bool = False,
    callback: Callable[[Vector], None] | None = None,
) -> tuple[Vector, int, int, float, float, list[float]]:
    """Conjugate gradients for least squares, min ‖y - Op x‖² + damp² ‖x‖²; PyLops' signature.

    Args:
        Op: an operator, or the plan of one: called on vectors, with an adjoint ``Op.H``.
        y: data, in the codomain. On an SPMD backend made by ``backend.vector``, so that its inner
            products span all workers; every worker makes the same call.
        x0: initial guess; zero by default.
        niter: number of iterations, at most.
        damp: damping, the square root of the weight of ‖x‖².
        tol: stop when ‖Op* r - damp² x‖² is below this.
        show: print the residual of every iteration, on the first worker.
        callback: called with the current x after every iteration.

    Returns:
        x; istop (1: converged, 2: niter reached); iterations done; ‖r‖; √(‖r‖² + damp² ‖x‖²); and
        ‖r‖ before the first iteration and after each. Here r = y - Op x.

    Raises:
        ArgumentError: y or x0 is not a `Vector`.
    """
    if not isinstance(y, Vector):
        raise ArgumentError(
            f"cgls: expected a Vector, given {type(y).__name__}; make one with "
            f"backend.vector(Op.codomain, array), or Op.codomain.vector(array) in one process"
        )
    if x0 is not None and not isinstance(x0, Vector):
        raise ArgumentError(f"cgls: x0 is a Vector like y; given {type(x0).__name__}")
    adjoint = Op.H
    squared = damp**2
    r = y.copy() if x0 is None else y - Op(x0)
    s = adjoint(r)
    x = 0 * s if x0 is None else x0.copy()
    if x0 is not None and squared:
        s = s - squared * x
    c = s.copy()
    # Inner products are collective: two calls an iteration.
    gamma, rr = map(abs, inners([(s, s), (r, r)]))
    cost = [math.sqrt(rr)]
    iteration = 0
    while iteration < niter and gamma > tol:
        q = Op(c)
        qq, cc = map(abs, inners([(q, q), (c, c)]))
        step = gamma / (qq + squared * cc)
        x = x + step * c
        r = r - step * q
        s = adjoint(r)
        if squared:
            s = s - squared * x
        last = gamma
        gamma, rr = map(abs, inners([(s, s), (r, r)]))
        c = s + (gamma / last) * c
        iteration += 1
        cost.append(math.sqrt(rr))
        if show and getattr(getattr(Op, "backend", None), "worker", None) in (None, 0):
            print(f"cgls {iteration:5d}  residual {cost[-1]:.6e}  gradient {math.sqrt(gamma):.6e}")
        if callback is not None:
            callback(x)
    damped = math.sqrt(cost[-1] ** 2 + squared * abs(x.inner(x)))
    return x, 1 if gamma <= tol else 2, iteration, cost[-1], damped, cost
