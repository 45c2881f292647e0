"""FSDP2 with gradient accumulation: each rank cuts its samples into micro-batches, and gradients
are reduced and scattered with the last of them."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

torch.set_default_dtype(torch.float64)
WORLD = 2
WRONG = os.environ.get("CASE", "right") == "wrong"
ACCUMULATE = 3


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.relu(self.up(self.norm(x))))


def build():
    return nn.Sequential(nn.Linear(3, 4), Block(4), Block(4), nn.Linear(4, 2))


def twin():
    torch.manual_seed(321)
    return build()


def model(twin):
    net = build()
    net.load_state_dict(twin.state_dict())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in net:
        if isinstance(block, Block):
            fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def batch():
    g = torch.Generator().manual_seed(322)
    return torch.randn(12, 3, generator=g), torch.randn(12, 2, generator=g)


def mine(batch, rank, world):
    return tuple(v.chunk(world)[rank] for v in batch)


loss = F.mse_loss


def step(model, mine):
    total = torch.zeros(())
    last = ACCUMULATE if WRONG else ACCUMULATE - 1
    for i, (x, t) in enumerate(zip(*(v.chunk(ACCUMULATE) for v in mine), strict=True)):
        model.set_requires_gradient_sync(i == last)
        value = loss(model(x), t) / ACCUMULATE
        value.backward()
        total += value.detach()
    dist.all_reduce(total)
    return total / dist.get_world_size()


FAULT = {
    "parameter": ["0.weight", "0.bias", "1.norm.weight", "1.norm.bias", "1.up.weight", "1.up.bias",
                  "1.down.weight", "1.down.bias", "2.norm.weight", "2.norm.bias", "2.up.weight",
                  "2.up.bias", "2.down.weight", "2.down.bias", "3.weight", "3.bias"],
    "kind": "no gradient", "factor": None, "loss": "equal",
    "note": "micro-batches count from 0: the one that switches the reduction on never comes",
    "place": ["model.set_requires_gradient_sync(i == last)", "last = ACCUMULATE if WRONG"],
    "report": "pytorch/pytorch#118298",
}  # fmt: skip
