"""A stencil of radius 4 whose coefficients vary, and the check of its adjoint (mpiexec -n 4 …)."""

import numpy as np

import linop


def main(backend: linop.backends.Backend) -> float:
    X = linop.TensorSpace((60, 48), linop.Partition((backend.workers, 1)))  # rows on each worker
    star = [(k, 0) for k in range(-4, 5)] + [(0, k) for k in range(-4, 5) if k]
    taps = {at: lambda block, at=at: np.cos(sum(np.ogrid[block]) + sum(at)) for at in star}
    A = linop.stencil(X, taps, boundary="reflect")
    linop.testing.assert_adjoint(A, backend)
    return A.compile(backend)(backend.vector(X, X.scatter(np.ones(X.global_shape)))).norm()


if __name__ == "__main__":
    linop.launch(lambda b: print(f"worker {b.worker}: the adjoint is right, ‖A x‖ = {main(b):.6f}"))
