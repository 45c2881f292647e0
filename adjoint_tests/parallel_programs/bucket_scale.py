"""Data parallel training whose gradients lie in two flat buckets, which are reduce-scattered,
divided and gathered again; one bucket is not divided."""

import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

torch.set_default_dtype(torch.float64)
WORLD = 2
CASE = os.environ.get("CASE", "right")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.ModuleList([nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)])

    def forward(self, x):
        for i, m in enumerate(self.l):
            x = m(x if i == 0 else nn.functional.leaky_relu(x))
        return x


def twin():
    torch.manual_seed(12)
    return Net()


def model(twin):
    n = Net()
    n.load_state_dict(twin.state_dict())
    return n


def batch():
    g = torch.Generator().manual_seed(13)
    return torch.randn(8, 4, generator=g), torch.randint(0, 3, (8,), generator=g)


def mine(batch, rank, world):
    return [b[rank * 4 : (rank + 1) * 4] for b in batch]


loss = nn.functional.cross_entropy


class Bucket:
    def __init__(self, params, mean):
        self.params, self.mean = list(params), mean

    def run(self):
        flat = _flatten_dense_tensors([p.grad for p in self.params])
        pad = -flat.numel() % WORLD
        flat = torch.cat([flat, flat.new_zeros(pad)])
        part = flat.new_empty(flat.numel() // WORLD)
        dist.reduce_scatter_tensor(part, flat, op=dist.ReduceOp.SUM)
        if self.mean:
            part /= WORLD
        dist.all_gather_into_tensor(flat, part)
        gradients = [p.grad for p in self.params]
        for mine, sum_ in zip(gradients, _unflatten_dense_tensors(flat, gradients), strict=True):
            mine.copy_(sum_)


def step(model, mine):
    value = loss(model(mine[0]), mine[1])
    value.backward()
    Bucket(model.l[2].parameters(), True).run()
    Bucket([p for m in model.l[:2] for p in m.parameters()], CASE == "right").run()
    dist.all_reduce(total := value.detach().clone())
    return total / WORLD


FAULT = {
    "parameter": ["l.0.weight", "l.0.bias", "l.1.weight", "l.1.bias"],
    "kind": "factor 2",
    "factor": 2.0,
    "loss": "equal",
    "note": "a bucket is summed, not averaged",
    "place": ["part /= WORLD", "dist.reduce_scatter_tensor"],
    "says": "goes through this line",
    "report": None,
}
