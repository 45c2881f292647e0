"""Tomography of which each worker has some angles; `mpiexec -n 4 python` runs it too."""

import numpy as np

import linop


def main(backend: linop.backends.Backend, n: int = 24) -> float:
    i, j = np.indices((n, n)).reshape(2, -1) - (n - 1) / 2
    disk = 1.0 * ((i - 3) ** 2 + (j + 2) ** 2 < 30)
    mine = np.pi / 60 * np.arange(backend.worker, 60, backend.workers)  # angles; a matrix for each:
    rays = [1.0 * (np.rint(i * np.cos(a) + j * np.sin(a)) == np.c_[-n:n]) for a in mine]
    plan = linop.vstack(*rays, backend=backend).compile(backend)
    x = linop.solvers.cgls(plan, plan(disk), niter=60).x
    return float(np.linalg.norm(np.asarray(x) - disk) / np.linalg.norm(disk))


if __name__ == "__main__":
    linop.launch(lambda b: print(f"worker {b.worker}: relative error of the image:", main(b)))
