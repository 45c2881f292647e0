"""Weights are cut over the ranks as DTensors, and gathered for each use; every rank has samples of
its own."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Shard, distribute_tensor

torch.set_default_dtype(torch.float64)
WORLD = 2
WRONG = os.environ.get("CASE", "right") == "wrong"


class Gathered(nn.Linear):
    def forward(self, x):
        kept = None if WRONG else [Partial()]
        weight, bias = (p.full_tensor(grad_placements=kept) for p in (self.weight, self.bias))
        return F.linear(x, weight, bias)


def net_of(linear):
    return nn.Sequential(linear(4, 6), nn.Tanh(), linear(6, 2))


def twin():
    torch.manual_seed(631)
    return net_of(nn.Linear)


def model(twin):
    net = net_of(Gathered)
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp",))
    for name, p in twin.named_parameters():
        layer, kind = name.split(".")
        value = distribute_tensor(p.detach().clone(), mesh, [Shard(0)])
        setattr(net[int(layer)], kind, nn.Parameter(value))
    return net


def batch():
    g = torch.Generator().manual_seed(632)
    return torch.randn(6, 4, generator=g), torch.randn(6, 2, generator=g)


def mine(batch, rank, world):
    return tuple(one.chunk(world)[rank] for one in batch)


def loss(output, target):
    return ((output - target) ** 2).sum() / 6


def step(net, mine):
    value = loss(net(mine[0]), mine[1])
    value.backward()
    dist.all_reduce(value := value.detach().clone())
    return value


FAULT = {
    "parameter": ["0.weight", "0.bias", "2.weight", "2.bias"],
    "kind": "other", "factor": None, "loss": "equal",
    "accept": ["missing sum over 2 ranks"],
    "note": "full_tensor() takes the gradient of its result for a whole one, and each rank has the"
            " term of its samples",
    "place": ["p.full_tensor"],
    "operator": ["grad_placements", "reduce-scatter"],
    "report": None,
}  # fmt: skip
