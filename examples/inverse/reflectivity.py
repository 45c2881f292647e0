"""Sparse reflectivity of a 3-D volume of traces, by FISTA; `mpiexec -n 2 python` runs it too."""

import numpy as np
import pylops
from pylops.signalprocessing import Convolve1D
from pylops.utils.wavelets import ricker

import linop
from linop.solvers import fista, prox


def layers(nx=24, nz=80):
    depth = np.arange(nz) + 6 * np.sin(np.arange(nx)[:, None] / 15)  # folded
    return 8 + 0.2 * np.floor(depth / 20)


def main(backend, model=None, ny=4):
    model = layers() if model is None else model  # the logarithm of acoustic impedance
    m = np.tile(model, (ny, 1, 1))
    wavelet, _, centre = ricker(0.004 * np.arange(21), 15)
    convolve = Convolve1D(m.shape, wavelet, offset=centre, axis=-1)
    A = linop.block_diag(convolve, backend=backend)
    truth = backend.vector(A.domain, pylops.FirstDerivative(m.shape, axis=-1) @ m)
    G = A.compile(backend)
    found = fista(G, G(truth), prox.l1(), sigma=0.01, niter=200, tol=1e-8).x
    return (found - truth).norm() / truth.norm()


if __name__ == "__main__":
    linop.launch(lambda backend: print(f"worker {backend.worker}: error {main(backend):.3f}"))
