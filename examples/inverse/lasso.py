"""A sparse model of equations that workers share, by FISTA; `mpiexec -n 4 python` runs it too."""

import numpy as np

import linop
from linop.solvers import fista, prox


def main(backend: linop.backends.Backend) -> tuple[int, float]:
    truth = np.where(np.arange(60) % 12 == 5, 3.0, 0.0)
    mine = np.random.default_rng(backend.worker).standard_normal((30, 60))
    A = linop.vstack(mine, backend=backend)
    y = backend.vector(A.codomain, mine @ truth)
    found = fista(A.compile(backend), y, prox.l1(0.1), niter=2000, tol=1e-10)
    x = next(iter(found.x.arrays.values()))
    return int((abs(x) > 0.5).sum()), float(abs(x - truth).max())


if __name__ == "__main__":
    linop.launch(lambda b: print(f"worker {b.worker}: number of spikes, error:", *main(b)))
