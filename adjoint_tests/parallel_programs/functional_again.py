"""A perceptron whose hidden units are cut over the ranks. The terms of its outputs are summed by a
functional all-reduce, and every rank computes the loss from the sum."""

import os

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn

torch.set_default_dtype(torch.float64)
WORLD = 2
WRONG = os.environ.get("CASE", "right") == "wrong"


def total(x):
    return funcol.wait_tensor(funcol.all_reduce(x, "sum", dist.group.WORLD))


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return total(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


class Entered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return total(grad.contiguous())


class Perceptron(nn.Module):
    def __init__(self, hidden=6):
        super().__init__()
        self.stem = nn.Linear(4, 5)
        self.up = nn.Linear(5, hidden)
        self.down = nn.Linear(hidden, 3, bias=False)
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.down(F.relu(self.up(torch.tanh(self.stem(x)))))))


class ParallelPerceptron(Perceptron):
    def forward(self, x):
        h = Entered.apply(torch.tanh(self.stem(x)))
        y = self.down(F.relu(self.up(h)))
        y = total(y) if WRONG else Summed.apply(y)
        return self.head(torch.tanh(y))


def twin():
    torch.manual_seed(531)
    return Perceptron()


def shard(name, value, rank, world):
    dim = {"up.weight": 0, "up.bias": 0, "down.weight": 1}.get(name)
    return value if dim is None else value.chunk(world, dim)[rank]


def model(twin):
    net = ParallelPerceptron(3)
    state = {k: shard(k, v, dist.get_rank(), WORLD) for k, v in twin.state_dict().items()}
    net.load_state_dict(state)
    return net


def batch():
    g = torch.Generator().manual_seed(532)
    return torch.randn(5, 4, generator=g), torch.randn(5, 2, generator=g)


loss = F.mse_loss


FAULT = {
    "parameter": ["stem.weight", "stem.bias", "up.weight", "up.bias", "down.weight"],
    "kind": "factor 2", "factor": 2, "loss": "equal",
    "note": "the functional all-reduce is differentiated, by another all-reduce, and the gradient"
            " of its result is whole on every rank",
    "place": ["total(y)", "down", "funcol.all_reduce"],
    "operator": ["too many"],
    "report": None,
}  # fmt: skip
