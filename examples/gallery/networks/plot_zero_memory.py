"""
Count the memory that ZeRO saves
================================

A model fits, and its gradients and Adam's moments do not. Data parallel training holds all
of them on every worker, and ZeRO cuts them: the optimizer's state (stage 1), gradients too
(stage 2), and parameters (stage 3). How much is it for your model, on how many workers? No
worker has to be started to know.
"""

import copy
from functools import partial

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn

import linop
from linop.strategies import Mesh, estimate, fully_shard

torch.set_num_threads(1)


def model(width=1024):
    block = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True)
    return nn.TransformerEncoder(block, 4, enable_nested_tensor=False)


# %%
# Estimated
# ---------
# On torch's meta device the model takes no memory. ``estimate`` counts the blocks that a
# strategy would make, the optimizer's state, and what is whole for a while.

with torch.device("meta"):
    large = model()
adam = partial(torch.optim.Adam, lr=1e-3)
kinds = "parameters", "gradients", "optimizer", "whole"
units = [f"layers.{k}" for k in range(4)]
counts = [1, 2, 4, 8]
memory = {}
for strategy in ("dp", "zero1", "zero2", "zero3"):
    more = {"units": units} if strategy in ("zero2", "zero3") else {}
    memory[strategy] = [
        estimate(large, strategy, count, adam, **more)[0] for count in counts
    ]
for strategy, found in memory.items():
    parts = ", ".join(f"{kind} {getattr(found[3], kind) / 2**20:.0f}" for kind in kinds)
    print(f"{strategy} on 8 workers, MiB: {parts}")
assert memory["zero3"][3].parameters < 1.01 * memory["dp"][3].parameters / 8
assert memory["zero1"][3].gradients == memory["dp"][3].gradients

# %%
# And counted
# -----------
# A smaller model, sharded over four threads, after a step of Adam: what the tensors hold is
# what was estimated.

small, x = model(64), torch.randn(2, 5, 64)


def main(backend):
    net = copy.deepcopy(small)
    for layer in net.layers:
        fully_shard(layer, Mesh(dp=-1)["dp"])
    optimizer = adam(net.parameters())
    net(x).square().sum().backward()
    optimizer.step()
    own = list(net.parameters())
    states = [t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)]
    return [sum(t.nbytes for t in some) for some in (own, [p.grad for p in own], states)]


wanted = estimate(small, "zero3", 4, adam, units=units)
for held, one in zip(linop.launch(main, workers=4), wanted, strict=True):
    assert held == [one.parameters, one.gradients, one.optimizer]
print(f"a worker of four holds {held} bytes, as estimated")

figure, axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
bottom = np.zeros(4)
for kind, hatch in zip(kinds, ("", "//", "..", "xx"), strict=True):
    sizes = np.array([getattr(found[3], kind) / 2**20 for found in memory.values()])
    axes[0].bar(
        list(memory), sizes, bottom=bottom, label=kind, hatch=hatch, edgecolor="white"
    )
    bottom += sizes
axes[0].set(ylabel="MiB on a worker", title="on one of 8 workers")
axes[0].set_ylim(0, 900)
axes[0].legend()
for (strategy, found), style in zip(memory.items(), ("o-", "s--", "^-", "d:"), strict=True):
    states = [sum(getattr(one, kind) for kind in kinds[:3]) / 2**20 for one in found]
    axes[1].loglog(counts, states, style, base=2, label=strategy)
axes[1].set(xlabel="workers", ylabel="MiB", title="without what is whole for a while")
axes[1].set_xticks(counts, counts)
axes[1].set_yticks([100, 200, 400, 800], [100, 200, 400, 800])
axes[1].legend()
plt.show()

# %%
# Read on: :doc:`/strategies`, and :doc:`/saved_memory`.
