"""Data parallelism by hand: each rank goes through its samples in two micro-batches of unequal
sizes."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

torch.set_default_dtype(torch.float64)
WORLD = 2
WRONG = os.environ.get("CASE", "right") == "wrong"
SAMPLES, MICRO = 10, 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def twin():
    torch.manual_seed(851)
    return Net()


def model(twin):
    net = Net()
    net.load_state_dict(twin.state_dict())
    return net


def batch():
    g = torch.Generator().manual_seed(852)
    return torch.randn(SAMPLES, 5, generator=g), torch.randn(SAMPLES, 3, generator=g)


loss = F.mse_loss


def mine(batch, rank, world):
    return tuple(v.chunk(world)[rank] for v in batch)


def step(model, mine):
    total = torch.zeros(())
    parts = list(zip(*(v.split(MICRO) for v in mine), strict=True))
    for x, target in parts:
        value = loss(model(x), target)
        weight = 1 / len(parts) if WRONG else len(x) / len(mine[0])
        (value * weight / WORLD).backward()
        total += value.detach() * weight / WORLD
    for p in model.parameters():
        dist.all_reduce(p.grad)
    dist.all_reduce(total)
    return total


FAULT = {
    "parameter": ["up.weight", "up.bias", "down.weight", "down.bias"],
    "kind": "other", "factor": None, "loss": "differs", "accept": ["mean of unequal means"],
    "note": "the mean of the means of three and of two samples",
    "place": ["(value * weight / WORLD).backward()",
              "weight = 1 / len(parts) if WRONG else len(x) / len(mine[0])"],
    "report": None,
}  # fmt: skip
