"""Contracts of solvers with proximal maps and of nonlinear ones, as SPMD programs: every worker
gets what one process gets, and the same bits again. Problems are named, so that ranks build them
too."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

import linop
from linop import LinearOperator, Partition, TensorSpace, Vector
from linop.backends import Backend
from linop.errors import ArgumentError, LinopError
from linop.solvers import Result, prox
from support.once import once

Problem = Callable[..., Result]
"""Solves a problem on a space, with a backend or None, and keyword arguments of the solver."""


def smoothing(X: TensorSpace) -> LinearOperator:
    """Each element and a third of the gradient's length: symmetric, condition number below 10."""
    D = prox.gradient(X)
    return linop.identity(X) + D.H @ D / 3


def compiled(op: LinearOperator, backend: Any) -> Any:
    return op if backend is None else op.compile(backend)


def made(X: Any, backend: Any, array: np.ndarray) -> Vector:
    v: Vector = X.scatter(array.astype(X.dtype))
    return v if backend is None else backend.vector(X, v)


def data(X: TensorSpace, seed: int = 4) -> np.ndarray:
    """Steps with noise."""
    rng = np.random.default_rng(seed)
    steps = np.where(np.arange(X.global_shape[0]) % 4 < 2, 1.0, -0.5)
    steps = steps.reshape(-1, *[1] * (X.ndim - 1)) + np.zeros(X.global_shape)
    found: np.ndarray = steps + 0.2 * rng.standard_normal(X.global_shape)
    return found


def _fista(X: TensorSpace, b: Any, **given: Any) -> Result:
    y = made(X, b, data(X))
    return linop.solvers.fista(compiled(smoothing(X), b), y, prox.l1(), sigma=0.3, **given)


def _ista(X: TensorSpace, b: Any, **given: Any) -> Result:
    y = made(X, b, data(X))
    return linop.solvers.ista(compiled(smoothing(X), b), y, prox.box(-0.4, 0.4), **given)


def _primal_dual(X: TensorSpace, b: Any, **given: Any) -> Result:
    y = made(X, b, data(X))
    K, f = compiled(prox.gradient(X), b), prox.group(0, 0.3)
    return linop.solvers.primal_dual(K, f, prox.squared_l2(1.0, y), 0 * y, **given)


def _warm(X: TensorSpace, b: Any, **given: Any) -> Result:
    """Both maps take a few conjugate gradients, from the last x and dual variable, on which the
    iterates depend."""
    y, A = made(X, b, data(X)), compiled(smoothing(X), b)
    f, g = (prox.squared_l2(s, y, A, niter=2, rtol=0) for s in (0.5, 2.0))
    return linop.solvers.primal_dual(A, f, g, 0 * y, tau=0.3, mu=0.3, **given)


def _warm_fista(X: TensorSpace, b: Any, **given: Any) -> Result:
    y, A = made(X, b, data(X)), compiled(smoothing(X), b)
    g = prox.squared_l2(2.0, y, A, niter=2, rtol=0)
    return linop.solvers.fista(A, y, g, tau=0.1, **given)


def _admm(X: TensorSpace, b: Any, **given: Any) -> Result:
    y = made(X, b, data(X))
    f = prox.squared_l2(1.0, y, compiled(smoothing(X), b), niter=4, rtol=0)
    return linop.solvers.admm(f, prox.l1(0.3), 0 * y, **given)


def _admm_of_gradient(X: TensorSpace, b: Any, **given: Any) -> Result:
    y, K = made(X, b, data(X)), compiled(prox.gradient(X), b)
    f, g = prox.squared_l2(1.0, y, niter=4, rtol=0), prox.group(0, 0.3)
    return linop.solvers.admm(f, g, 0 * y, Op=K, **given)


def _lbfgs(X: TensorSpace, b: Any, **given: Any) -> Result:
    """Σ √(1 + |(A x)_i - y_i|²), a smooth absolute value."""
    A, y = compiled(smoothing(X), b), made(X, b, data(X))

    def fun(x: Vector) -> tuple[float, Vector]:
        r = A(x) - y
        roots = {name: np.sqrt(1 + abs(a) ** 2) for name, a in r.arrays.items()}
        weighted = Vector(X, {name: a / roots[name] for name, a in r.arrays.items()}, r.shared)
        ones = Vector(X, {name: np.ones_like(a) for name, a in r.arrays.items()}, r.shared)
        value = ones.inner(Vector(X, {n: a.astype(X.dtype) for n, a in roots.items()}, r.shared))
        return float(np.real(value)), A.H(weighted)

    return linop.solvers.lbfgs(fun, 0 * y, **given)


def _gauss_newton(X: TensorSpace, b: Any, damp: float = 0.0, **given: Any) -> Result:
    """A x + sin(x) - y, whose Jacobian is A + diag(cos x); the backend compiles it."""
    A, y = smoothing(X), made(X, b, data(X))
    plan = compiled(A, b)

    def each(f: Any, x: Vector) -> Vector:
        return Vector(X, {name: f(a) for name, a in x.arrays.items()}, x.shared)

    class Jacobian:
        """The parts of a plan that `cgls` needs, with the diagonal of this worker."""

        domain = codomain = X
        backend = getattr(plan, "backend", None)

        def __init__(self, x: Vector, adjoint: bool = False) -> None:
            self.x, self.adjoint = x, adjoint

        def __call__(self, d: Vector) -> Vector:
            image = (plan.H if self.adjoint else plan)(d)
            local = {n: np.cos(a) * d[n] for n, a in self.x.arrays.items()}
            return image + Vector(X, local, d.shared)

        @property
        def H(self) -> Jacobian:
            return Jacobian(self.x, not self.adjoint)

    def fun(x: Vector) -> Vector:
        return plan(x) + each(np.sin, x) - y

    return linop.solvers.gauss_newton(fun, Jacobian, 0 * y, damp=damp, **given)


