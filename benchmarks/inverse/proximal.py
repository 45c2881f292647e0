"""Solvers with proximal maps beside PyProximal's, and nonlinear ones beside SciPy's.

    pip install pyproximal
    python benchmarks/inverse/proximal.py [--repeats 5]

prints a table for one process: each problem with the same steps and the same number of iterations,
where the method is the same; the objectives reached, the largest difference of the solutions
relative to the largest number, and milliseconds for an iteration (minimum, median, maximum).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Any

import numpy as np
import scipy.optimize
import typer

import linop
from linop import Partition, TensorSpace
from linop.solvers import admm, fista, gauss_newton, ista, lbfgs, primal_dual, prox

Solution = tuple[np.ndarray, int]
"""The solution, and iterations done."""


@dataclass(frozen=True)
class Case:
    """A problem, solved by both.

    Attributes:
        objective: of a solution.
        theirs: the name of their function.
    """

    name: str
    objective: Callable[[np.ndarray], float]
    our: Callable[[], Solution]
    theirs: str
    their: Callable[[], Solution]


def main(repeats: Annotated[int, typer.Option(min=1)] = 5) -> None:
    """Print the table."""
    print("| problem | iterations: ours, theirs | objective: ours | theirs | difference |", end="")
    print(" ms an iteration: ours | theirs |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for case in [*_sparse(), *_denoising(), *_smooth()]:
        (x, n, ours), (y, m, theirs) = (_timed(f, repeats) for f in (case.our, case.their))
        difference = abs(x - y).max() / abs(y).max()
        values = f"{case.objective(x):.10g} | {case.objective(y):.10g} | {difference:.1e}"
        print(f"| {case.name} ({case.theirs}) | {n}, {m} | {values} | {ours} | {theirs} |")


def _timed(f: Callable[[], Solution], repeats: int) -> tuple[np.ndarray, int, str]:
    """Solution, iterations, and times of one as text."""
    x, count = f()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        f()
        times.append(1000 * (time.perf_counter() - start) / max(count, 1))
    return x, count, f"{min(times):.3f}, {median(times):.3f}, {max(times):.3f}"


def _sparse() -> Iterator[Case]:
    """LASSO, 200 equations for 400 unknowns."""
    import pylops
    import pyproximal
    from pyproximal.optimization.primal import ADMM, ProximalGradient

    rng = np.random.default_rng(0)
    A = rng.standard_normal((200, 400)) / 20
    b = A @ np.where(rng.random(400) < 0.05, rng.standard_normal(400), 0)
    b += 0.01 * rng.standard_normal(200)
    sigma, tau, niter = 0.02, 0.95 / np.linalg.norm(A, 2) ** 2, 200
    op, P = linop.local_operators.matrix(A), pylops.MatrixMult(A)
    y, zero = op.codomain.vector(b), op.domain.zeros()

    def objective(x: np.ndarray) -> float:
        return float(np.linalg.norm(A @ x - b) ** 2 / 2 + sigma * abs(x).sum())

    def by_gradients(solver: Any) -> Solution:
        found = solver(op, y, prox.l1(), sigma=sigma, tau=tau, niter=niter, tol=0)
        return np.asarray(found.x), found.nit

    def by_theirs(acceleration: str | None) -> Solution:
        f, g = pyproximal.L2(Op=P, b=b), pyproximal.L1(sigma)
        given = {"tau": tau, "niter": niter, "acceleration": acceleration}
        return ProximalGradient(f, g, x0=np.zeros(400), **given), niter

    def by_admm() -> Solution:
        f = prox.squared_l2(1.0, y, op, niter=10, rtol=0)
        found = admm(f, prox.l1(sigma), zero, tau=1.0, niter=50, tol=0)
        return np.asarray(found.z), found.nit

    def by_their_admm() -> Solution:
        f = pyproximal.L2(Op=P, b=b, niter=10)
        return ADMM(f, pyproximal.L1(sigma), np.zeros(400), 1.0, niter=50)[1], 50

    name = "ProximalGradient"
    yield Case("LASSO, ista", objective, lambda: by_gradients(ista), name, lambda: by_theirs(None))
    yield Case(
        "LASSO, fista", objective, lambda: by_gradients(fista), name, lambda: by_theirs("fista")
    )
    yield Case("LASSO, admm", objective, by_admm, "ADMM", by_their_admm)


def _denoising(shape: tuple[int, int] = (128, 128), sigma: float = 0.2) -> Iterator[Case]:
    """Total variation of an image."""
    import pylops
    import pyproximal
    from pyproximal.optimization.primaldual import PrimalDual

    image = np.zeros(shape)
    image[32:96, 40:100] = 1
    noisy = image + 0.2 * np.random.default_rng(1).standard_normal(shape)
    X = TensorSpace(shape, Partition((1,)))
    v, K, f = X.scatter(noisy), prox.gradient(X), prox.group(0, sigma)
    total = prox.total_variation(X, sigma, niter=100, rtol=1e-9)
    step = 0.95 / np.sqrt(8)

    def objective(x: np.ndarray) -> float:
        return float(np.linalg.norm(x - noisy) ** 2 / 2) + total(X.scatter(x.reshape(shape)))

    def by_primal_dual() -> Solution:
        g = prox.squared_l2(1.0, v)
        found = primal_dual(K, f, g, v, tau=step, mu=step, niter=100, tol=0)
        return X.gather(found.x), found.nit

    def by_theirs() -> Solution:
        f, g = pyproximal.L2(b=noisy.ravel()), pyproximal.L21(ndim=2, sigma=sigma)
        D = pylops.Gradient(shape, edge=False, kind="forward")
        given = {"niter": 100, "gfirst": True}
        return PrimalDual(f, g, D, noisy.ravel(), step, step, **given).reshape(shape), 100

    def by_their_map() -> Solution:
        their = pyproximal.TV(dims=shape, sigma=sigma, niter=100, rtol=0)
        return their.prox(noisy.ravel(), 1.0).reshape(shape), 100

    yield Case("denoising, primal_dual", objective, by_primal_dual, "PrimalDual", by_theirs)
    yield Case(
        "denoising, total_variation",
        objective,
        lambda: (X.gather(total.prox(v, 1.0)), 100),
        "TV",
        by_their_map,
    )


def _smooth(size: int = 100) -> Iterator[Case]:
    """Rosenbrock's function, and the fit of a decaying exponential."""
    X = linop.Space(linop.Region("x", size))
    start, rosen, slope = np.full(size, -1.2), scipy.optimize.rosen, scipy.optimize.rosen_der

    def by_lbfgs() -> Solution:
        found = lbfgs(
            lambda x: (rosen(np.asarray(x)), X.vector(slope(np.asarray(x)))),
            X.vector(start),
            rtol=1e-10,
        )
        return np.asarray(found.x), found.nit

    def by_scipy() -> Solution:
        options = {"ftol": 0, "gtol": 1e-7}
        found = scipy.optimize.minimize(rosen, start, jac=slope, method="L-BFGS-B", options=options)
        return found.x, found.nit

    yield Case(f"Rosenbrock {size}, lbfgs", rosen, by_lbfgs, "SciPy's L-BFGS-B", by_scipy)

    t = np.linspace(0, 3, 200)
    data = 2.5 * np.exp(-1.3 * t) + 0.5 + 0.05 * np.random.default_rng(2).standard_normal(200)
    U, R = linop.Space(linop.Region("u", 3)), linop.Space(linop.Region("r", 200))

    def residual(a: np.ndarray) -> np.ndarray:
        found: np.ndarray = a[0] * np.exp(-a[1] * t) + a[2] - data
        return found

    def jacobian(a: np.ndarray) -> np.ndarray:
        e = np.exp(-a[1] * t)
        return np.stack([e, -a[0] * t * e, np.ones(200)], 1)

    def by_gauss_newton() -> Solution:
        found = gauss_newton(
            lambda x: R.vector(residual(np.asarray(x))),
            lambda x: linop.local_operators.matrix(jacobian(np.asarray(x)), U, R),
            U.vector(np.array([1.0, 1.0, 0.0])),
        )
        return np.asarray(found.x), found.nit

    def by_least_squares() -> Solution:
        found = scipy.optimize.least_squares(residual, [1.0, 1.0, 0.0], jacobian, gtol=1e-10)
        return found.x, found.njev

    def cost(a: np.ndarray) -> float:
        return float(np.linalg.norm(residual(a)) ** 2 / 2)

    yield Case(
        "exponential, gauss_newton",
        cost,
        by_gauss_newton,
        "SciPy's least_squares",
        by_least_squares,
    )


if __name__ == "__main__":
    typer.run(main)
