"""
See which worker holds which part of LeNet-5
============================================

LeNet-5 on four workers, as in the paper by Hewett and Grady: images are cut in height and
width, dense layers in features. You give each layer a partition, and no message and no
backward pass. Which worker has what, layer by layer?
"""

from collections import OrderedDict

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.patches import Rectangle
from sklearn.datasets import load_digits
from torch import nn

import linop
from linop import Partition, layers

torch.set_num_threads(1)
digits = np.kron(load_digits().images[:16] / 16, np.ones((3, 3)))
images = torch.tensor(np.pad(digits, ((0, 0), (2, 2), (2, 2))), dtype=torch.float32)[
    :, None
]

# %%
# The network, and its twin of torch
# ----------------------------------


def distributed():
    image, channels = Partition((1, 1, 2, 2)), Partition((1, 2, 1, 1))
    x, y, W = Partition((1, 2), [0, 1]), Partition((1, 2), [0, 2]), Partition((2, 2))
    named = {
        "scatter": layers.Repartition(Partition((1, 1, 1, 1)), image),
        "C1": layers.Conv2d(image, 1, 6, 5, padding=2),
        "C1 ReLU": nn.ReLU(),
        "S2": layers.MaxPool2d(image, 2),
        "C3": layers.Conv2d(image, 6, 16, 5),
        "C3 ReLU": nn.ReLU(),
        "S4": layers.MaxPool2d(image, 2),
        "by channels": layers.Repartition(image, channels),
        "flatten": nn.Flatten(),
        "C5": layers.Linear(x, 400, 120, P_y=y, P_W=W),
        "C5 ReLU": nn.ReLU(),
        "transpose": layers.Repartition(y, x),
        "F6": layers.Linear(x, 120, 84, P_y=y, P_W=W),
        "F6 ReLU": nn.ReLU(),
        "transpose again": layers.Repartition(y, x),
        "output": layers.Linear(x, 84, 10, P_y=y, P_W=W),
        "gather": layers.Repartition(y, Partition((1, 1))),
    }
    return nn.Sequential(OrderedDict(named))


torch.manual_seed(0)
C1, C3 = nn.Conv2d(1, 6, 5, padding=2), nn.Conv2d(6, 16, 5)
C5, F6, output = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)
steps = {
    "C1": C1,
    "C1 ReLU": nn.ReLU(),
    "S2": nn.MaxPool2d(2),
    "C3": C3,
    "C3 ReLU": nn.ReLU(),
}
steps |= {"S4": nn.MaxPool2d(2), "flatten": nn.Flatten(), "C5": C5, "C5 ReLU": nn.ReLU()}
steps |= {"F6": F6, "F6 ReLU": nn.ReLU(), "output": output}
twin = nn.Sequential(OrderedDict(steps))

# %%
# What ran
# --------
# The state of the twin loads into the network, and each worker takes its blocks of it.
# Worker 0 passes the images, and gets the scores.


def main(backend):
    net = distributed()
    layers.scatter_state(net, twin.state_dict())
    x = images if backend.worker == 0 else layers.zero_volume_tensor(batch=len(images))
    shapes = {"images": tuple(x.shape)}
    for name, layer in net.named_children():
        x = layer(x)
        shapes[name] = tuple(x.shape)
    x.sum().backward()
    held = sum(p.numel() for p in net.parameters())
    sent = sum(row.bytes for row in backend.counters())
    return shapes, held, x.detach(), sent


results = linop.launch(main, workers=4)
assert torch.allclose(results[0][2], twin(images), atol=1e-5)
held = [worker[1] for worker in results]
assert sum(held) == sum(p.numel() for p in twin.parameters()) == 61706
print(f"parameters on the workers: {held}")
print(f"forward and backward sent {sum(worker[3] for worker in results)} bytes")

# %%
# The blocks of one image: boxes are as wide and high as the activations of a channel, with
# the number of channels beside them; of dense layers as long as the features are many.
# Convolutions are balanced by their output, and halos come and go inside of the layers.

hidden = "flatten", "transpose", "transpose again"
names = [name for name in results[0][0] if "ReLU" not in name and name not in hidden]
figure, panel = plt.subplots(figsize=(10, 5), layout="constrained")
for column, name in enumerate(names):
    for worker, (shapes, *_) in enumerate(results):
        shape = shapes[name][1:]
        if 0 in shape:
            continue
        width, height = (
            (shape[2] / 33, shape[1] / 33) if len(shape) == 3 else (0.2, shape[0] / 110)
        )
        height = max(height, 0.06)
        corner = column - width / 2, worker - height / 2
        panel.add_patch(Rectangle(corner, width, height, color=f"C{worker}", alpha=0.5))
        text = f"{shape[0]}×{shape[1]}×{shape[2]}" if len(shape) == 3 else f"{shape[0]}"
        panel.text(column, worker + 0.52, text, ha="center", va="center", fontsize=8)
panel.set_xticks(range(len(names)), names, rotation=30)
panel.set_yticks(range(4), [f"worker {w}" for w in range(4)])
panel.set(xlim=(-0.7, len(names) - 0.4), ylim=(3.7, -0.6), title="activations of one image")
for edge in panel.spines.values():
    edge.set_visible(False)
plt.show()

# %%
# Read on: :doc:`/layers`.
