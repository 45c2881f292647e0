"""Waves in 2-D from a source to receivers, and the adjoint; `mpiexec -n 4 python` runs it too."""

import numpy as np

import linop


def main(backend: linop.backends.Backend, steps: int = 60) -> float:
    X = linop.TensorSpace((40, 32), linop.Partition((backend.workers,)))
    speed = np.linspace(0.1, 0.3, 40)[:, None] * np.ones(32)  # grows with depth
    cross = {(0, 0): -4.0, (1, 0): 1.0, (-1, 0): 1.0, (0, 1): 1.0, (0, -1): 1.0}
    laplacian = linop.stencil(X, {at: weight * speed for at, weight in cross.items()})
    u, before = linop.identity(X), linop.zero(X, X)
    for _ in range(steps):
        u, before = 2 * u + laplacian @ u - before, u
    surface = linop.stencil(X, {(0, 0): np.eye(40, 1) * np.ones(32)})  # where receivers are
    A = surface @ u
    linop.testing.assert_adjoint(A, backend)
    source = np.zeros((40, 32))
    source[20, 16] = 1
    return A.compile(backend)(backend.vector(X, X.scatter(source))).norm()


if __name__ == "__main__":
    print("what the receivers hear:", linop.launch(main)[0])
