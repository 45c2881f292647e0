"""PyLops' operators, one for each worker, smoothed together; `mpiexec -n 4 python` runs it too."""

import numpy as np
import pylops

import linop


def main(backend: linop.backends.Backend) -> float:
    n, worker = 50, backend.worker
    rows = pylops.Restriction(n, np.arange(worker % 2, n, 2))  # what this worker has measured
    smooth = 10 * pylops.SecondDerivative(n)
    A = linop.block_diag(pylops.VStack([rows, smooth]), backend=backend)
    linop.testing.assert_adjoint(A, backend)
    truth = np.sin(np.linspace(0, 3, n) + worker)
    y = backend.vector(A.codomain, np.r_[rows @ truth, smooth @ truth])
    x = linop.solvers.lsqr(A.compile(backend), y, atol=1e-12, btol=1e-12, iter_lim=500).x
    return float(abs(next(iter(x.arrays.values())) - truth).max())


if __name__ == "__main__":
    linop.launch(lambda backend: print(f"worker {backend.worker}: error {main(backend):.1e}"))
