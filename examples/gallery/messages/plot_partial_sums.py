"""
Fit a line with several workers, right and fast
===============================================

Progression of diabetes is explained by ten measurements of 442 patients. Four workers have
some of the patients each, and the fit needs sums over all of them. Adding to one shared sum
is what one writes first: it is wrong without a lock, and slow with one. Each worker's own
sum, and one message, is right.
"""

import threading
import time

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_diabetes

import linop

x, y = load_diabetes(return_X_y=True)
x = np.column_stack([x, np.ones(len(y))])
wanted = np.linalg.lstsq(x, y)[0]
rows = np.array_split(np.arange(len(y)), 4)

# %%
# A shared sum is wrong
# ---------------------
# ``total += term`` reads the total, adds, and writes it back. If two workers read before
# either writes, one term is lost. Here a barrier lets that happen each time; without it, it
# happens some of the time, which is worse.

shared = {"total": 0.0}
everybody = threading.Barrier(4)


def adds(term):
    read = shared["total"]
    everybody.wait()
    shared["total"] = read + term


threads = [threading.Thread(target=adds, args=(float(y[r].sum()),)) for r in rows]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
lost = 1 - shared["total"] / y.sum()
print(f"{lost:.0%} of the sum is lost")
assert lost > 0.5

# %%
# With a lock it is slow
# ----------------------
# Each patient's term waits for the lock of the one total.

lock = threading.Lock()


def locked(backend):
    for row in rows[backend.worker]:
        term = np.outer(x[row], x[row])
        with lock:
            total[...] += term


total = np.zeros((11, 11))
begun = time.perf_counter()
linop.launch(locked, workers=4)
seconds = {"shared, with a lock": time.perf_counter() - begun}
assert np.allclose(total, x.T @ x)

# %%
# Partial sums
# ------------
# Each worker adds up its own patients, and only the four sums travel: one message from each
# worker to each other. The order of the additions is fixed, so that all workers have the
# same coefficients, to the last bit, in each run.

sums = linop.all_reduce(
    linop.TensorSpace((11, 12), linop.Partition((4,)), axes=[linop.COPIES], name="sum")
)


def partial_sums(backend):
    plan, mine = sums.compile(backend), rows[backend.worker]
    each = []
    for _ in range(20):
        begun = time.perf_counter()
        total = plan(x[mine].T @ np.column_stack([x[mine], y[mine]]))
        each.append(time.perf_counter() - begun)
    return np.linalg.solve(total[:, :-1], total[:, -1]), min(each)


results = linop.launch(partial_sums, workers=4)
found, predicted = results[0][0], linop.simulate(sums)
seconds["partial sums"] = max(once for _, once in results)
assert np.allclose(found, wanted)
assert all((found == other).all() for other, _ in results)
print(f"{predicted.messages} messages, {predicted.bytes} bytes")
print(f"{'partial sums':20} {1e6 * predicted.time:9.0f} µs predicted")
for name, value in seconds.items():
    print(f"{name:20} {1e6 * value:9.0f} µs measured")

figure, axes = plt.subplot_mosaic("AA;BC", figsize=(8, 6.6), layout="constrained")
axes = [*axes.values()]
for k, r in enumerate(rows):
    axes[0].plot(x[r] @ found, y[r], ".", label=f"worker {k}")
axes[0].plot(axes[0].get_xlim(), axes[0].get_xlim(), "k-", linewidth=0.8)
axes[0].set(xlabel="fitted", ylabel="measured", title="442 patients, on four workers")
axes[0].legend(fontsize=7)
axes[1].bar(["the sum", "a shared one"], [y.sum(), shared["total"]], color=["C0", "C3"])
axes[1].set_title(f"without a lock {lost:.0%} may be lost")
axes[2].bar(list(seconds), [1e6 * s for s in seconds.values()])
axes[2].set(yscale="log", ylabel="µs, measured", title="sums over all patients")
plt.show()

# %%
# Read on: :doc:`/exact_sums`.
