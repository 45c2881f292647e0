"""
Ask what ten thousand workers will do
=====================================

You have a laptop, and a proposal to write for a machine of 10,000 cores. How long do halos
take, and sums? Which workers are the slow ones, and does it matter which are on one
machine? An operator is a description, so it can be asked without running.
"""

import time

import matplotlib.pyplot as plt
import numpy as np

import linop
from linop.planning import Link, Network, Placement

network = Network(latency=2e-6, per_byte=1e-10, between=Link(latency=1e-5, per_byte=4e-10))

# %%
# Halos of 100 × 100 workers
# --------------------------
# A grid of 20,000 × 20,000 points, a halo of four, and 100 workers on each machine: a
# hundred machines. The first placement puts a row of the grid of workers on a machine, the
# second one a square of 10 × 10.

grid = linop.Partition((100, 100))
X = linop.TensorSpace((20_000, 20_000), grid)
H = linop.halo_exchange(X, widths=4)
i, j = np.indices((100, 100)).reshape(2, -1)
placements = {
    "a row on a machine": Placement(i),
    "a square on a machine": Placement(10 * (i // 10) + j // 10),
}

begun = time.perf_counter()
found = {name: linop.simulate(H, network, placed) for name, placed in placements.items()}
print(f"{2 * len(grid.workers)} workers simulated in {time.perf_counter() - begun:.2f} s")
for name, one in found.items():
    between = one.bytes_between_machines.sum() / one.bytes
    print(f"{name}: {1e6 * one.time:.0f} µs, {between:.0%} of the bytes between machines")
row, square = found.values()
assert row.bytes == square.bytes and square.time < row.time
assert square.bytes_between_machines.sum() < 0.3 * row.bytes_between_machines.sum()

# %%
# The adjoint, which adds halos to the blocks that they came from, sends as much.

assert linop.simulate(H.H, network).bytes == row.bytes

# %%
# Halos and sums, from 4 workers to 10,000
# ----------------------------------------
# Each worker keeps its 200 × 200 points. Halos take the same time however many workers
# there are. A sum over all workers, one number of each, takes as long as worker 0 needs for
# a message from everybody; along the rows of the grid first, and then along a column, it
# takes 198 messages instead of 9,999. Sums are adjoints of broadcasts, so the broadcast is
# written, and its adjoint derived.


def halos(n):
    X = linop.TensorSpace((200 * n, 200 * n), linop.Partition((n, n)))
    return linop.halo_exchange(X, widths=4)


def at_once(n):
    return linop.broadcast(
        linop.TensorSpace((1,), linop.Partition((1,))), linop.Partition((n, n))
    ).H


def rows_first(n):
    along = linop.broadcast(
        linop.TensorSpace((1,), linop.Partition((1,))), linop.Partition((n, 1))
    )
    return linop.in_steps(linop.broadcast(along.codomain, linop.Partition((n, n))), along).H


sides = [2, 4, 8, 16, 32, 64, 100]
times = {
    make.__name__.replace("_", " "): [linop.simulate(make(n), network).time for n in sides]
    for make in (halos, at_once, rows_first)
}
assert rows_first(4).equals(at_once(4))
assert max(times["halos"]) < 1.3 * times["halos"][1]

figure, axes = plt.subplot_mosaic("AB;CC", figsize=(8.5, 7), layout="constrained")
axes = [*axes.values()]
for panel, (name, one) in zip(axes, found.items(), strict=False):
    shown = panel.imshow(1e6 * one.seconds.reshape(100, 100), vmin=0, vmax=1e6 * row.time)
    panel.set(
        title=f"{name}:\n{1e6 * one.time:.0f} µs",
        xlabel="column of workers",
        ylabel="row",
    )
figure.colorbar(shown, ax=axes[:2], label="µs until a worker is done")
for (name, values), style in zip(times.items(), ("o-", "s--", "^:"), strict=True):
    axes[2].loglog([n * n for n in sides], [1e6 * t for t in values], style, label=name)
axes[2].set(xlabel="workers", ylabel="µs, predicted", title="a fixed block on each worker")
axes[2].legend()
plt.show()

# %%
# Read on: :doc:`/clusters`.
