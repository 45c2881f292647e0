"""
Send tokens to experts, and bring them back
===========================================

A mixture of experts sends each token to two of eight experts, which live on four workers.
Sending is a matrix of zeros and ones, a new one at each step. Its adjoint is the way back,
so nobody writes that; and you can look at both before you train for a week.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits

import linop

digits = load_digits()
tokens = digits.data[:400] / 16  # 400 tokens of 64 features, 100 on each worker
X = linop.TensorSpace(tokens.shape, linop.Partition((4,)))

# %%
# A router
# --------
# Experts 0 to 7 each have a direction, and a token goes to the two that it is most alike: a
# router as in Mixtral, not trained.

rng = np.random.default_rng(4)
directions = tokens[rng.choice(400, 8, replace=False)] - tokens.mean(axis=0)
scores = (tokens - tokens.mean(axis=0)) @ directions.T / 2
chosen = np.argsort(-scores, axis=1)[:, :2]
gates = np.take_along_axis(scores, chosen, axis=1)
gates = np.exp(gates - gates.max(axis=1, keepdims=True))
gates /= gates.sum(axis=1, keepdims=True)

# %%
# Dispatch and combine
# --------------------
# D copies each token to its experts' workers. D* sums a token's copies, so D* D is twice
# the identity: a proof, for all tokens. With gates on the way back it is ``combine``, and
# experts that do nothing give the tokens back.

routing = linop.Routing(chosen, experts=8)
D = linop.dispatch(X, routing)
C = linop.combine(X, routing, gates)
assert (D.H @ D).equals(2 * linop.identity(X))


def main(backend):
    there, back = D.compile(backend), C.compile(backend)
    arrived = there(tokens[X.slices(backend.worker)])
    return arrived.shape[0], back(arrived), backend.counters()


results = linop.launch(main, workers=4)
assert np.allclose(np.concatenate([back for _, back, _ in results]), tokens)

# %%
# Predicted and counted
# ---------------------

traffic = linop.planning.traffic_matrix(D)
counted = sum(table[0].bytes for *_, table in results)
print(f"predicted {D.cost().bytes} bytes, counted {counted}")
print(traffic)
assert traffic.bytes.sum() == D.cost().bytes == counted

# %%
# A capacity keeps an expert that everybody likes from holding up all the others: tokens
# beyond it pass by.

limited = linop.Routing(chosen, experts=8, capacity=100)
dropped = 1 - limited.sizes.sum() / routing.sizes.sum()
print(f"with a capacity of 100 slots {dropped:.0%} of the copies are dropped")
assert limited.sizes.max() <= 100

figure, axes = plt.subplot_mosaic("AB;CC", figsize=(8.5, 7), layout="constrained")
axes = [*axes.values()]
slots = np.argsort(chosen.reshape(-1), kind="stable")
experts = np.repeat(np.arange(8), routing.sizes)
axes[0].scatter(slots // 2, np.arange(800), s=3, c=[f"C{e // 2}" for e in experts])
for edge in np.cumsum([arrived for arrived, *_ in results])[:-1]:
    axes[0].axhline(edge, color="grey", linewidth=0.8)
for edge in (100, 200, 300):
    axes[0].axvline(edge, color="grey", linewidth=0.8)
axes[0].invert_yaxis()
axes[0].set(
    title="the matrix D, in blocks of workers",
    xlabel="token",
    ylabel="slot of an expert",
)
dense = traffic.bytes.toarray() / 1024
axes[1].imshow(dense, cmap="Blues")
for (a, b), size in np.ndenumerate(dense):
    colour = "white" if size > dense.max() / 2 else "black"
    axes[1].text(b, a, f"{size:.0f}", ha="center", va="center", color=colour)
axes[1].set(
    title="KiB sent",
    xlabel="to worker",
    ylabel="from worker",
    xticks=range(4),
    yticks=range(4),
)
axes[2].bar(
    range(8),
    routing.sizes,
    color=[f"C{e // 2}" for e in range(8)],
    alpha=0.4,
    label="chosen",
)
axes[2].bar(
    range(8),
    limited.sizes,
    color=[f"C{e // 2}" for e in range(8)],
    label="within capacity",
)
axes[2].axhline(100, color="black", linestyle="--", label="capacity")
axes[2].set(
    title="tokens of each expert", xlabel="expert; two on each worker", xticks=range(8)
)
axes[2].set_ylim(0, 160)
axes[2].legend()
plt.show()

# %%
# Read on: :doc:`/experts`.
