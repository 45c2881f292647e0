"""Columns of a hidden layer are computed on different ranks and gathered; the layers after it
run on every rank alike, and so does the loss."""

import os

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_fn
import torch.nn.functional as F
from torch import nn

torch.set_default_dtype(torch.float64)
WORLD = 4
WRONG = os.environ.get("CASE", "right") == "wrong"
WIDTH, HIDDEN = 5, 8


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(WORLD)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        return grad.chunk(WORLD, 1)[dist.get_rank()]


class Net(nn.Module):
    def __init__(self, hidden=HIDDEN):
        super().__init__()
        self.hidden = nn.Linear(WIDTH, hidden)
        self.gate = nn.Linear(WIDTH, hidden, bias=False)
        self.out = nn.Linear(HIDDEN, 3)

    def features(self, x):
        return torch.sigmoid(self.gate(x)) * self.hidden(x)

    def forward(self, x):
        return self.out(self.features(x))


class ColumnNet(Net):
    def features(self, x):
        if WRONG:
            return torch.cat(dist_fn.all_gather(super().features(x)), 1)
        return Gather.apply(super().features(x))


def twin():
    torch.manual_seed(911)
    return Net()


def shard(name, value, rank, world):
    return value if name.startswith("out") else value.chunk(world)[rank]


def model(twin):
    net = ColumnNet(HIDDEN // WORLD)
    state = {k: shard(k, v, dist.get_rank(), WORLD) for k, v in twin.state_dict().items()}
    net.load_state_dict(state)
    return net


def batch():
    g = torch.Generator().manual_seed(912)
    return torch.randn(6, WIDTH, generator=g), torch.randint(0, 3, (6,), generator=g)


loss = F.cross_entropy


FAULT = {
    "parameter": ["hidden.weight", "hidden.bias", "gate.weight"],
    "kind": "factor 4", "factor": 4.0, "loss": "equal",
    "note": "the gathered features are replicated, and the gather's backward sums the equal "
            "gradients of the 4 ranks: a slice is its adjoint here",
    "place": ["dist_fn.all_gather", "features", "hidden", "gate"],
    "report": "pytorch/pytorch#58005",
}  # fmt: skip
