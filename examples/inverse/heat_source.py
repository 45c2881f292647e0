"""Find the source of heat from temperatures at a few places; `mpiexec -n 4 python` runs it too."""

import numpy as np

import linop


def main(backend: linop.backends.Backend) -> tuple[float, float]:
    X = linop.TensorSpace((32, 32), linop.Partition((backend.workers,)))
    step = linop.stencil(X, {(0, 0): 0.2, (1, 0): 0.2, (-1, 0): 0.2, (0, 1): 0.2, (0, -1): 0.2})
    A = one = linop.identity(X)
    for _ in range(9):
        A = step @ A + one  # a source that stays on
    linop.testing.assert_adjoint(A, backend)
    i, j = np.ogrid[X.slices(backend.worker)]
    source = backend.vector(X, np.exp(-((i - 10) ** 2 + (j - 20) ** 2) / 20.0))
    plan = A.compile(backend)
    found = linop.solvers.cgls(plan, plan(source), niter=200, tol=1e-16)
    return (found.x - source).norm() / source.norm(), found.residuals[-1] / found.residuals[0]


if __name__ == "__main__":
    linop.launch(lambda b: print(f"worker {b.worker}: errors of source and data:", *main(b)))
