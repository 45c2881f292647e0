"""Poisson's equation on a cut grid by conjugate gradients; `mpiexec -n 4 python` runs it too."""

import numpy as np

import linop


def main(backend: linop.backends.Backend) -> tuple[int, float]:
    X = linop.TensorSpace((64, 48), linop.Partition((backend.workers,)))
    A = linop.stencil(X, {(0, 0): 4, (1, 0): -1, (-1, 0): -1, (0, 1): -1, (0, -1): -1})
    linop.testing.assert_adjoint(A, backend)
    plan, b = A.compile(backend), backend.vector(X, X.scatter(np.ones(X.global_shape)))
    x = linop.solvers.cg(plan, b, rtol=1e-8)
    return x.nit, (plan(x.x) - b).norm() / b.norm()


if __name__ == "__main__":
    linop.launch(lambda b: print(f"worker {b.worker}: iterations, relative residual:", *main(b)))
