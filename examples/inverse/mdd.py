"""Multi-dimensional deconvolution, some frequencies on each worker; `mpiexec -n 2 python` too."""

import numpy as np
import pylops
from pylops.signalprocessing import FFT, Fredholm1
from pylops.utils.seismicevents import hyperbolic2d, makeaxis
from pylops.utils.tapers import taper3d
from pylops.utils.wavelets import ricker

import linop
from linop.solvers import cgls


def main(backend, nx=21, ny=41, nt=160, nf=80, first=0.04):
    grid = {"ox": -300, "nx": nx, "dx": 600 / (nx - 1), "oy": -500, "ny": ny, "dy": 1000 / (ny - 1)}
    t, _, x, y = makeaxis({**grid, "ot": 0, "dt": 0.002, "nt": nt})
    wavelet, both = ricker(t[:41], f0=20)[0], 2 * nt - 1  # times of both signs
    kernel = np.zeros((ny, nx, both))
    events = (first, 2.5 * first, 3.5 * first), (1200.0, 1500.0, 2000.0), (1, 0.6, 0.5)
    for i in range(ny):
        kernel[i, :, nt - 1 :] = hyperbolic2d(x - y[i], t, *events, wavelet)[1]
    kernel[..., nt - 1 :] *= taper3d(nt, (ny, nx), (5, 5), tapertype="hanning")
    image = np.zeros((both, nx), np.float32)
    image[nt - 1 :] = hyperbolic2d(x, t, first, 1100.0, 1.0, wavelet)[0].T

    mine = np.arange(nf)[backend.worker :: backend.workers]  # nobody else has these frequencies
    G = 0.002 * np.sqrt(nt) * np.fft.rfft(kernel).transpose(2, 0, 1)[mine].astype(np.complex64)
    how = {"axis": 0, "real": True, "engine": "scipy", "dtype": np.float32}
    Fx, Fy = FFT((both, nx), ifftshift_before=True, **how), FFT((both, ny), **how)
    Rx, Ry = (pylops.Restriction((nt, n), mine, axis=0, dtype=G.dtype) for n in (nx, ny))
    local = Fy.H @ Ry.H @ Fredholm1(G, dtype=G.dtype) @ Rx @ Fx
    local.dtype = np.dtype(np.float32)  # from real to real numbers
    V = linop.vstack(local, backend=backend)
    Y = linop.Space(linop.Region("y", (both, ny)), np.float32)
    A = linop.hstack(linop.identity(Y), backend=backend) @ V  # the sum over all workers
    plan, truth = A.compile(backend), backend.vector(A.domain, image)
    data = plan(truth)
    found = cgls(plan, data, niter=50, tol=0).x
    return (found - truth).norm() / truth.norm(), (plan(found) - data).norm() / data.norm()


if __name__ == "__main__":
    linop.launch(lambda backend: print(f"worker {backend.worker}: errors", *main(backend)))
