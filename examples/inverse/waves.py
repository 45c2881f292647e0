"""Waves in 2-D from a source to receivers, and the adjoint; `mpiexec -n 4 python` runs it too."""

import numpy as np

import linop


def main(backend: linop.backends.Backend, steps: int = 60) -> float:
    grid = linop.Partition((backend.workers,))
    X, B = (linop.TensorSpace((40, 32), grid, name=name) for name in ("u", "before"))
    speed = np.linspace(0.1, 0.3, 40)[:, None] * np.ones(32)  # grows with depth
    cross = dict.fromkeys([(1, 0), (-1, 0), (0, 1), (0, -1)], speed)
    ahead, kept = linop.stencil(X, {(0, 0): 2 - 4 * speed, **cross}), linop.repartition(X, B)
    step = linop.vstack(linop.hstack(ahead, -kept.H), linop.hstack(kept, linop.zero(B, B)))
    start = linop.vstack(linop.identity(X), linop.zero(X, B))
    surface = linop.stencil(X, {(0, 0): np.eye(40, 1) * np.ones(32)})  # where receivers are
    A = surface @ start.H @ linop.repeat(step, steps) @ start
    linop.testing.assert_adjoint(A, backend)
    source = np.zeros((40, 32))
    source[20, 16] = 1
    return A.compile(backend)(backend.vector(X, X.scatter(source))).norm()


if __name__ == "__main__":
    linop.launch(lambda b: print(f"worker {b.worker}: what the receivers hear:", main(b)))
