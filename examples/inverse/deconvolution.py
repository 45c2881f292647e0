"""Deblur an image that is cut over workers (Wiener's filter); `mpiexec -n 2 python` runs it too."""

import numpy as np

import linop
from linop.fourier import spectral_convolution


def main(backend):
    n, k = 256, np.fft.fftfreq(256, 1 / 256)
    X = linop.TensorSpace((n, n), linop.Partition((backend.workers,)), complex)
    blur = np.exp(-(k[:, None] ** 2 + k**2) / 2 / 20**2)
    B, W = (spectral_convolution(X, w) for w in (blur, blur / (blur**2 + 1e-8)))
    disk = (np.add.outer(k**2, k**2) < 80**2) * (1 + (np.add.outer(k, -k) > 0)) + 0j
    x = backend.vector(X, disk[X.slices(backend.worker)])
    y = B.compile(backend)(x)
    return (y - x).norm() / x.norm(), (W.compile(backend)(y) - x).norm() / x.norm()


if __name__ == "__main__" and (errors := linop.launch(main)[0]):
    print("relative errors: blurred {:.3f}, deblurred {:.3f}".format(*errors))
