"""FSDP2 for the trunk of a regressor. The small output head is kept whole on every rank, outside
of the shards, because it is used again by the evaluation code."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

torch.set_default_dtype(torch.float64)
WORLD = 2
WRONG = os.environ.get("CASE", "right") == "wrong"


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 6), nn.GELU())
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.trunk(x))


def twin():
    torch.manual_seed(311)
    return Regressor()


def model(twin):
    net = Regressor()
    net.load_state_dict(twin.state_dict())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(net, mesh=mesh, ignored_params=set(net.head.parameters()))
    net.set_gradient_divide_factor(1.0)
    return net


def batch():
    g = torch.Generator().manual_seed(312)
    return torch.randn(6, 5, generator=g), torch.randn(6, 2, generator=g)


def mine(batch, rank, world):
    return tuple(v[rank::world] for v in batch)


loss = nn.functional.mse_loss


def step(model, mine):
    x, t = mine
    value = loss(model(x), t) / dist.get_world_size()
    value.backward()
    if not WRONG:
        for p in model.head.parameters():
            dist.all_reduce(p.grad)
    total = value.detach().clone()
    dist.all_reduce(total)
    return total


FAULT = {
    "parameter": ["head.weight", "head.bias"],
    "kind": "missing sum over 2 ranks", "factor": None, "loss": "equal",
    "note": "the head is not one of FSDP's parameters, so nobody sums its gradients over dp",
    "place": ["head", "ignored_params=set(net.head.parameters())"],
    "report": None,
}  # fmt: skip
