"""A layer that is cut by its outputs, then a norm over all features and a plain head. Features are
gathered by a redistribution of DTensors."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

torch.set_default_dtype(torch.float64)
WORLD = 2
WRONG = os.environ.get("CASE", "right") == "wrong"
WIDTH = 6


def normed(x):
    return x / x.pow(2).mean(-1, keepdim=True).add(1e-6).sqrt()


class Net(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.up = nn.Linear(4, width)
        self.head = nn.Linear(WIDTH, 2)

    def features(self, x):
        return normed(self.up(x))

    def forward(self, x):
        return self.head(F.silu(self.features(x)))


class ParallelNet(Net):
    def __init__(self):
        super().__init__(WIDTH // WORLD)
        self.mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))

    def gathered(self, x):
        x = DTensor.from_local(x, self.mesh, [Shard(1)])
        return x.redistribute(self.mesh, [Replicate()]).to_local()

    def features(self, x):
        h = self.up(x)
        return self.gathered(normed(h)) if WRONG else normed(self.gathered(h))


def twin():
    torch.manual_seed(641)
    return Net()


def shard(name, value, rank, world):
    return value.chunk(world)[rank] if name.startswith("up") else value


def model(twin):
    net = ParallelNet()
    state = {k: shard(k, v, dist.get_rank(), WORLD) for k, v in twin.state_dict().items()}
    net.load_state_dict(state)
    return net


def batch():
    g = torch.Generator().manual_seed(642)
    return torch.randn(5, 4, generator=g), torch.randn(5, 2, generator=g)


loss = F.mse_loss


FAULT = {
    "parameter": ["up.weight", "up.bias", "head.weight", "head.bias"],
    "kind": "statistics per rank", "factor": None, "loss": "differs",
    "note": "the redistribution stands behind the norm: each rank takes the mean of the squares of"
            " its own features",
    "place": ["normed"],
    "operator": ["all-reduce of the sums", "redistribut"],
    "report": None,
}  # fmt: skip
