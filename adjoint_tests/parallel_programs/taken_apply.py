"""Vocabulary parallel table that is tied with the output layer, of which the logits are gathered.
The functions of autograd are taken once, as many programs do: `copied = Copied.apply`."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

torch.set_default_dtype(torch.float64)

WORLD = 2
WRONG = os.environ.get("CASE", "right") == "wrong"
WORDS, WIDTH = 10, 6


def all_reduced(x):
    dist.all_reduce(x := x.clone())
    return x


class Copied(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x.view_as(x))
    backward = staticmethod(lambda ctx, grad: all_reduced(grad))


class Summed(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: all_reduced(x))
    backward = staticmethod(lambda ctx, grad: grad)


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(WORLD)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx, grad):
        return grad.chunk(WORLD, -1)[dist.get_rank()].contiguous()


copied, summed, gathered = Copied.apply, Summed.apply, Gathered.apply


class Tied(nn.Module):
    def __init__(self, rows=WORDS):
        super().__init__()
        self.table, self.out = nn.Embedding(rows, WIDTH), nn.Linear(WIDTH, rows, bias=False)
        self.mix, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.out.weight = self.table.weight

    def body(self, h):
        return self.norm(h + torch.tanh(self.mix(h)))

    def forward(self, ids):
        return self.out(self.body(self.table(ids)))


class ParallelTied(Tied):
    def forward(self, ids):
        rows = len(self.table.weight)
        local = ids - dist.get_rank() * rows
        there = (local >= 0) & (local < rows)
        h = self.body(summed(self.table(local.where(there, 0)) * there[..., None]))
        return gathered(self.out(h if WRONG else copied(h)))


def twin():
    torch.manual_seed(1111)
    return Tied()


def shard(name, value, rank, world):
    return value.chunk(world)[rank] if name in ("table.weight", "out.weight") else value


def model(twin):
    net, values = ParallelTied(WORDS // WORLD), twin.state_dict()
    net.load_state_dict({k: shard(k, v, dist.get_rank(), WORLD) for k, v in values.items()})
    return net


def batch():
    g = torch.Generator().manual_seed(1112)
    return tuple(torch.randint(0, WORDS, (3, 4), generator=g) for _ in range(2))


def loss(logits, ids):
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


FAULT = {
    "parameter": ["norm.weight", "norm.bias", "mix.weight", "mix.bias", "table.weight"],
    "kind": "missing sum over 2 ranks", "factor": None, "loss": "equal",
    "kinds": {"table.weight": "other"},
    "note": "each rank's rows of the output layer have a term of the gradient of its input",
    "place": ["out", "gathered(self.out(h"],
    "report": None,
}  # fmt: skip
