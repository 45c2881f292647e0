"""Least squares of which each worker has some equations; `mpiexec -n 4 python` runs it too."""

import numpy as np

import linop


def main(backend: linop.backends.Backend) -> float:
    truth, rng = np.linspace(1, 2, 8), np.random.default_rng(backend.worker)
    mine = rng.standard_normal((20, 8))  # these equations nobody else has
    A = linop.vstack(mine, backend=backend)
    linop.testing.assert_adjoint(A, backend)
    y = backend.vector(A.codomain, mine @ truth)
    x = linop.solvers.lsqr(A.compile(backend), y, atol=1e-12, btol=1e-12).x
    return float(abs(next(iter(x.arrays.values())) - truth).max())


if __name__ == "__main__":
    linop.launch(lambda backend: print(f"worker {backend.worker}: error {main(backend):.1e}"))
