"""FSDP over two dimensions of a mesh; the all-reduce over one of them is switched off when the
model is made."""

import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

torch.set_default_dtype(torch.float64)
WRONG = os.environ.get("CASE", "right") == "wrong"


WORLD = 4


def twin():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def model(twin):
    net = copy.deepcopy(twin)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for layer in (net[0], net[2], net[4]):
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    if WRONG:
        net.set_requires_all_reduce(False)
    return net


def batch():
    g = torch.Generator().manual_seed(5)
    return torch.randn(8, 5, generator=g), torch.randn(8, 3, generator=g)


def mine(batch, rank, world):
    return tuple(b.chunk(world)[rank] for b in batch)


loss = F.mse_loss


def step(model, mine):
    value = loss(model(mine[0]), mine[1])
    value.backward()
    dist.all_reduce(total := value.detach().clone())
    return total / dist.get_world_size()


FAULT = {
    "parameter": ["0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias"],
    "kind": "no gradient",
    "factor": None,
    "loss": "equal",
    "note": "set_requires_all_reduce(False) keeps gradients back",
    "place": ["net.set_requires_all_reduce(False)"],
    "operator": ["switches off"],
    "report": None,
}
