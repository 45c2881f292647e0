"""Convolutions on a sequence in parts with halos; their backward replaces the gradient at the edges
by what arrives, instead of adding it."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

torch.set_default_dtype(torch.float64)
WRONG = os.environ.get("CASE", "right") == "wrong"

WORLD = 3


class Halo(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        r, n = dist.get_rank(), dist.get_world_size()
        left, right = torch.zeros_like(x[..., :1]), torch.zeros_like(x[..., :1])
        work = []
        if r > 0:
            work += [dist.isend(x[..., :1].contiguous(), r - 1), dist.irecv(left, r - 1)]
        if r < n - 1:
            work += [dist.isend(x[..., -1:].contiguous(), r + 1), dist.irecv(right, r + 1)]
        [w.wait() for w in work]
        return torch.cat([left, x, right], -1)

    @staticmethod
    def backward(ctx, g):
        r, n = dist.get_rank(), dist.get_world_size()
        inner = g[..., 1:-1].clone()
        left, right = torch.zeros_like(g[..., :1]), torch.zeros_like(g[..., :1])
        work = []
        if r > 0:
            work += [dist.isend(g[..., :1].contiguous(), r - 1), dist.irecv(left, r - 1)]
        if r < n - 1:
            work += [dist.isend(g[..., -1:].contiguous(), r + 1), dist.irecv(right, r + 1)]
        [w.wait() for w in work]
        if WRONG:
            if r > 0:
                inner[..., :1] = left
            if r < n - 1:
                inner[..., -1:] = right
        else:
            inner[..., :1] += left
            inner[..., -1:] += right
        return inner


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1, self.c2 = nn.Conv1d(2, 4, 3, padding=1), nn.Conv1d(4, 2, 3, padding=1)

    def forward(self, x):
        return self.c2(torch.relu(self.c1(x)))


class Split(Conv):
    def forward(self, x):
        x = F.conv1d(Halo.apply(x), self.c1.weight, self.c1.bias)
        return F.conv1d(Halo.apply(torch.relu(x)), self.c2.weight, self.c2.bias)


def twin():
    torch.manual_seed(3)
    return Conv()


def model(twin):
    (net := Split()).load_state_dict(twin.state_dict())
    return net


def batch():
    g = torch.Generator().manual_seed(5)
    return torch.randn(2, 2, 9, generator=g), torch.randn(2, 2, 9, generator=g)


def mine(batch, rank, world):
    return tuple(b.chunk(world, -1)[rank] for b in batch)


loss = F.mse_loss


def step(model, mine):
    value = loss(model(mine[0]), mine[1]) / dist.get_world_size()
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    dist.all_reduce(total := value.detach().clone())
    return total


FAULT = {
    "parameter": ["c1.weight", "c1.bias"],
    "kind": "other",
    "factor": None,
    "loss": "equal",
    "note": "copy for add in the adjoint of a halo exchange",
    "place": ["Halo.apply(torch.relu(x))"],
    "operator": ["the adjoint of Halo"],
    "says": "has to be added to them",
    "report": None,
}
