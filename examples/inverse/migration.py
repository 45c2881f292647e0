"""Least-squares migration of which each worker has some sources; `mpiexec -n 2 python` runs it."""

import numpy as np
from pylops.utils.wavelets import ricker
from pylops.waveeqprocessing.lsm import LSM

import linop
from linop.solvers import cgls


def main(backend, nx=25, nz=24, nr=4, ns=2, nt=101, niter=30, engine="numpy"):
    x, z, t = 4 * np.arange(nx), 4 * np.arange(nz), 0.004 * np.arange(nt)
    refl = np.zeros((nx, nz))
    refl[:, nz // 2], refl[:, 5 * nz // 6] = -1, 0.5  # two interfaces
    edge = 40, 4 * (nx - 10)
    receivers = np.stack((np.linspace(*edge, nr), np.full(nr, 20)))
    mine = slice(backend.worker * ns, (backend.worker + 1) * ns)
    sources = np.stack((np.linspace(*edge, backend.workers * ns)[mine], np.full(ns, 10)))
    wavelet, _, centre = ricker(t[:41], f0=20)
    lsm = LSM(z, x, t, sources, receivers, 1000, wavelet, centre, mode="analytic", engine=engine)
    A = linop.vstack(lsm.Demop, backend=backend)
    G, truth = A.compile(backend), backend.vector(A.domain, refl)
    data = G(truth)
    found = cgls(G, data, niter=niter, tol=0).x
    return (found - truth).norm() / truth.norm(), (G(found) - data).norm() / data.norm()


if __name__ == "__main__":
    linop.launch(lambda backend: print(f"worker {backend.worker}: errors", *main(backend)))
