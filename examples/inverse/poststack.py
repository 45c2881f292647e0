"""Post-stack inversion of a 3-D volume, in PyLops-MPI's five forms; `mpiexec -n 2 python` too."""

import numpy as np
import pylops
from pylops.avo.poststack import PoststackLinearModelling
from pylops.utils.wavelets import ricker
from scipy.signal import filtfilt

import linop
from linop.solvers import admm, cg, cgls, primal_dual, prox


def layers(nx=91, nz=61):
    x, z = np.ogrid[:nx, :nz]
    depth = z + 6 * np.sin(x / 15) + 8 * (x > nx // 2)  # folded, with a fault
    return 8 + 0.2 * np.floor(depth / 12) + 0.05 * np.cos(np.floor(depth / 5))


def main(backend, model=None, ny=16, niter=10, outer=1):
    model = layers() if model is None else model  # the logarithm of acoustic impedance
    m = np.tile(model, (ny, 1, 1))
    smooth, (ny, nx, nz) = m, m.shape
    for axis, n in enumerate((5, 30, 20)):
        smooth = filtfilt(np.ones(n) / n, 1, smooth, axis=axis)
    wavelet = ricker(np.arange(nz)[:21] * 0.004, 15)[0]
    modelling = PoststackLinearModelling(wavelet, nt0=nz, spatdims=(ny, nx))
    T = pylops.Transpose((ny, nx, nz), (2, 0, 1))

    A = linop.block_diag(T.H @ modelling @ T, backend=backend)
    X = A.domain  # (ny * workers, nx, nz), each worker has its own ny
    truth, x0, zero = (backend.vector(X, a) for a in (m, smooth, 0 * m))
    cross = [tuple(sign * row) for row in np.eye(3, dtype=int) for sign in (1, -1)]
    L = linop.stencil(X, {(0, 0, 0): -6, **dict.fromkeys(cross, 1)}, "edge")
    G, R = A.compile(backend), linop.block([[A], [10 * L]]).compile(backend)
    N = (A.H @ A + 100 * L.H @ L).compile(backend)
    K = prox.gradient(X).compile(backend)
    d = G(truth)

    plain = cgls(G, d, x0, niter=niter, tol=0).x
    normal = cg(N, G.H(d), x0, maxiter=niter, rtol=0).x
    stacked = cgls(R, R.op.codomain.join(d, zero), x0, niter=niter, tol=0).x
    misfit, flat = prox.squared_l2(1, d, G, niter=20, rtol=1e-5), prox.l1(0.01)
    split = admm(misfit, flat, x0, Op=K, tau=0.99 / 12, niter=outer, tol=0).x
    dual = primal_dual(K, flat, misfit, x0, tau=1, mu=0.99 / 12, niter=outer, tol=0).x
    found = {
        "start": x0,
        "plain": plain,
        "normal": normal,
        "stacked": stacked,
        "split": split,
        "dual": dual,
    }
    return {name: (x - truth).norm() / truth.norm() for name, x in found.items()}


if __name__ == "__main__":
    linop.launch(lambda backend: print(f"worker {backend.worker}:", main(backend)))
