r"""
Fill in the missing pixels of a photograph by FISTA
===================================================

Two pixels of three are lost. Infinitely many photographs fit those that are left; the one
that you want has few frequencies of any size. That is a LASSO problem,
:math:`\|A x - y\|^2 / 2 + \sigma \|x\|_1`, and FISTA solves it, on an image and a spectrum
that are cut over four workers.
"""

import time

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_sample_image

import linop
from linop.solvers import fista, ista, prox

photo = load_sample_image("flower.jpg")[60:316, 180:436].mean(axis=2) / 255
known = np.random.default_rng(0).random(photo.shape) < 1 / 3
X = linop.TensorSpace(photo.shape, linop.Partition((4,)), complex)

# %%
# From a spectrum to the pixels that are left
# -------------------------------------------
# The transform F is unitary, so the image of a spectrum is F*. The mask is a stencil of one
# tap, with a weight for each pixel.

F = linop.fft(X, out="transposed")
A = linop.stencil(X, {(0, 0): known.astype(complex)}) @ F.H
assert linop.testing.check_adjoint(A)

# %%
# The step is 1, since :math:`\|A\|` is: a mask times a unitary operator. An iteration takes
# A, A*, soft thresholds where the numbers are, and one collective call for the criterion.


def main(backend):
    plan, image_of = A.compile(backend), F.H.compile(backend)
    y = backend.vector(X, (known * photo + 0j)[X.slices(backend.worker)])
    begun = time.perf_counter()
    fast = fista(plan, y, prox.l1(), sigma=0.03, tau=1.0, niter=60, tol=0)
    seconds = (time.perf_counter() - begun) / 60
    slow = ista(plan, y, prox.l1(), sigma=0.03, tau=1.0, niter=60, tol=0)
    return image_of(next(iter(fast.x.arrays.values()))), fast.cost, slow.cost, seconds


blocks, fast, slow, seconds = zip(*linop.launch(main, workers=4), strict=True)
filled = np.concatenate(blocks).real
error = np.linalg.norm(filled - photo) / np.linalg.norm(photo)
print(f"error {error:.3f}; objective {fast[0][-1]:.2f} by FISTA, {slow[0][-1]:.2f} by ISTA")
assert error < 0.2 and fast[0][-1] < slow[0][-1]

# %%
# Predicted and measured
# ----------------------
# An iteration sends three quarters of the image forward, and as much back. The prediction
# is of messages; what was measured includes the transforms, by four threads.

there, back = linop.simulate(A), linop.simulate(A.H)
assert there.bytes == back.bytes == X.size * 16 * 3 // 4
print(f"{there.bytes + back.bytes} bytes an iteration")
print(f"{1e3 * (there.time + back.time):.2f} ms predicted")
print(f"{1e3 * max(seconds):.2f} ms measured")

figure, axes = plt.subplots(2, 2, figsize=(8, 7.6), layout="constrained")
axes = axes.ravel()
for panel, values, title in zip(
    axes,
    (photo, np.where(known, photo, np.nan), filled),
    ("the photograph", "what is left of it", f"filled in: error {error:.2f}"),
    strict=False,
):
    panel.imshow(values, cmap="gray", vmin=0, vmax=1)
    panel.set_title(title)
    panel.set_axis_off()
axes[3].semilogy(slow[0], "--", label="ISTA")
axes[3].semilogy(fast[0], label="FISTA")
axes[3].set(xlabel="iteration", title="objective")
axes[3].legend()
plt.show()

# %%
# Read on: :doc:`/proximal`.
