"""
Take derivatives of a terrain
=============================

You have heights on a grid that is cut over workers, and want slopes, a shaded map, and the
curvature that says where water gathers. Derivatives read neighbours, also those on other
workers; an inverse problem needs their adjoints, too.
"""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.cbook import get_sample_data

import linop

data = get_sample_data("jacksboro_fault_dem.npz")
height = data["elevation"].astype(float)
metres = 111_200 * data["dy"], 111_200 * data["dx"] * np.cos(np.radians(data["ymin"]))
X = linop.TensorSpace(height.shape, linop.Partition((2, 2)))

# %%
# Slopes
# ------
# A central difference is a stencil: weights by offset. ``boundary="edge"`` repeats the
# outermost heights.

dy = linop.stencil(X, {(1, 0): 0.5 / metres[0], (-1, 0): -0.5 / metres[0]}, boundary="edge")
dx = linop.stencil(X, {(0, 1): 0.5 / metres[1], (0, -1): -0.5 / metres[1]}, boundary="edge")
gradient = linop.block([[dy], [dx]])

# %%
# Curvature
# ---------
# The divergence is minus the adjoint of the gradient, and the Laplacian is the divergence
# of the gradient. The adjoint is derived, so that the edges are right without a thought: no
# height is gained or lost, and the sum over the map is zero.

curvature = -(gradient.H @ gradient)
assert linop.testing.check_self_adjoint(curvature)


def main(backend):
    slopes, curved = gradient.compile(backend), curvature.compile(backend)
    mine = height[X.slices(backend.worker)]
    found = *slopes(mine).values(), curved(mine)
    return found, backend.counters()[0]  # of the gradient


parts = [np.empty_like(height) for _ in range(3)]
results = linop.launch(main, workers=4)
for worker, (blocks, _) in enumerate(results):
    for part, block in zip(parts, blocks, strict=True):
        part[X.slices(worker)] = block
slope_y, slope_x, curved = parts
assert abs(curved.sum()) < 1e-9 * abs(curved).sum()
inside = np.gradient(height, *metres)[0][1:-1]
assert abs(slope_y[1:-1] - inside).max() < 1e-12

# %%
# How little travels
# ------------------
# Each worker sends a row and a column, one message to each of two neighbours, however large
# its block is.

cost = gradient.cost()
counted = sum(row.bytes for _, row in results)
print(f"predicted {cost.messages} messages, {cost.bytes} bytes, counted {counted} bytes")
print(f"of {height.nbytes} bytes of heights")
assert (
    counted == cost.bytes and cost.messages == 8 and cost.bytes == 8 * 2 * sum(height.shape)
)

# %%
# Light from the north-west shades the map.

normal = np.stack([-3 * slope_x, 3 * slope_y, np.ones_like(height)])
light = np.tensordot([-0.5, 0.5, 0.7], normal / np.linalg.norm(normal, axis=0), 1)

figure, axes = plt.subplot_mosaic("ABC", figsize=(9, 3.6), layout="constrained")
axes = [*axes.values()]
shown = axes[0].imshow(height, cmap="terrain")
figure.colorbar(shown, label="metres", location="bottom")
rows, columns = X.slices(0)
axes[0].axhline(rows.stop - 0.5, color="white")
axes[0].axvline(columns.stop - 0.5, color="white")
axes[0].set_title("heights, on four workers")
figure.colorbar(axes[1].imshow(light, cmap="gray"), label="light", location="bottom")
axes[1].set_title("shaded by their slopes")
most = np.quantile(abs(curved), 0.98)
shown = axes[2].imshow(curved, cmap="PuOr", vmin=-most, vmax=most)
figure.colorbar(shown, label="1 / metre", location="bottom")
axes[2].set_title("curvature: valleys are positive")
for image in axes:
    image.set_axis_off()
plt.show()

# %%
# Read on: :doc:`/stencils`.
