"""A model whose blocks are FSDP units, and whose root is none: its own parameters have the ranks'
local means."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

torch.set_default_dtype(torch.float64)
WRONG = os.environ.get("CASE", "right") == "wrong"


WORLD = 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(10, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6))
            for _ in range(2)
        )
        self.head = nn.Linear(6, 10)

    def forward(self, ids):
        x = self.emb(ids)
        for b in self.blocks:
            x = x + b(x)
        return self.head(x)


def twin():
    torch.manual_seed(3)
    return Net()


def model(twin):
    import copy

    net = copy.deepcopy(twin)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for b in net.blocks:
        fully_shard(b, mesh=mesh)
    if not WRONG:
        fully_shard(net, mesh=mesh)
    return net


def batch():
    g = torch.Generator().manual_seed(5)
    return torch.randint(0, 10, (8,), generator=g), torch.randint(0, 10, (8,), generator=g)


def mine(batch, rank, world):
    return tuple(b.chunk(world)[rank] for b in batch)


loss = F.cross_entropy


def step(model, mine):
    value = loss(model(mine[0]), mine[1])
    value.backward()
    dist.all_reduce(total := value.detach().clone())
    return total / dist.get_world_size()


FAULT = {
    "parameter": ["emb.weight", "head.weight", "head.bias"],
    "kind": "missing sum over 2 ranks",
    "factor": None,
    "loss": "equal",
    "note": "the mean is missing: terms sum up to two times the twin's",
    "place": ["emb", "head"],
    "operator": ["times 1/2"],
    "report": None,
}
