"""A classifier whose features are a replicated DTensor. The head is a plain module, the same on
every rank, and all ranks compute the whole loss."""

import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

torch.set_default_dtype(torch.float64)
WORLD = 2
WRONG = os.environ.get("CASE", "right") == "wrong"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 6, bias=False)
        self.down = nn.Linear(6, 4, bias=False)
        self.head = nn.Linear(4, 3)

    def features(self, x):
        return self.down(torch.tanh(self.up(x)))

    def forward(self, x):
        return self.head(F.silu(self.features(x)))


class ParallelNet(Net):
    def features(self, x):
        x = DTensor.from_local(x, self.mesh, [Replicate()])
        y = super().features(x).redistribute(self.mesh, [Replicate()])
        return y.to_local(grad_placements=[Partial()] if WRONG else None)


def twin():
    torch.manual_seed(611)
    return Net()


def model(twin):
    net = ParallelNet()
    net.mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    net.load_state_dict(twin.state_dict())
    for linear, dim in ((net.up, 0), (net.down, 1)):
        weight = distribute_tensor(linear.weight.data, net.mesh, [Shard(dim)])
        linear.weight = nn.Parameter(weight)
    return net


def batch():
    g = torch.Generator().manual_seed(612)
    return torch.randn(5, 4, generator=g), torch.randint(3, (5,), generator=g)


loss = F.cross_entropy


FAULT = {
    "parameter": ["up.weight", "down.weight"],
    "kind": "factor 2", "factor": 2, "loss": "equal",
    "note": "every rank has the whole gradient of the features, and to_local() is told that each"
            " has a term of it",
    "place": ["y.to_local", "features"],
    "operator": ["grad_placements", "too many"],
    "report": None,
}  # fmt: skip
