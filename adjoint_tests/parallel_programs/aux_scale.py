"""Soft routing with a balancing term of the global batch: each expert's load is summed over the
data parallel ranks, and meets the rank's own probabilities. Gradients are averaged."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

torch.set_default_dtype(torch.float64)
WORLD = 2
WRONG = os.environ.get("CASE", "right") == "wrong"
EXPERTS, WIDTH = 3, 4


class GlobalBalance(nn.Module):
    """E * sum over experts of (load / tokens) * (probabilities / tokens)."""

    def __init__(self, spread):
        super().__init__()
        self.spread = spread

    def forward(self, p):
        load = F.one_hot(p.argmax(-1), EXPERTS).sum(0).to(p.dtype)
        tokens = own = len(p)
        if self.spread:
            dist.all_reduce(load)
            tokens = own * dist.get_world_size()
        return EXPERTS * (load / tokens * (p.sum(0) / (tokens if WRONG else own))).sum()


class Model(nn.Module):
    def __init__(self, spread=False):
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 2)
        self.balance = GlobalBalance(spread)

    def forward(self, x):
        h = torch.tanh(self.inp(x))
        p = torch.softmax(self.gate(h), -1)
        return torch.einsum("te,eio,ti->to", p, self.experts, h), self.balance(p)


def twin():
    torch.manual_seed(851)
    return Model()


def model(twin):
    net = Model(spread=True)
    net.load_state_dict(twin.state_dict())
    return net


def batch():
    return tuple(torch.randn(2, 10, WIDTH, generator=torch.Generator().manual_seed(852)))


def mine(batch, rank, world):
    return tuple(v.chunk(world)[rank] for v in batch)


def loss(output, target):
    y, balance = output
    return F.mse_loss(y, target) + balance


def step(model, mine):
    value = loss(model(mine[0]), mine[1])
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad.div_(WORLD))
    dist.all_reduce(total := value.detach() / WORLD)
    return total


FAULT = {
    "parameter": ["inp.weight", "inp.bias", "gate.weight"],
    "kind": "other", "factor": None, "loss": "differs",
    "note": "the sum of the rank's own probabilities is divided by the tokens of both ranks, and "
            "then averaged: the balancing term counts half",
    "place": ["balance", "(tokens if WRONG else own)", "GlobalBalance"],
    "report": "NVIDIA/Megatron-LM#3672",
}  # fmt: skip
