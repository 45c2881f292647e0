"""Data parallel by hand: gradients are averaged, and clipped by their norm. The twin clips in its
backward pass."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

torch.set_default_dtype(torch.float64)

WORLD = 2
WRONG = os.environ.get("CASE", "right") == "wrong"
LIMIT = 0.05


class Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *values):
        return tuple(v.view_as(v) for v in values)

    @staticmethod
    def backward(ctx, *grads):
        norm = torch.cat([g.flatten() for g in grads]).norm()
        return tuple(g * (LIMIT / (norm + 1e-6)).clamp(max=1.0) for g in grads)


class Net(nn.Module):
    def __init__(self, clips=False):
        super().__init__()
        self.one, self.two, self.clips = nn.Linear(4, 6), nn.Linear(6, 2), clips

    def forward(self, x):
        values = list(self.parameters())
        w, b, v, c = Clip.apply(*values) if self.clips else values
        return F.linear(torch.relu(F.linear(x, w, b)), v, c)


def twin():
    torch.manual_seed(1101)
    return Net(clips=True)


def model(twin):
    (net := Net()).load_state_dict(twin.state_dict())
    return net


def batch():
    g = torch.Generator().manual_seed(1102)
    return torch.randn(10, 4, generator=g), torch.randn(10, 2, generator=g)


def mine(batch, rank, world):
    return tuple(v[rank::world] for v in batch)


loss = F.mse_loss


def average(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad.div_(WORLD)


def step(model, mine):
    value = loss(model(mine[0]), mine[1])
    value.backward()
    if not WRONG:
        average(model)
    torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
    if WRONG:
        average(model)
    dist.all_reduce(total := value.detach().clone())
    return total / WORLD


FAULT = {
    "parameter": ["one.weight", "one.bias", "two.weight", "two.bias"],
    "kind": "other", "factor": None, "loss": "equal",
    "note": "each rank clips its own gradients, by another norm, before they are averaged",
    "place": ["clip_grad_norm_"],
    "report": None,
}  # fmt: skip
