"""Activations are rounded to eighths, with the identity in the backward pass, in the twin as well.
Tokens are cut over the ranks, and gathered before a layer that is cut by its outputs."""

import os

import torch
import torch.distributed as dist
from torch import nn

torch.set_default_dtype(torch.float64)
WORLD = 2
WRONG = os.environ.get("CASE", "right") == "wrong"
WIDTH, HIDDEN, TOKENS = 4, 6, 6


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.round(x * 8) / 8

    @staticmethod
    def backward(ctx, grad):
        return grad


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        if not WRONG:
            dist.all_reduce(grad := grad.contiguous().clone())
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


class Net(nn.Module):
    def __init__(self, hidden=HIDDEN):
        super().__init__()
        self.stem = nn.Linear(3, WIDTH)
        self.up = nn.Linear(WIDTH, hidden)

    def gathered(self, x):
        return x

    def forward(self, x):
        return torch.tanh(self.up(self.gathered(torch.tanh(Rounded.apply(self.stem(x))))))


class ParallelNet(Net):
    def gathered(self, x):
        return Gather.apply(x)


def twin():
    torch.manual_seed(721)
    return Net()


def shard(name, value, rank, world):
    return value.chunk(world)[rank] if name.startswith("up") else value


def model(twin):
    net = ParallelNet(HIDDEN // WORLD)
    state = {k: shard(k, v, dist.get_rank(), WORLD) for k, v in twin.state_dict().items()}
    net.load_state_dict(state)
    return net


def batch():
    g = torch.Generator().manual_seed(722)
    return torch.randn(TOKENS, 3, generator=g), torch.randn(TOKENS, HIDDEN, generator=g)


def mine(batch, rank, world):
    return batch[0].chunk(world)[rank], batch[1].chunk(world, 1)[rank]


def loss(output, target):
    return ((output - target) ** 2).sum() / TOKENS


def step(net, mine):
    value = loss(net(mine[0]), mine[1])
    value.backward()
    for p in net.stem.parameters():
        dist.all_reduce(p.grad)
    dist.all_reduce(value := value.detach().clone())
    return value


FAULT = {
    "parameter": ["stem.weight", "stem.bias"],
    "kind": "other", "factor": None, "loss": "equal",
    "note": "the gathered tokens meet other hidden units on each rank, and each keeps its term",
    "place": ["Gather"],
    "operator": ["reduce-scatter"],
    "report": None,
}  # fmt: skip
