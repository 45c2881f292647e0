"""
Deblur an MRI scan
==================

A scan is blurred and noisy, and you want it sharp. Dividing by the blur makes the noise
explode, so the answer is a compromise of two wishes: it should explain the data, and be
smooth, or have sharp edges between flat parts. The scan is cut over four workers, and the
solvers neither know nor care.
"""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.cbook import get_sample_data

import linop
from linop.solvers import admm, cgls, prox

scan = np.frombuffer(get_sample_data("s1045.ima.gz").read(), np.uint16).reshape(256, 256)
scan = scan / scan.max()
X = linop.TensorSpace(scan.shape, linop.Partition((2, 2)))

# %%
# The blur
# --------
# It is the product of two filters. Its adjoint, which all methods need, is derived; here it
# is checked against the forward on random vectors.

weights = np.exp(-(np.arange(-7, 8) ** 2) / 8.0)
weights /= weights.sum()
A = linop.stencil(X, weights[:, None]) @ linop.stencil(X, weights[None, :])
assert linop.testing.check_adjoint(A)

noise = 0.01 * np.random.default_rng(0).standard_normal(scan.shape)
data = X.gather(A(X.scatter(scan))) + noise

# %%
# Three answers
# -------------
# - *Least squares alone*, :math:`\|A x - d\|^2`: CGLS goes on until the noise is explained,
#   too.
# - *Smooth*: the same with :math:`\lambda^2 \|\Delta x\|^2`. The stacked operator is one
#   line.
# - *Sharp*: total variation, the sum of the lengths of the gradient, by ADMM.
#
# ``main`` runs on each worker, with its block: on threads here, as it is on ranks of MPI.


def main(backend):
    d = backend.vector(X, data[X.slices(backend.worker)])
    plan = A.compile(backend)
    plain = cgls(plan, d, niter=60, tol=0).x

    stacked = linop.block([[A], [0.1 * linop.laplacian(X, boundary="edge")]])
    smooth = cgls(
        stacked.compile(backend), stacked.codomain.join(d, 0 * d), niter=60, tol=0
    ).x

    misfit = prox.squared_l2(1.0, d, plan, niter=5, rtol=1e-4)
    K = prox.gradient(X).compile(backend)
    sharp = admm(misfit, prox.group(0, 0.0015), d, Op=K, tau=1.0, niter=25, tol=0).x
    return [next(iter(x.arrays.values())) for x in (plain, smooth, sharp)]


found = [np.empty_like(scan) for _ in range(3)]
for worker, blocks in enumerate(linop.launch(main, workers=4)):
    for image, block in zip(found, blocks, strict=True):
        image[X.slices(worker)] = block

# %%
# How far they are from the scan


def error(image):
    return np.linalg.norm(image - scan) / np.linalg.norm(scan)


names = "blurred, noisy", "least squares alone", "smooth", "sharp"
errors = {name: error(image) for name, image in zip(names, [data, *found], strict=True)}
for name, value in errors.items():
    print(f"{name:20} error {value:.3f}")
assert errors["smooth"] < errors["blurred, noisy"] < errors["least squares alone"]
assert errors["sharp"] < errors["blurred, noisy"]

figure, axes = plt.subplots(2, 3, figsize=(8, 6), layout="constrained")
shown = zip(axes.flat, [scan, data, *found], ("the scan", *names), strict=False)
for panel, image, name in shown:
    panel.imshow(image, cmap="gray", vmin=0, vmax=0.8)
    panel.set_title(name if name not in errors else f"{name}\nerror {errors[name]:.3f}")
    panel.set_axis_off()
axes[1, 2].barh(list(errors), list(errors.values()), color="grey")
axes[1, 2].set(title="errors", yticks=[])
for row, name in enumerate(errors):
    axes[1, 2].text(0.01, row, name, va="center")
plt.show()

# %%
# What an iteration sends: halos of the blur, forward and adjoint, predicted and counted.


def counted(backend):
    plan = A.compile(backend)
    plan.H(plan(data[X.slices(backend.worker)]))
    return [row.bytes for row in backend.counters()]


sent = np.sum(linop.launch(counted, workers=4), axis=0)
for name, cost, bytes_ in zip(
    ("forward", "adjoint"), (A.cost(), A.H.cost()), sent, strict=True
):
    print(f"{name} {cost.messages} messages, {cost.bytes} bytes; counted {bytes_} bytes")
    assert cost.bytes == bytes_

# %%
# Read on: :doc:`/solvers`, and :doc:`/proximal`.
