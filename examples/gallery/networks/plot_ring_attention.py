"""
Run attention on a sequence that is cut over workers
====================================================

A text is so long that its activations do not fit on one GPU. Cut into parts, tokens still
have to look at all tokens before them. In ring attention the keys and values travel around
the workers, which compute while they do. Who computes what, and when, and is it fair?
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch.nn import functional

import linop
from linop.strategies import ContextParallel, Mesh

torch.set_num_threads(1)
torch.manual_seed(0)
tokens, workers = 96, 4
q, k, v = torch.randn(3, 1, 2, tokens, 16, dtype=torch.float64)
q.requires_grad = True

# %%
# Four workers, one sequence
# --------------------------
# Under ``with cp:`` torch's own function is that of the whole sequence. Each worker passes
# its tokens.


def main(backend, zigzag):
    cp = ContextParallel(Mesh(cp=-1)["cp"], zigzag=zigzag)
    mine = [cp.shard(x.detach(), 2).requires_grad_() for x in (q, k, v)]
    with cp:
        y = functional.scaled_dot_product_attention(*mine, is_causal=True)
    y.square().sum().backward()
    sent = sum(row.bytes for row in backend.counters())
    return cp.positions(tokens).numpy(), cp.unshard(y.detach(), 2), mine[0].grad, sent


whole = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
whole.square().sum().backward()
results = {}
for name, zigzag in (("in order", False), ("zigzag", True)):
    results[name] = linop.launch(lambda backend, z=zigzag: main(backend, z), workers)
    for positions, y, gradient, _ in results[name]:
        assert (y - whole).abs().max() < 1e-12
        assert (gradient - q.grad[:, :, positions]).abs().max() < 1e-12

# %%
# Fair, or not
# ------------
# A causal token looks back only, so the last tokens have the most to do. Cut in order, the
# last worker has seven times the work of the first; in zigzag each worker has two chunks,
# one from the begin and one from the end, and all have the same.

work = {
    name: [int((positions + 1).sum()) for positions, *_ in found]
    for name, found in results.items()
}
for name, pairs in work.items():
    sent = sum(worker[3] for worker in results[name])
    print(f"{name:9} pairs of query and key: {pairs}; sent {sent} bytes")
assert max(work["zigzag"]) - min(work["zigzag"]) <= tokens
assert max(work["in order"]) > 6 * min(work["in order"])

# %%
# The step of the ring is an operator. It is a permutation, so its derived adjoint, by which
# gradients travel back, is its inverse.

block = linop.TensorSpace((tokens, 16), linop.Partition((workers,)))
step = linop.shift(block, 1)
assert (step.H @ step).equals(linop.identity(block))
print(f"a step: {step.cost().messages} messages, {step.cost().bytes} bytes")

figure, axes = plt.subplot_mosaic("AB;CC", figsize=(8.5, 7), layout="constrained")
axes = [*axes.values()]
for panel, (name, found) in zip(axes, results.items(), strict=False):
    owner = np.empty(tokens, int)
    for worker, (positions, *_) in enumerate(found):
        owner[positions] = worker
    steps = (owner[:, None] - owner[None, :]) % workers
    picture = np.where(np.tri(tokens, dtype=bool), steps, np.nan)
    shown = panel.imshow(picture, cmap="viridis", vmin=-0.5, vmax=workers - 0.5)
    for edge in np.flatnonzero(np.diff(owner)) + 0.5:
        panel.axhline(edge, color="white", linewidth=0.8)
        panel.axvline(edge, color="white", linewidth=0.8)
    middles = [(owner[a], a) for a in range(tokens // 16, tokens, tokens // 8)]
    panel.set_yticks([a for _, a in middles], [f"worker {w}" for w, _ in middles])
    panel.set(title=f"{name}: step of each pair", xlabel="key")
figure.colorbar(shown, ax=axes[:2], ticks=range(workers), label="step of the ring")
for k, (name, pairs) in enumerate(work.items()):
    axes[2].bar(np.arange(workers) + 0.4 * k, pairs, 0.38, label=name, hatch="/" * k)
axes[2].set_xticks(np.arange(workers) + 0.2, [f"worker {w}" for w in range(workers)])
axes[2].set_title("pairs that a worker computes")
axes[2].legend()
plt.show()

# %%
# Read on: :doc:`/attention`.
