"""Sequence parallel norms before a layer that is cut by its outputs. The gradients of the norms are
summed over the ranks by a functional collective after the backward pass."""

import os

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn

torch.set_default_dtype(torch.float64)
WORLD = 2
WRONG = os.environ.get("CASE", "right") == "wrong"
WIDTH, TOKENS = 4, 6


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x):
        return self.weight * x / x.pow(2).mean(-1, keepdim=True).add(1e-6).sqrt()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = Scaled()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.last = Scaled()

    def forward(self, x):
        return self.last(x + F.silu(self.mix(self.first(x))))


def twin():
    torch.manual_seed(521)
    return Net()


def model(twin):
    net = Net()
    net.load_state_dict(twin.state_dict())
    return net


def batch():
    return tuple(torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(522)))


def mine(batch, rank, world):
    return tuple(one.chunk(world)[rank] for one in batch)


def loss(output, target):
    return (output - target).abs().pow(3).sum() / TOKENS


def step(net, mine):
    value = loss(net(mine[0]), mine[1])
    value.backward()
    for p in (net.mix.weight, net.mix.bias):
        dist.all_reduce(p.grad)
    for norm in (net.first, net.last):
        total = funcol.all_reduce(norm.weight.grad, "sum", dist.group.WORLD)
        if not WRONG:
            norm.weight.grad.copy_(total)
    return funcol.all_reduce(value.detach(), "sum", dist.group.WORLD)


FAULT = {
    "parameter": ["first.weight", "last.weight"],
    "kind": "missing sum over 2 ranks", "factor": None, "loss": "equal",
    "note": "a functional all-reduce is not in place: its result is dropped",
    "place": ["funcol.all_reduce(norm.weight.grad", "first", "last"],
    "operator": ["result"],
    "report": None,
}  # fmt: skip
