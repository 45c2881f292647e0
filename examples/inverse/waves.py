"""Waves in two dimensions from a source to receivers, and the adjoint; with `mpiexec -n 4` too."""

import numpy as np

import linop


def main(backend: linop.backends.Backend, steps: int = 40) -> float:
    X = linop.TensorSpace((40, 32), linop.Partition((backend.workers,)))
    cross = {(0, 0): -4.0, (1, 0): 1.0, (-1, 0): 1.0, (0, 1): 1.0, (0, -1): 1.0}
    speed = {
        at: lambda block, k=k: k * (0.2 + 0.005 * np.ogrid[block][0]) + 0 * np.ogrid[block][1]
        for at, k in cross.items()
    }
    L, I = linop.stencil(X, speed), linop.identity(X)
    u, before = I, 0 * I
    for _ in range(steps):
        u, before = 2 * u - before + L @ u, u
    A = u
    linop.testing.assert_adjoint(A, backend)
    return A.compile(backend)(backend.vector(X, X.scatter(np.eye(40, 32)))).norm()
