"""
Reconstruct an image from its projections
=========================================

A scanner measures sums along rays, from many angles, and you want the image. Each worker
has some of the angles, and all of them need the image. Which messages does a step of the
reconstruction take? None forward, and one sum backward, of which you write neither.
"""

from functools import partial

import matplotlib.pyplot as plt
import numpy as np
import scipy.sparse
from matplotlib.cbook import get_sample_data

import linop

scan = np.frombuffer(get_sample_data("s1045.ima.gz").read(), np.uint16).reshape(256, 256)
n = 64
image = scan.reshape(n, 4, n, 4).mean(axis=(1, 3)) / scan.max()
y, x = np.indices((n, n)).reshape(2, -1) - (n - 1) / 2


def rays(angle):
    """The sums along the rays of an angle, a sparse matrix: two rays share a pixel."""
    at = x * np.cos(angle) + y * np.sin(angle) + 0.75 * n
    below = np.floor(at).astype(int)
    pixels = np.arange(n * n)
    shares = [1 - at + below, at - below], [below, below + 1], [pixels, pixels]
    weights, bins, columns = (np.concatenate(pair) for pair in shares)
    return scipy.sparse.csr_array((weights, (bins, columns)), (3 * n // 2, n * n))


# %%
# The operator that all workers have together
# -------------------------------------------
# Each worker gives the matrices of its own angles, one below the other. The image is
# *replicated*: one image, which all workers hold. So the forward moves nothing, and the
# adjoint, which sums what the workers found, is an all-reduce. It was derived, and ``cost``
# counts it.


def main(backend, count):
    angles = np.pi / count * np.arange(backend.worker, count, backend.workers)
    A = linop.vstack(scipy.sparse.vstack([*map(rays, angles)]), backend=backend)
    plan = A.compile(backend)
    data = plan(image.ravel())
    back = plan.H(data)
    found = linop.solvers.cgls(plan, data, niter=40, tol=0).x
    return np.asarray(found), back, data, A.cost().bytes, A.H.cost()


results = {
    count: linop.launch(partial(main, count=count), workers=4) for count in (8, 24, 72)
}
found, back, _, forward, adjoint = results[72][0]
print(
    f"forward {forward} bytes; adjoint {adjoint.messages} messages, {adjoint.bytes} bytes"
)
assert forward == 0 and adjoint.bytes == 12 * image.nbytes

# %%
# Back-projection, the adjoint alone, is a blurred image. Least squares sharpens it, and
# more angles more so.


def error(values):
    return np.linalg.norm(values.reshape(n, n) - image) / np.linalg.norm(image)


errors = {count: error(workers[0][0]) for count, workers in results.items()}
assert errors[72] < errors[24] < errors[8] and errors[72] < 0.05
assert all(
    (found == other[0]).all() for other in results[72]
)  # all workers have the same image

figure, axes = plt.subplots(2, 3, figsize=(8, 5.8), layout="constrained")
sinogram = np.empty((72, 3 * n // 2))
for worker, (_, _, data, *_) in enumerate(results[72]):
    sinogram[worker::4] = data.reshape(18, -1)
shown = {"the image": image, "its projections, 72 angles": sinogram}
shown["back-projected"] = back.reshape(n, n)
shown |= {
    f"{c} angles, error {e:.2f}": results[c][0][0].reshape(n, n) for c, e in errors.items()
}
for panel, (title, values) in zip(axes.flat, shown.items(), strict=True):
    panel.imshow(values, cmap="gray", aspect="auto" if "projections" in title else "equal")
    panel.set_title(title, fontsize=9)
    panel.set_axis_off()
plt.show()

# %%
# Read on: :doc:`/blocks`.
