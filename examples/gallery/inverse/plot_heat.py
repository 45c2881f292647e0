"""
Find what heats a plate from its temperatures
=============================================

A plate has been heated for a while, and its temperature was taken at every fourth point.
Which parts were heated? The forward model is a time loop on blocks of the plate, and least
squares needs its adjoint: the same steps, backwards.
"""

import time

import matplotlib.pyplot as plt
import numpy as np

import linop

shape, steps = (48, 64), 40
X = linop.TensorSpace(shape, linop.Partition((2, 2)), name="u")

# %%
# A source that stays on
# ----------------------
# A step of diffusion is a stencil, :math:`u \leftarrow D u`, and the source is added in
# each: after n steps the temperature is :math:`(1 + D + \dots + D^{n-1})\, s`. Written by
# Horner's rule, that is a loop of an operator on the pair (temperature, source).

around = dict.fromkeys([(1, 0), (-1, 0), (0, 1), (0, -1)], 0.2)
S = linop.TensorSpace(shape, X.partition, name="s")
spread, source = linop.stencil(X, {(0, 0): 0.2, **around}), linop.repartition(S, X)
step = linop.vstack(
    linop.hstack(spread, source), linop.hstack(linop.zero(X, S), linop.identity(S))
)
begin = linop.vstack(linop.zero(S, X), linop.identity(S))
mask = np.zeros(shape)
mask[2::4, 2::4] = 1
thermometers = linop.stencil(X, {(0, 0): mask})
A = (
    thermometers
    @ linop.hstack(linop.identity(X), linop.zero(S, X))
    @ linop.repeat(step, steps)
    @ begin
)
assert linop.testing.check_adjoint(A)

# %%
# From temperatures to sources
# ----------------------------

heated = np.zeros(shape)
heated[10:18, 12:30], heated[28:40, 40:50] = 1, 0.6
noise = 0.05 * np.random.default_rng(0).standard_normal(shape) * mask
data = X.gather(A(S.scatter(heated))) + noise
R = linop.block([[A], [0.3 * linop.laplacian(S, boundary="edge")]])


def main(backend):
    plan, mine = R.compile(backend), X.slices(backend.worker)
    d, none = backend.vector(X, data[mine]), backend.vector(S, 0 * heated[mine])
    begun = time.perf_counter()
    found = linop.solvers.cgls(plan, R.codomain.join(d, none), niter=60, tol=1e-8)
    seconds = (time.perf_counter() - begun) / found.nit
    return next(iter(found.x.arrays.values())), found.nit, seconds


found = np.empty(shape)
blocks, iterations, seconds = zip(*linop.launch(main, workers=4), strict=True)
for worker, block in enumerate(blocks):
    found[X.slices(worker)] = block
error = np.linalg.norm(found - heated) / np.linalg.norm(heated)
print(f"{int(mask.sum())} temperatures, {iterations[0]} iterations: error {error:.2f}")
assert error < 0.5

# %%
# What an iteration costs
# -----------------------
# Forward and adjoint are 40 steps each, and a step sends the edges of the blocks. The
# prediction is of messages on a machine; what was measured includes computing, by four
# threads.

cost = linop.simulate(step)
print(f"a step: {cost.messages} messages, {cost.bytes} bytes")
print(
    f"80 steps: {80e3 * cost.time:.1f} ms predicted, {1e3 * max(seconds):.1f} ms measured"
)

figure, axes = plt.subplot_mosaic("ABC", figsize=(9, 2.6), layout="constrained")
axes = [*axes.values()]
i, j = np.nonzero(mask)
drawn = [
    axes[0].imshow(heated, cmap="inferno"),
    axes[1].scatter(j, i, c=data[i, j], cmap="inferno", s=40, edgecolor="grey"),
    axes[2].imshow(found, cmap="inferno"),
]
axes[1].set(xlim=axes[0].get_xlim(), ylim=axes[0].get_ylim(), aspect="equal")
titles = "what is heated", "temperatures taken", f"found: error {error:.2f}"
for panel, values, title in zip(axes, drawn, titles, strict=True):
    figure.colorbar(values, location="bottom")
    panel.set_title(title)
    panel.axhline(23.5, color="grey", linestyle=":")
    panel.axvline(31.5, color="grey", linestyle=":")
    panel.set_axis_off()
plt.show()

# %%
# Read on: :doc:`/time`, and :doc:`/solvers`.
