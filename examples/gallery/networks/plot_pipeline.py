"""
Shrink the bubble of a pipeline
===============================

A network is cut into four stages on four workers. The last stage waits for the first batch,
the first one for the last gradient: the *bubble*. Batches cut into micro-batches, and
another order of work, shrink it. You can see and compute it before you write a line of
training code; then the same table runs.
"""

import time

import matplotlib.pyplot as plt
import torch
from matplotlib.patches import Patch
from torch import nn

import linop
from linop import schedules
from linop.strategies import Pipeline

torch.set_num_threads(1)

# %%
# Schedules are data
# ------------------
# Each is a table of actions of each worker, in the literature's orders. ``check`` proves
# that it ends, and counts what is kept; ``simulate`` takes costs of a forward, and of a
# backward, or of its two halves.

tables = {
    "GPipe": schedules.gpipe(4, 8),
    "1F1B": schedules.one_forward_one_backward(4, 8),
    "interleaved 1F1B": schedules.interleaved(8, 8),
    "zero bubble (ZB-H1)": schedules.zero_bubble_h1(4, 8),
}
costs = {"F": 1, "B": 2, "I": 1, "W": 1, "U": 0}
found = {}
for name, table in tables.items():
    each = {kind: cost / (table.stages // 4) for kind, cost in costs.items()}
    found[name] = schedules.simulate(table, each)
    kept = max(schedules.check(table).activations.values())
    idle = float(found[name].bubble_of_total)
    print(f"{name:20} idle {idle:.1%}; keeps activations of {kept} micro-batches")
assert found["GPipe"].time == found["1F1B"].time == (8 + 3) * 3
assert (
    found["zero bubble (ZB-H1)"].time < found["interleaved 1F1B"].time < found["1F1B"].time
)

# %%
# Predicted and measured
# ----------------------
# Stages that wait for 2 ms in forward and 4 ms in backward stand for a network, so that two
# cores are enough for four workers.


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        time.sleep(0.002)
        y = self.linear(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: time.sleep(0.004))
        return y


def main(backend, table):
    stages = [Stage() if s % 4 == backend.worker else None for s in range(table.stages)]
    pipe = Pipeline(stages, table, nn.MSELoss(reduction="sum"), backend=backend)
    x = torch.randn(16, 4)
    seconds = []
    for _ in range(4):
        begun = time.perf_counter()
        pipe.step(x, x)
        seconds.append(time.perf_counter() - begun)
    return min(seconds)


measured = {}
for name in ("GPipe", "1F1B"):
    measured[name] = max(linop.launch(lambda b, t=tables[name]: main(b, t), workers=4))
    predicted = 0.002 * float(found[name].time)
    took = 1e3 * measured[name]
    print(f"{name}: {1e3 * predicted:.0f} ms predicted, {took:.0f} ms measured")
    assert predicted < 1.05 * measured[name]

# %%
# With more micro-batches the bubble is shorter beside the work: (p − 1) / (M + p − 1) of
# the total, for p stages and M micro-batches.

counts = [4, 8, 16, 32, 64]
make = (
    schedules.one_forward_one_backward,
    schedules.interleaved,
    schedules.zero_bubble_h1,
)
colours = {"F": "#4e79a7", "B": "#59a14f", "I": "#76b7b2", "W": "#f28e2b"}
names = {
    "F": "forward",
    "B": "backward",
    "I": "gradient of input",
    "W": "gradient of weights",
}

figure, axes = plt.subplots(5, 1, figsize=(8.5, 9), layout="constrained")
for panel, (name, one) in zip(axes, found.items(), strict=False):
    for worker, actions in enumerate(one.workers):
        for action, start, end in actions:
            if (kind := str(action.kind)) in colours:
                at, long = float(start), float(end - start)
                later = action.stage >= 4
                look = {"color": colours[kind], "alpha": 0.5 if later else 1}
                panel.barh(worker, long, left=at, edgecolor="white", **look)
                where = at + long / 2, worker + 0.05
                panel.text(*where, action.micro_batch, ha="center", va="center", fontsize=7)
    idle = float(one.bubble_of_total)
    panel.set(title=f"{name}: {idle:.0%} idle", xlim=(0, 33), yticks=range(4))
    panel.invert_yaxis()
handles = [Patch(color=colours[kind], label=names[kind]) for kind in colours]
panel.legend(handles=handles, loc="right", fontsize=7)
for generator, style in zip(make, ("o-", "s--", "^:"), strict=True):
    idle = []
    for count in counts:
        table = generator(8 if generator is schedules.interleaved else 4, count)
        each = {kind: cost / (table.stages // 4) for kind, cost in costs.items()}
        idle.append(100 * float(schedules.simulate(table, each).bubble_of_total))
    axes[4].semilogx(counts, idle, style, base=2, label=generator.__name__)
axes[4].set(xlabel="micro-batches", ylabel="% idle", xticks=counts, xticklabels=counts)
axes[4].legend(fontsize=7)
plt.show()

# %%
# Read on: :doc:`/pipelines`.
