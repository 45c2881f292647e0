"""
Invert waves for the medium that they crossed (full-waveform inversion)
=======================================================================

Waves are sent from above and heard below. How fast the medium carries them changes what is
heard, not linearly, and you want the medium: full-waveform inversion. It needs the gradient
of a misfit with respect to every point of the medium, and that is the adjoint of the
derivative of a time loop. ``linop.loops.evolution`` derives it.
"""

import matplotlib.pyplot as plt
import numpy as np

import linop
from linop import Partition, TensorSpace, hstack, repartition, vstack, zero
from linop.networks import chain, multiply

shape, steps, columns = (22, 34), 90, (5, 13, 21, 29)
M, U, B, W, V, P = (TensorSpace(shape, Partition((1, 2)), name=name) for name in "mubwvp")

# %%
# The wave equation with a medium m
# ---------------------------------
# :math:`u \leftarrow 2 u - b + m\, \Delta u` and :math:`b \leftarrow u`: linear in the wave
# and in the medium, and not in both.
# ``chain`` composes operators with the product of two vectors, and knows its derivative.

laplace, keep = linop.laplacian(U), repartition(U, B)
apart = vstack(
    hstack(repartition(U, W) @ laplace, zero(B, W)),  # w = Δu
    hstack(2 * repartition(U, V), -repartition(B, V)),  # v = 2 u − b
    hstack(keep, zero(B, B)),
)
step = chain(apart, multiply(W, M, "p"), hstack(repartition(V, U), repartition(P, U)))
above, below = (
    linop.pad(U, [(-1 - k, k + 2 - shape[0]), (0, 0)]) for k in (0, shape[0] - 3)
)
waves = linop.loops.evolution(
    step,
    steps,
    vstack(above.H, zero(above.codomain, B)),
    hstack(below, zero(B, below.codomain)),
)

# %%
# The misfit and its gradient
# ---------------------------
# Four shots, one after the other. ``run.vjp`` is the product with the adjoint of the
# Jacobian: it runs the loop backwards.

i, j = np.ogrid[: shape[0], : shape[1]]
true = 0.2 + 0.06 * np.exp(-((i - 10) ** 2 + (j - 12) ** 2) / 10)
true = true - 0.05 * np.exp(-((i - 11) ** 2 + (j - 24) ** 2) / 8)
t = np.arange(steps)[:, None] / 5 - 2
wavelet = (1 - 2 * t**2) * np.exp(-(t**2))
signals = waves.domain.parts[-1]
shots = [
    signals.scatter((wavelet * (np.arange(shape[1]) == c))[:, None]).arrays for c in columns
]


def main(backend):
    run = waves.compile(backend, wrt=M)

    def hear(m, shot):
        return run(backend.vector(waves.domain, {**m.arrays, **shot}))

    def misfit(m):
        value, gradient = 0.0, 0 * m
        for shot, heard in zip(shots, data, strict=True):
            rest = hear(m, shot) - heard
            value, gradient = value + rest.inner(rest) / 2, gradient + run.vjp(rest)
        return value, gradient

    right, guess = (backend.vector(M, M.scatter(m)) for m in (true, np.full(shape, 0.2)))
    data = [hear(right, shot) for shot in shots]

    # A right gradient: half the step, a quarter of the linear model's error.
    (value, gradient), errors = misfit(guess), []
    slope = gradient.norm()
    for h in (1e-2, 5e-3):
        errors.append(misfit(guess + h / slope * gradient)[0] - value - h * slope)
    assert 3.5 < errors[0] / errors[1] < 4.5

    found = linop.solvers.lbfgs(misfit, guess, maxiter=15)
    return found.x, gradient, found.cost, data[1]


results = linop.launch(main, workers=2)
cost = results[0][2]
parts = [{n: a for one in results for n, a in one[k].arrays.items()} for k in (0, 1, 3)]
model, gradient = M.gather(parts[0]), M.gather(parts[1])
heard = waves.codomain.gather(parts[2])[:, 0]
print(f"the misfit falls to {cost[-1] / cost[0]:.1%} in {len(cost) - 1} iterations")
assert cost[-1] < 0.05 * cost[0]
error = np.linalg.norm(model - true) / np.linalg.norm(0.2 - true)
assert error < 0.8

figure, axes = plt.subplot_mosaic("AD;CB;EE", figsize=(8, 7.2), layout="constrained")
axes = [axes[letter] for letter in "ABCDE"]
axes[0].imshow(true, vmin=0.14, vmax=0.27)
axes[0].plot(columns, [1] * 4, "r*", markersize=9)
axes[0].plot(j[0], [shape[0] - 2] * shape[1], "wv", markersize=3)
axes[0].set_title("the medium; four shots above")
axes[1].imshow(heard, cmap="RdBu", aspect="auto")
axes[1].set(title="the second shot, heard below", xlabel="column", ylabel="step")
most = np.quantile(abs(gradient), 0.97)
axes[2].imshow(-gradient, cmap="RdBu_r", vmin=-most, vmax=most)
axes[2].set_title("first gradient, downhill")
axes[3].imshow(model, vmin=0.14, vmax=0.27)
axes[3].set_title(f"found: {error:.0%} of the error left")
axes[4].semilogy(cost, "o-")
axes[4].set(title="misfit", xlabel="iteration of L-BFGS")
for panel in axes[0], axes[2], axes[3]:
    panel.axvline(shape[1] / 2 - 0.5, color="grey", linestyle=":")
    panel.set_axis_off()
plt.show()

# %%
# What a shot sends
# -----------------
# A column to the other worker, in each step, forwards: the neighbours that the Laplacian
# reads. Predicted and counted:


def counted(backend):
    run = waves.compile(backend, wrt=M)
    guess = backend.vector(M, M.scatter(true)).arrays
    run(backend.vector(waves.domain, {**guess, **shots[0]}))
    return sum(row.bytes for row in backend.counters())


predicted = steps * laplace.cost().bytes
sent = sum(linop.launch(counted, workers=2))
print(f"{predicted} bytes predicted, {sent} counted")
assert predicted == sent

# %%
# Read on: :doc:`/time`.
