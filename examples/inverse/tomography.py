"""Tomography of which each worker has some angles; `mpiexec -n 4 python` runs it too."""

import numpy as np
import scipy.sparse

import linop


def main(backend: linop.backends.Backend, n: int = 24) -> float:
    i, j = np.indices((n, n)).reshape(2, -1) - (n - 1) / 2
    angles = np.pi / 60 * np.arange(60)[backend.worker :: backend.workers, None]
    beside = n + 2 * n * np.arange(len(angles))[:, None]
    ends = np.rint(i * np.cos(angles) + j * np.sin(angles)) + beside  # of each ray
    entries = np.ones(ends.size), (ends.ravel().astype(int), np.tile(np.arange(n * n), len(angles)))
    A = linop.vstack(rays := scipy.sparse.csr_array(entries), backend=backend)
    disk = 1.0 * ((i - 3) ** 2 + (j + 2) ** 2 < 30)
    y = backend.vector(A.codomain, rays @ disk)
    (found,) = linop.solvers.cgls(A.compile(backend), y, niter=60).x.arrays.values()
    return float(np.linalg.norm(found - disk) / np.linalg.norm(disk))


if __name__ == "__main__":
    print("relative error of the image:", linop.launch(main)[0])
