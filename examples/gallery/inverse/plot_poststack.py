"""
Invert a post-stack seismic section
===================================

A seismic section shows reflections: the derivative of the rock's impedance, seen through a
wavelet. You want the impedance. The section is cut over workers by its traces; the model
needs no neighbours, and what makes the answer plausible, smoothness across traces, needs
them.
"""

import matplotlib.pyplot as plt
import numpy as np
from scipy.ndimage import gaussian_filter

import linop
from linop.solvers import cgls

x, z = np.ogrid[:180, :120]
depth = z + 8 * np.sin(x / 25) + 12 * (x > 95)  # folded layers, with a fault
impedance = 8 + 0.2 * np.floor(depth / 20) + 0.05 * np.cos(np.floor(depth / 7))
X = linop.TensorSpace(impedance.shape, linop.Partition((4, 1)), name="m")

# %%
# The model
# ---------
# Reflections are half the derivative in depth, a stencil of two taps. The wavelet is
# Ricker's, a stencil of 41. Their product has no messages: it reads within a trace, and
# traces are whole.

t = (np.arange(41) - 20) * 0.004
ricker = (1 - 2 * (np.pi * 15 * t) ** 2) * np.exp(-((np.pi * 15 * t) ** 2))
reflect = linop.stencil(X, {(0, 1): 0.25, (0, -1): -0.25}, boundary="edge")
A = linop.stencil(X, ricker[None, :]) @ reflect
L = linop.laplacian(X, boundary="edge")
assert linop.testing.check_adjoint(A)
assert A.cost().messages == 0 and L.cost().messages == 6

# %%
# From data to impedance
# ----------------------
# The starting model is smooth, as well logs and velocities give it. Least squares alone
# fits the noise, trace by trace, and least squares with a weight on the Laplacian does not.

clean = X.gather(A(X.scatter(impedance)))
noise = 0.1 * clean.std() * np.random.default_rng(1).standard_normal(clean.shape)
data, start = clean + noise, gaussian_filter(impedance, (20, 15))


def main(backend):
    mine = X.slices(backend.worker)
    d, x0 = (backend.vector(X, values[mine]) for values in (data, start))
    plain = cgls(A.compile(backend), d, x0, niter=60, tol=0)
    stacked = linop.block([[A], [0.5 * L]])
    smooth = cgls(
        stacked.compile(backend), stacked.codomain.join(d, 0 * d), x0, niter=60, tol=0
    )
    return [next(iter(found.x.arrays.values())) for found in (plain, smooth)]


plain, smooth = (
    np.concatenate(blocks) for blocks in zip(*linop.launch(main, workers=4), strict=True)
)


def error(model):
    return np.linalg.norm(model - impedance) / np.linalg.norm(impedance - start)


print(
    f"of the start's error: {error(plain):.2f} by least squares, {error(smooth):.2f} smooth"
)
assert error(smooth) < error(plain) and error(smooth) < 1

# %%
# What an iteration sends: a trace to each neighbour, for the Laplacian and for its adjoint.


def counted(backend):
    L.compile(backend)(impedance[X.slices(backend.worker)])
    return sum(row.bytes for row in backend.counters())


cost, sent = linop.simulate(L), sum(linop.launch(counted, workers=4))
print(f"{cost.messages} messages, {cost.bytes} bytes, {1e6 * cost.time:.0f} µs predicted")
print(f"{sent} bytes counted")
assert cost.bytes == sent == 6 * 120 * 8

figure, axes = plt.subplots(2, 3, figsize=(8.5, 6.5), layout="constrained")
shown = {"impedance": impedance, "data": data, "start": start}
shown |= {"least squares": plain, "with smoothness": smooth}
for panel, (title, values) in zip(axes.flat, shown.items(), strict=False):
    limits = {} if title == "data" else {"vmin": impedance.min(), "vmax": impedance.max()}
    panel.imshow(
        values.T, cmap="gray" if title == "data" else "viridis", aspect="auto", **limits
    )
    panel.set(title=title, xlabel="trace")
    for worker in (1, 2, 3):
        panel.axvline(X.slices(worker)[0].start - 0.5, color="white", linestyle=":")
for (title, values), style in zip(shown.items(), ("k-", "", ":", "", "C1-"), strict=True):
    if style:
        axes[1, 2].plot(values[60], style, label=title)
axes[1, 2].set(title="trace 60", xlabel="depth")
axes[1, 2].legend(fontsize=8)
axes[0, 0].set_ylabel("depth")
plt.show()

# %%
# Read on: :doc:`/solvers`, and :doc:`/pylops_mpi`.
