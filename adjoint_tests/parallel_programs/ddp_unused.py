"""Multi-task network trained with DDP on one of its tasks at a time: a trunk and two heads, of
which the batch uses the first."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_default_dtype(torch.float64)
WORLD = 2
WRONG = os.environ.get("CASE", "right") == "wrong"


class MultiTask(nn.Module):
    def __init__(self, task="depth"):
        super().__init__()
        self.task = task
        self.trunk = nn.Sequential(nn.Linear(4, 8), nn.Softplus(), nn.Linear(8, 6))
        self.heads = nn.ModuleDict({"depth": nn.Linear(6, 2), "normals": nn.Linear(6, 3)})

    def forward(self, x):
        return self.heads[self.task](torch.relu(self.trunk(x)))


def twin():
    torch.manual_seed(941)
    return MultiTask()


def model(twin):
    net = MultiTask()
    net.load_state_dict(twin.state_dict())
    return DistributedDataParallel(net, find_unused_parameters=not WRONG)


def batch():
    g = torch.Generator().manual_seed(942)
    return torch.randn(10, 4, generator=g), torch.randn(10, 2, generator=g)


def mine(batch, rank, world):
    return tuple(v[rank::world] for v in batch)


loss = F.mse_loss


def step(model, mine):
    x, t = mine
    value = loss(model(x), t)
    value.backward()
    total = value.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


FAULT = {
    "parameter": ["trunk.0.weight", "trunk.0.bias", "trunk.2.weight", "trunk.2.bias",
                  "heads.depth.weight", "heads.depth.bias"],
    "kind": "missing sum over 2 ranks", "factor": None, "loss": "equal",
    "note": "the head without gradients shares a bucket with all others, which is then never "
            "reduced (the ranks' gradients sum to 2 times the twin's)",
    "place": ["find_unused_parameters=not WRONG", "DistributedDataParallel", "heads.normals"],
    "report": "pytorch/pytorch#112152",
}  # fmt: skip
