"""
Take the Fourier transform of an array that is cut
==================================================

A transform along a dimension needs all of it, and blocks hold a part. So something has to
be moved between the transforms; there are two ways to do it, and which is faster depends on
the number of workers. You can ask before you have the cluster.
"""

import time

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_sample_image

import linop
from linop.planning import Link, Network, Placement

photo = load_sample_image("flower.jpg").mean(axis=2) / 255
X = linop.TensorSpace(photo.shape, linop.Partition((4,)), complex)
F = linop.fft(X, out="transposed")
assert F.codomain.axes == (1,)  # the transform is cut in columns

# %%
# Four workers, a photograph
# --------------------------
# Each transforms its rows, sends a part of them to each of the others, and transforms its
# columns. The adjoint is derived, and is the inverse.


def main(backend):
    plan = F.compile(backend)
    mine = photo[X.slices(backend.worker)] + 0j
    transformed = plan(mine)
    assert abs(plan.H(transformed) - mine).max() < 1e-12
    begun = time.perf_counter()
    for _ in range(5):
        plan(mine)
    return transformed, (time.perf_counter() - begun) / 5, backend.counters()[0]


blocks, seconds, counted = zip(*linop.launch(main, workers=4), strict=True)
spectrum = np.concatenate(blocks, axis=1)
assert np.allclose(spectrum, np.fft.fft2(photo, norm="ortho"))
sent = sum(c.bytes for c in counted) // counted[0].calls
assert sent == F.cost().bytes
print(f"predicted {F.cost().bytes} bytes in a call, counted {sent}")
print(f"{1e3 * max(seconds):.1f} ms measured, computing included")

# %%
# Slab or pencil
# --------------
# A cube of 256³ numbers on P workers, eight to a machine. A *slab* moves all at once: the
# fewest bytes, and messages between all pairs of workers. A *pencil* moves along one axis
# of the grid after the other: more bytes, in fewer and larger messages. The prediction
# knows messages and bytes inside of machines and between them, and takes no time for
# computing.

network = Network(latency=2e-6, per_byte=1e-10, between=Link(latency=2e-5, per_byte=2e-10))
grids = [(2, 4), (4, 4), (8, 4), (8, 8), (16, 8), (16, 16)]
predicted = {"slab": [], "pencil": []}
for grid in grids:
    cube = linop.TensorSpace((256,) * 3, linop.Partition(grid), complex)
    placement = Placement.of_blocks(grid[0] * grid[1], per_machine=8)
    for route, times in predicted.items():
        op = linop.fft(cube, route=route, out="transposed")
        times.append(linop.simulate(op, network, placement))
slab, pencil = predicted["slab"][-1], predicted["pencil"][-1]
for name, one in (("slab", slab), ("pencil", pencil)):
    size = one.bytes / 2**30
    print(f"256 workers, {name}: {one.messages} messages, {size:.1f} GiB, {one.time:.4f} s")
assert slab.bytes < pencil.bytes and slab.messages > pencil.messages

figure, axes = plt.subplot_mosaic("AB;CC", figsize=(8, 6), layout="constrained")
axes = [*axes.values()]
axes[0].imshow(photo, cmap="gray")
axes[0].set_title("cut in rows")
axes[1].imshow(np.log(abs(np.fft.fftshift(spectrum)) + 1e-3), cmap="magma")
axes[1].set_title("its transform, cut in columns")
for k in (1, 2, 3):
    axes[0].axhline(k * photo.shape[0] / 4, color="white")
    axes[1].axvline(k * photo.shape[1] / 4, color="white")
for image in axes[:2]:
    image.set_axis_off()
workers = [a * b for a, b in grids]
for (route, found), style in zip(predicted.items(), ("o-", "s--"), strict=True):
    axes[2].loglog(workers, [1e3 * one.time for one in found], style, label=route)
axes[2].set(
    xlabel="workers",
    ylabel="milliseconds, predicted",
    title="messages of a 256³ transform",
)
axes[2].set_xticks(workers, workers)
axes[2].set_yticks([2, 5, 10, 20], [2, 5, 10, 20])
axes[2].minorticks_off()
axes[2].legend()
plt.show()

# %%
# Read on: :doc:`/fourier`.
