"""
Locate a source by running waves backwards
==========================================

Something made a sound, and microphones near the upper edge heard it. Where was it? The
adjoint of the time loop, which you do not write, plays the records backwards, and the waves
meet at the source.
"""

import matplotlib.pyplot as plt
import numpy as np

import linop
from linop import Partition, TensorSpace, hstack, repartition, vstack, zero

shape, steps = (90, 120), 230
U, B = (
    TensorSpace(shape, Partition((2, 2)), name=name) for name in "ub"
)  # now, and before

# %%
# A step of the wave equation
# ---------------------------
# :math:`u \leftarrow 2 u - b + c\, \Delta u` and :math:`b \leftarrow u`, as one operator on
# both. The square c of the speed grows with depth, and the blocks of 2 × 2 workers get
# their neighbours' edges by the stencil.

c = np.linspace(0.1, 0.3, shape[0])[:, None] * np.ones(shape[1])
cross = dict.fromkeys([(1, 0), (-1, 0), (0, 1), (0, -1)], c)
ahead, keep = linop.stencil(U, {(0, 0): 2 - 4 * c, **cross}), repartition(U, B)
step = vstack(hstack(ahead, -keep.H), hstack(keep, zero(B, B)))

# %%
# What the microphones hear
# -------------------------
# They are a crop: row 3 of 90. The loop maps the first state to the records of all steps.
# Its step is compiled once, whatever the number of steps.

row = linop.pad(U, [(-3, 4 - shape[0]), (0, 0)])
hears = hstack(row, zero(B, row.codomain))
rest = vstack(linop.identity(U), keep)  # the same before and now: nothing moves yet
loop = linop.timeloop(step, steps, None, hears) @ rest
assert linop.testing.check_adjoint(linop.timeloop(step, 3, None, hears) @ rest)

i, j = np.indices(shape)
sound = np.exp(-((i - 55) ** 2 + (j - 75) ** 2) / 6.0)


def main(backend):
    plan = loop.compile(backend)
    records = plan(backend.vector(U, sound[U.slices(backend.worker)]))
    back = plan.H(records)
    return records, back, sum(row.bytes for row in backend.counters())


results = linop.launch(main, workers=4)
heard, back = (
    {name: a for found in results for name, a in found[k].arrays.items()} for k in (0, 1)
)
records = loop.codomain.gather(heard)[:, 0]
image = U.gather(back)

# %%
# The image is largest where the sound was.

found = np.unravel_index(image.argmax(), shape)
print(f"the sound was at (55, 75); the image is largest at {tuple(map(int, found))}")
assert abs(found[0] - 55) <= 3 and abs(found[1] - 75) <= 3

# %%
# What a step sends
# -----------------
# Two neighbours of each block, predicted and counted.

cost = step.cost()
predicted, counted = steps * (cost.bytes + step.H.cost().bytes), sum(r[2] for r in results)
print(f"a step sends {cost.messages} messages, {cost.bytes} bytes")
print(f"forwards and backwards: predicted {predicted} bytes, counted {counted}")
assert predicted == counted

figure, axes = plt.subplot_mosaic("AB;CC", figsize=(8, 6.6), layout="constrained")
axes = [*axes.values()]
axes[0].imshow(sound, cmap="gray_r")
axes[0].plot(np.arange(0, 120, 8), np.full(15, 3), "v", color="C3")
axes[0].set_title("the sound, and microphones in row 3")
most = 0.3 * abs(records).max()
axes[1].imshow(records, cmap="RdBu", vmin=-most, vmax=most, aspect="auto")
axes[1].set(title="what they hear", xlabel="microphone", ylabel="step")
axes[2].imshow(image, cmap="RdBu", vmin=-image.max(), vmax=image.max())
axes[2].plot(75, 55, "o", fillstyle="none", markersize=14, color="black")
axes[2].set_title("played backwards by the adjoint")
for panel in axes[::2]:
    panel.axhline(44.5, color="grey", linestyle=":")
    panel.axvline(59.5, color="grey", linestyle=":")
    panel.set_axis_off()
plt.show()

# %%
# Read on: :doc:`/time`.
