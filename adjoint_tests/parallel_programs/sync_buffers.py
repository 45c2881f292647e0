"""Batch statistics that are summed over the ranks, forward and backward; the running ones are
updated from each rank's own."""

import os

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dfn
import torch.nn.functional as F
from torch import nn

torch.set_default_dtype(torch.float64)
WRONG = os.environ.get("CASE", "right") == "wrong"

WORLD = 2


class Sync(nn.BatchNorm1d):
    def forward(self, x):
        n = float(len(x) * dist.get_world_size())
        mean = dfn.all_reduce(x.sum(0)) / n
        var = dfn.all_reduce(((x - mean) ** 2).sum(0)) / n
        with torch.no_grad():
            m = x.mean(0) if WRONG else mean
            v = x.var(0) if WRONG else var * n / (n - 1)
            self.running_mean.lerp_(m, self.momentum)
            self.running_var.lerp_(v, self.momentum)
            self.num_batches_tracked += 1
        return (x - mean) / (var + self.eps).sqrt() * self.weight + self.bias


class Net(nn.Module):
    def __init__(self, kind=nn.BatchNorm1d):
        super().__init__()
        self.a, self.bn, self.b = nn.Linear(4, 5), kind(5), nn.Linear(5, 2)

    def forward(self, x):
        return self.b(torch.relu(self.bn(self.a(x))))


def twin():
    torch.manual_seed(3)
    return Net()


def model(twin):
    (net := Net(Sync)).load_state_dict(twin.state_dict())
    return net


def batch():
    g = torch.Generator().manual_seed(5)
    return torch.randn(8, 4, generator=g), torch.randn(8, 2, generator=g)


def mine(batch, rank, world):
    return tuple(b.chunk(world)[rank] for b in batch)


loss = F.mse_loss


def step(model, mine):
    value = loss(model(mine[0]), mine[1]) / dist.get_world_size()
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    dist.all_reduce(total := value.detach().clone())
    return total


FAULT = {
    "parameter": [],
    "kind": "statistics per rank",
    "factor": None,
    "loss": "equal",
    "note": "buffers alone differ: no pair of movements is wrong",
    "state": ["bn.running_mean", "bn.running_var"],
    "place": ["lerp_"],
    "report": None,
}