def _marquardt(X: TensorSpace, b: Any, **given: Any) -> Result:
    return _gauss_newton(X, b, damp=1.0, **given)


PROBLEMS: dict[str, Problem] = {
    "fista": _fista,
    "ista": _ista,
    "primal_dual": _primal_dual,
    "primal_dual of maps that iterate": _warm,
    "fista of a map that iterates": _warm_fista,
    "admm": _admm,
    "admm of gradient": _admm_of_gradient,
    "lbfgs": _lbfgs,
    "gauss_newton": _gauss_newton,
    "marquardt": _marquardt,
}
NONLINEAR = ("lbfgs", "gauss_newton", "marquardt")
LIMIT = dict.fromkeys(PROBLEMS, "niter") | dict.fromkeys(NONLINEAR, "maxiter")
"""The argument with the number of iterations."""


def space(backend: Any, shape: tuple[int, ...]) -> TensorSpace:
    return TensorSpace(shape, Partition((getattr(backend, "workers", None) or 1,)))


@once(kept=2)
def of_one_process(X: TensorSpace, name: str, count: int) -> Result:
    return PROBLEMS[name](X, None, **{LIMIT[name]: count})


def iterates_are_those_of_one_process(
    backend: Backend, name: str, shape: tuple[int, ...], count: int
) -> None:
    """After a number of iterations, to the rounding of sums."""
    X = space(backend, shape)
    wanted = of_one_process(X, name, count)
    found = PROBLEMS[name](X, backend, **{LIMIT[name]: count})
    scale = max(wanted.x.norm(), 1e-3)
    for region, array in found.x.arrays.items():
        np.testing.assert_allclose(array, wanted.x[region], rtol=0, atol=1e-7 * scale)
    assert (found.nit, found.status) == (wanted.nit, wanted.status)
    np.testing.assert_allclose(found.cost, wanted.cost, rtol=1e-7, atol=1e-12)


def repeats(backend: Backend, name: str) -> None:
    """The same bits, decisions and reductions in another run."""
    found, again = (
        PROBLEMS[name](space(backend, (7,)), backend, **{LIMIT[name]: 6}) for _ in range(2)
    )
    for region, array in found.x.arrays.items():
        assert array.tobytes() == again.x[region].tobytes()
    for field in ("nit", "reductions", "message", "cost"):
        assert getattr(found, field) == getattr(again, field)


def one_worker_stops(backend: Backend, name: str, at: int, stopper: int) -> None:
    """A callback of one worker ends the iteration on all."""
    X, calls = space(backend, (12,)), []

    def ask(x: Vector) -> bool:
        calls.append(x)
        return len(calls) == at

    mine = ask if backend.worker == stopper else None
    found = PROBLEMS[name](X, backend, callback=mine)
    assert (found.status, found.nit) == (2, at)
    assert "the callback asked to stop" in found.message
    assert not calls or calls[-1].arrays.keys() == found.x.arrays.keys()
    same = PROBLEMS[name](X, backend, **{LIMIT[name]: at})
    for region, array in found.x.arrays.items():
        assert array.tobytes() == same.x[region].tobytes()


def resumes(backend: Backend | None, name: str, folder: str) -> None:
    """A run that is cut and resumed ends with the bits of one that is not."""
    X, path = space(backend, (12,)), os.path.join(folder, name)
    most = LIMIT[name]
    whole = PROBLEMS[name](X, backend, **{most: 4})
    PROBLEMS[name](X, backend, checkpoint=path, every=1, **{most: 2})
    found = PROBLEMS[name](X, backend, resume=path, **{most: 4})
    assert (found.nit, found.message) == (whole.nit, whole.message)
    assert found.cost == whole.cost
    for region, array in found.x.arrays.items():
        assert array.tobytes() == whole.x[region].tobytes()


def different_values_are_refused(backend: Backend) -> None:
    """The part of a worker as the value of the function of lbfgs."""
    X = space(backend, (8,))
    x0 = backend.vector(X, X.random(0))

    def fun(x: Vector) -> tuple[float, Vector]:
        return float(sum((a * a).sum() for a in x.arrays.values())) / 2, x

    try:
        linop.solvers.lbfgs(fun, x0)
    except ArgumentError as error:
        assert "fun returns different values on the workers" in str(error)
    else:
        raise AssertionError("nothing was refused")


def nan_is_named(backend: Backend, name: str) -> None:
    """NaN in the data of one worker is the same error on all, and says where it is."""
    X = space(backend, (9,))
    y = data(X)
    y[5] = np.nan
    region = next(r for r in X.regions if X.block(r)[0].start <= 5 < X.block(r)[0].stop)
    at = 5 - X.block(region)[0].start
    v, op = made(X, backend, y), compiled(smoothing(X), backend)
    calls: dict[str, Callable[[], object]] = {
        "fista": lambda: linop.solvers.fista(op, v, prox.l1()),
        "primal_dual": lambda: linop.solvers.primal_dual(op, prox.l1(), None, v),
        "admm": lambda: linop.solvers.admm(prox.l1(), prox.l2(), v),
        "lbfgs": lambda: linop.solvers.lbfgs(lambda x: (1.0, x), v),
        "gauss_newton": lambda: linop.solvers.gauss_newton(lambda x: x, op, v),
    }
    try:
        calls[name]()
    except LinopError as error:
        assert name in str(error)
        assert f"nan at [{at}] of region {region.name!r}" in str(error), str(error)
    else:
        raise AssertionError("nothing was refused")
