"""A plain stem, the same on every rank, before a pair of DTensor layers that are cut by columns and
rows. The stem's output is declared a replicated DTensor."""

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
        self.stem = nn.Linear(3, 4)
        self.up = nn.Linear(4, 6)
        self.down = nn.Linear(6, 2, bias=False)

    def split(self, x):
        return self.down(F.relu(self.up(x)))

    def forward(self, x):
        return self.split(torch.tanh(self.stem(x)))


class ParallelNet(Net):
    def split(self, x):
        kept = [Partial()] if WRONG else None
        x = DTensor.from_local(x, self.mesh, [Replicate()], grad_placements=kept)
        return super().split(x).full_tensor()


def twin():
    torch.manual_seed(621)
    return Net()


def model(twin):
    net = ParallelNet()
    net.mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    net.load_state_dict(twin.state_dict())
    for parent, name, dim in ((net.up, "weight", 0), (net.up, "bias", 0), (net.down, "weight", 1)):
        value = distribute_tensor(getattr(parent, name).data, net.mesh, [Shard(dim)])
        setattr(parent, name, nn.Parameter(value))
    return net


def batch():
    g = torch.Generator().manual_seed(622)
    return torch.randn(5, 3, generator=g), torch.randn(5, 2, generator=g)


loss = F.smooth_l1_loss


FAULT = {
    "parameter": ["stem.weight", "stem.bias"],
    "kind": "missing sum over 2 ranks", "factor": None, "loss": "equal",
    "note": "from_local() is told to leave the gradient as terms, and nothing before it sums them",
    "place": ["DTensor.from_local(x", "stem"],
    "operator": ["grad_placements", "all-reduce over ranks 0, 1"],
    "report": None,
}  # fmt: skip
