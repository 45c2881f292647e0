"""
Cut the image of a network, and leave the network as it is
==========================================================

An image is too large for one GPU's memory, and a network of somebody else is to run on it.
Cut into four pieces, each convolution is wrong along the seams, and the error spreads with
depth. ``spatial`` makes each worker fetch what it needs, in each layer, forward and
backward; the network is not changed.
"""

import copy
import time

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_sample_image
from torch import nn

import linop
from linop.strategies import Mesh, spatial

torch.set_num_threads(1)
photo = torch.tensor(load_sample_image("china.jpg")[:240, :320] / 255, dtype=torch.float32)
image = photo.permute(2, 0, 1)[None]

torch.manual_seed(1)
net = nn.Sequential(
    *(nn.Conv2d(3, 8, 5, padding=2), nn.GroupNorm(2, 8), nn.SiLU(), nn.MaxPool2d(2)),
    *(
        nn.Conv2d(8, 16, 5, padding=2),
        nn.SiLU(),
        nn.Conv2d(16, 8, 5, padding=2),
        nn.SiLU(),
    ),
    *(nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(8, 3, 3, padding=1)),
)


def loss(y):
    return (y - image).square().mean()


# %%
# Three ways to run it
# --------------------
# On one process; in four pieces that know nothing of each other; and in four pieces by
# ``spatial``. The last one is two lines.

begun = time.perf_counter()
whole = net(image)
loss(whole).backward()
alone = time.perf_counter() - begun

pieces = [net(half) for row in image.chunk(2, 2) for half in row.chunk(2, 3)]
apart = torch.cat([torch.cat(pieces[:2], 3), torch.cat(pieces[2:], 3)], 2).detach()


def main(backend):
    mesh = Mesh(y=2, x=2)
    cut = spatial(copy.deepcopy(net), mesh["y", "x"], dims=(2, 3))
    for _ in range(2):  # the first step plans
        cut.zero_grad()
        begun = time.perf_counter()
        y = cut(image)
        loss(y).backward()
        seconds = time.perf_counter() - begun
    sent = sum(row.bytes for row in backend.counters())
    return (
        y.whole().detach(),
        cut.module[0].weight.grad,
        tuple(y.block.shape),
        seconds,
        sent,
    )


results = linop.launch(main, workers=4)
together, gradient, block, _, _ = results[0]
seconds = max(r[3] for r in results)
print(
    f"a block is of shape {block}; one process {alone:.2f} s, four threads {seconds:.2f} s"
)
print(f"forward and backward sent {sum(r[4] for r in results) // 2} bytes")

# %%
# Cut by ``spatial`` the result and the gradients are those of one process, up to rounding.
# The group norms' means are over the whole image, too.

assert (together - whole).abs().max() < 1e-4
assert torch.allclose(gradient, net[0].weight.grad, atol=1e-5)
wrong = (apart - whole).abs().amax(1)[0].detach()
right = (together - whole).abs().amax(1)[0].detach()
assert wrong.max() > 0.05 and right.max() < 1e-4

figure, axes = plt.subplots(2, 2, figsize=(8, 6), layout="constrained")
axes = axes.ravel()
axes[0].imshow(photo)
axes[0].set_title("cut into four blocks")
axes[1].imshow(whole[0, 0].detach(), cmap="gray")
axes[1].set_title("a channel of the result")
for panel, error, title in (
    (axes[2], wrong, f"in pieces: wrong by {wrong.max():.2f}"),
    (axes[3], right, f"by spatial: {right.max():.0e}"),
):
    shown = panel.imshow(error, cmap="inferno", vmin=0, vmax=wrong.max())
    panel.set_title(title)
figure.colorbar(shown, ax=list(axes[2:]), label="error")
for panel in axes:
    panel.axhline(119.5, color="white", linestyle=":")
    panel.axvline(159.5, color="white", linestyle=":")
    panel.set_axis_off()
plt.show()

# %%
# Read on: :doc:`/spatial`.
