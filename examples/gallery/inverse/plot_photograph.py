"""
Filter a photograph that is cut over workers
============================================

An image is too large for one worker, so nine workers have a block each, and you want to
blur it. Near the edge of its block a worker needs pixels of its neighbours: a *halo*. How
wide is it, how many bytes travel, and can the seams be seen?
"""

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Rectangle
from sklearn.datasets import load_sample_image

import linop

photo = load_sample_image("china.jpg").mean(axis=2) / 255
X = linop.TensorSpace(photo.shape, linop.Partition((3, 3)))

# %%
# How wide a halo is
# ------------------
# A kernel of 31 × 31 pixels reaches 15 pixels beyond a block. At the edges of the
# photograph there is nothing to fetch, and the worker in the middle needs all of its eight
# neighbours. ``halo_geometry`` says so for any kernel, stride and dilation.

reach = {}
for size in (11, 31, 91):
    rows, columns = linop.halo_geometry(photo.shape, X.partition, size, padding=size // 2)[
        4
    ]
    reach[size] = rows.start, rows.stop, columns.start, columns.stop
    assert rows.left_halo == rows.right_halo == size // 2
    print(f"kernel {size} × {size}: worker 4 needs rows {rows.start} to {rows.stop}")

# %%
# The blur
# --------
# A Gaussian is a product of two filters of one dimension, and so is the operator. Each
# filter brings the pixels that it reads, and no others. Nobody exchanges halos by hand,
# here or in the adjoint.

weights = np.exp(-(np.arange(-15, 16) ** 2) / 50.0)
weights /= weights.sum()
down = linop.stencil(X, weights[:, None], boundary="reflect")
across = linop.stencil(X, weights[None, :], boundary="reflect")
blur = down @ across


def main(backend):
    plan = blur.compile(backend)
    mine = plan(photo[X.slices(backend.worker)])
    return mine, backend.counters()[0]


results = linop.launch(main, workers=9)
blurred = np.empty_like(photo)
for worker, (block, _) in enumerate(results):
    blurred[X.slices(worker)] = block

alone = np.pad(photo, 15, mode="reflect")  # the same on one worker
alone = sum(w * alone[k : k + len(photo)] for k, w in enumerate(weights))
alone = sum(w * alone[:, k : k + photo.shape[1]] for k, w in enumerate(weights))
assert abs(blurred - alone).max() < 1e-12  # there are no seams
assert linop.testing.check_adjoint(blur)

# %%
# Predicted and counted
# ---------------------
# ``cost`` says what will travel before anything runs. The workers counted what they sent:

predicted = blur.cost()
counted = [counter for _, counter in results]
print(f"predicted {predicted.messages} messages, {predicted.bytes} bytes")
messages, size = (sum(getattr(c, what) for c in counted) for what in ("messages", "bytes"))
print(f"counted   {messages} messages, {size} bytes")
assert predicted.messages == messages and predicted.bytes == size

# %%
# Bytes grow with the width of the kernel, in a straight line as long as halos are narrow,
# then faster, by the corners. Where a halo is wider than a block, more distant workers
# send, too.

sizes = range(1, 202, 20)
sent = [
    linop.halo_exchange(X, size, padding=size // 2).cost().bytes / 2**20 for size in sizes
]

figure, axes = plt.subplot_mosaic("AA;BC", figsize=(8, 7.4), layout="constrained")
axes = [*axes.values()]
axes[0].imshow(photo, cmap="gray")
for worker in X.partition.workers:
    rows, columns = X.slices(worker)
    corner = columns.start, rows.start
    size = columns.stop - columns.start, rows.stop - rows.start
    axes[0].add_patch(Rectangle(corner, *size, fill=False, edgecolor="white", linewidth=1))
for (size, (top, bottom, left, right)), style in zip(
    reach.items(), (":", "--", "-"), strict=True
):
    box = Rectangle((left, top), right - left, bottom - top, fill=False, linestyle=style)
    box.set(edgecolor="yellow", linewidth=2, label=f"{size} × {size}")
    axes[0].add_patch(box)
axes[0].legend(title="needed for kernel", loc="lower right")
axes[0].set_title("nine blocks, and what worker 4 needs")
axes[1].imshow(blurred, cmap="gray")
axes[1].set_title("blurred by nine workers: no seams")
axes[2].plot(sizes, sent, "o-")
axes[2].set(
    xlabel="width of the kernel, pixels",
    ylabel="MiB sent",
    title="halos of all workers",
)
for image in axes[:2]:
    image.set_axis_off()
plt.show()

# %%
# Read on: :doc:`/stencils`.
