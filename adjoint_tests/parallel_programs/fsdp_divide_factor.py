"""FSDP and tensor parallel layers on a mesh; FSDP is told to divide gradients by one."""

import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

torch.set_default_dtype(torch.float64)
WRONG = os.environ.get("CASE", "right") == "wrong"


WORLD = 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.up, self.down, self.head = (
            nn.Embedding(8, 6),
            nn.Linear(6, 8),
            nn.Linear(8, 6),
            nn.Linear(6, 8, bias=False),
        )

    def forward(self, ids):
        x = self.emb(ids)
        return self.head(x + self.down(F.gelu(self.up(x))))


def twin():
    torch.manual_seed(3)
    return Net()


def model(twin):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = parallelize_module(
        copy.deepcopy(twin),
        mesh["tp"],
        {
            "up": ColwiseParallel(),
            "down": RowwiseParallel(),
            "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        },
    )
    fully_shard(net, mesh=mesh["dp"])
    if WRONG:
        net.set_gradient_divide_factor(1.0)
    return net


def batch():
    g = torch.Generator().manual_seed(5)
    return torch.randint(0, 8, (8,), generator=g), torch.randint(0, 8, (8,), generator=g)


def mine(batch, rank, world):
    return tuple(b.chunk(2)[rank // 2] for b in batch)


loss = F.cross_entropy


def step(model, mine):
    with loss_parallel():
        value = loss(model(mine[0]), mine[1])
        value.backward()
    value = value.detach()
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    dist.all_reduce(total := value.clone())
    return total / WORLD


FAULT = {
    "parameter": ["emb.weight", "up.weight", "up.bias", "down.weight", "down.bias", "head.weight"],
    "kind": "factor 2",
    "factor": 2.0,
    "loss": "equal",
    "note": "a sum in place of the mean, of all gradients: no layer's",
    "place": ["net.set_gradient_divide_factor", "value.backward()"],
    "operator": ["has to be a mean"],
    "report": None,
}
