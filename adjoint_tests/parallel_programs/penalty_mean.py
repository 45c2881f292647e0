"""A gradient penalty, the square of a mean of norms beside one: each rank takes the mean of its own
samples."""

import os

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dfn
import torch.nn.functional as F
from torch import nn

torch.set_default_dtype(torch.float64)
WRONG = os.environ.get("CASE", "right") == "wrong"


WORLD = 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 5), nn.Linear(5, 1)

    def forward(self, x):
        x = x.clone().requires_grad_()
        y = self.b(torch.tanh(self.a(x)))
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y, g


def twin():
    torch.manual_seed(3)
    return Net()


def model(twin):
    import copy

    return copy.deepcopy(twin)


def batch():
    g = torch.Generator().manual_seed(5)
    return torch.randn(8, 3, generator=g), torch.randn(8, 1, generator=g)


def mine(batch, rank, world):
    return tuple(b.chunk(world)[rank] for b in batch)


def loss(out, t):
    y, g = out
    return F.mse_loss(y, t) + (g.norm(dim=1).mean() - 1) ** 2


def step(model, mine):
    y, g = model(mine[0])
    n = g.norm(dim=1).mean()
    n = n if WRONG else dfn.all_reduce(n) / dist.get_world_size()
    value = F.mse_loss(y, mine[1]) + (n - 1) ** 2
    grads = torch.autograd.grad(value, list(model.parameters()), allow_unused=True)
    for p, g in zip(model.parameters(), grads, strict=True):
        g = torch.zeros_like(p) if g is None else g
        dist.all_reduce(g)
        p.grad = g / dist.get_world_size()
    dist.all_reduce(total := value.detach().clone())
    return total / WORLD


FAULT = {
    "parameter": ["a.weight", "a.bias", "b.weight"],
    "kind": "statistics per rank",
    "factor": None,
    "loss": "differs",
    "note": "the loss is no linear function of a mean",
    "accept": ["other"],
    "place": ["n = g.norm(dim=1).mean()"],
    "operator": ["sums and counts"],
    "report": None,
}
