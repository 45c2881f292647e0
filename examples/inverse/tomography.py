"""Tomography of which each worker has some angles; `mpiexec -n 4 python` runs it too."""

import numpy as np
import scipy.sparse

import linop


def main(backend: linop.backends.Backend, n: int = 24) -> float:
    i, j = np.indices((n, n)).reshape(2, -1) - (n - 1) / 2
    angles = np.pi / 60 * np.arange(60)[backend.worker :: backend.workers]
    bins = [np.rint(i * np.cos(a) + j * np.sin(a)).astype(int) + n for a in angles]
    ones = np.ones(n * n), (np.arange(n * n),)
    rays = scipy.sparse.vstack(
        [
            scipy.sparse.csr_array((np.ones(n * n), (at, np.arange(n * n))), (2 * n, n * n))
            for at in bins
        ]
    )
    A = linop.vstack(rays, backend=backend)
    disk = 1.0 * ((i - 3) ** 2 + (j + 2) ** 2 < 30)
    y = backend.vector(A.codomain, rays @ disk)
    x = linop.solvers.cgls(A.compile(backend), y, niter=60).x
    return float(np.linalg.norm(next(iter(x.arrays.values())) - disk) / np.linalg.norm(disk))
