"""Krylov methods beside SciPy's, on the same matrices: iterations, solutions, reductions, times.

    python benchmarks/inverse/solvers.py [--side 64] [--repeats 5]

prints a table for one process. Both sides apply the same sparse matrix, so that the times tell what
the method and its vectors cost: milliseconds an iteration, minimum, median and maximum.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Any

import numpy as np
import scipy.sparse as sparse
import scipy.sparse.linalg as scipy_solvers
import typer

import linop
from linop import solvers

RTOL = 1e-8


@dataclass(frozen=True)
class Case:
    """A problem, solved by both.

    Attributes:
        ours: returns a `Result`.
        theirs: of a callback; returns the solution, and iterations unless the callback counts them.
    """

    problem: str
    method: str
    ours: Callable[[], Any]
    theirs: Callable[[Callable[..., None]], tuple[Any, int | None]] | None


def matrices(side: int) -> dict[str, Any]:
    """Poisson's equation on a square; Helmholtz' with a wave number between two eigenvalues;
    convection and diffusion; a blur with a gradient below it."""
    line = sparse.diags_array([-np.ones(side - 1), 2 * np.ones(side), -np.ones(side - 1)],
                              offsets=[-1, 0, 1])  # fmt: skip
    one = sparse.eye_array(side)
    poisson = sparse.csr_array(sparse.kron(line, one) + sparse.kron(one, line))
    wind = sparse.diags_array([-np.ones(side - 1), np.ones(side - 1)], offsets=[-1, 1])
    weights = np.exp(-(np.linspace(-2, 2, 9) ** 2))
    taps = list(zip(range(-4, 5), weights / weights.sum(), strict=True))
    blur = sparse.diags_array([np.full(side - abs(k), w) for k, w in taps], offsets=range(-4, 5))
    step = sparse.diags_array([-np.ones(side - 1), np.ones(side - 1)], offsets=[0, 1],
                              shape=(side - 1, side))  # fmt: skip
    parts = [sparse.kron(blur, blur), 0.1 * sparse.kron(step, one), 0.1 * sparse.kron(one, step)]
    rng = np.random.default_rng(0)
    scale = sparse.diags_array(1 + 9 * rng.random(side**2))
    return {
        "Poisson": poisson,
        "Poisson, scaled": sparse.csr_array(scale @ poisson @ scale),
        "Helmholtz": sparse.csr_array(poisson - 0.0151 * sparse.eye_array(side**2)),
        "convection": sparse.csr_array(poisson + 0.4 * sparse.kron(one, wind)),
        "deblurring": sparse.csr_array(sparse.vstack(parts)),
    }


def cases(side: int) -> Iterator[Case]:
    found = matrices(side)
    ops = {name: linop.local_operators.matrix(A) for name, A in found.items()}
    rng = np.random.default_rng(1)
    sides = {name: rng.standard_normal(A.shape[0]) for name, A in found.items()}

    def system(problem: str, name: str, preconditioned: bool = False, **options: Any) -> Case:
        A, op, b = found[problem], ops[problem], sides[problem]
        theirs = getattr(scipy_solvers, name)
        inverse = sparse.csr_array(sparse.diags_array(1 / A.diagonal()))
        M = inverse if preconditioned else None
        N = linop.local_operators.matrix(inverse) if preconditioned else None
        others = {"callback_type": "pr_norm"} if name == "gmres" else {}
        extra = "".join(f", {key}" for key in options) + (", M" if preconditioned else "")
        return Case(
            problem,
            name + extra,
            lambda: getattr(solvers, name)(op, b, rtol=RTOL, M=N, **options),
            lambda count: (
                theirs(A, b, rtol=RTOL, M=M, callback=count, **others)[0],
                None,
            ),
        )

    def least(name: str) -> Case:
        A, op, b = found["deblurring"], ops["deblurring"], sides["deblurring"]
        options = {"atol": RTOL, "btol": RTOL}

        def theirs(count: Callable[..., None]) -> tuple[Any, int]:
            return getattr(scipy_solvers, name)(A, b, **options)[0:3:2]

        return Case("deblurring", name, lambda: getattr(solvers, name)(op, b, **options), theirs)

    yield system("Poisson", "cg")
    yield system("Poisson", "cg", pipelined=True)
    yield system("Poisson, scaled", "cg", preconditioned=True)
    yield system("Poisson", "minres")
    yield system("Helmholtz", "minres")
    yield system("convection", "gmres")
    yield system("convection", "bicgstab")
    yield least("lsqr")
    yield least("lsmr")
    deblur, data = ops["deblurring"], sides["deblurring"]
    yield Case(
        "deblurring", "cgls", lambda: solvers.cgls(deblur, data, niter=1000, tol=RTOL**2), None
    )
    yield Case(
        "Poisson",
        "lanczos, 4 largest",
        lambda: solvers.lanczos(ops["Poisson"], 4, "LA", tol=1e-6),
        lambda count: _counted(found["Poisson"], 4),
    )


def _counted(A: Any, k: int) -> tuple[Any, int]:
    """SciPy's eigenvalues, and the number of products with A."""
    calls = 0

    def product(x: Any) -> Any:
        nonlocal calls
        calls += 1
        return A @ x

    op = scipy_solvers.LinearOperator(A.shape, matvec=product, dtype=A.dtype)
    return np.sort(scipy_solvers.eigsh(op, k, which="LA", tol=1e-6)[0]), calls


def row(case: Case, repeats: int) -> list[str]:
    """The cells of a case."""
    mine: list[float] = []
    other: list[float] = []
    result: Any = None
    wanted, steps = None, 0
    for _ in range(repeats):
        start = time.perf_counter()
        result = case.ours()
        mine.append((time.perf_counter() - start) / max(1, result.nit))
        if case.theirs is None:
            continue
        calls: list[None] = []
        start = time.perf_counter()
        wanted, known = case.theirs(lambda *_, calls=calls: calls.append(None))
        steps = len(calls) if known is None else known
        other.append((time.perf_counter() - start) / max(1, steps))
    x = getattr(result, "eigenvalues", None)
    x = np.asarray(result.x) if x is None else x
    far = "" if wanted is None else f"{np.linalg.norm(x - wanted) / np.linalg.norm(wanted):.1e}"
    return [
        case.problem,
        case.method,
        str(result.nit),
        str(steps) if other else "",
        far,
        f"{result.reductions / max(1, result.nit):.2f}",
        _times(mine),
        _times(other) if other else "",
    ]


def _times(seconds: list[float]) -> str:
    return " / ".join(f"{1e3 * f(seconds):.3f}" for f in (min, median, max))


HEAD = (
    "problem", "method", "iterations", "SciPy's", "difference", "reductions an iteration",
    "ms an iteration", "SciPy's ms",
)  # fmt: skip


def main(
    side: Annotated[int, typer.Option(help="points along a side of the square")] = 64,
    repeats: Annotated[int, typer.Option(min=1)] = 5,
) -> None:
    print(f"| {' | '.join(HEAD)} |\n|{' --- |' * len(HEAD)}")
    for case in cases(side):
        print(f"| {' | '.join(row(case, repeats))} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
