"""The output layer of an attention block, cut by its inputs: local products, whose sum over the
ranks DTensor takes, and a bias."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

torch.set_default_dtype(torch.float64)
WORLD = 2
WRONG = os.environ.get("CASE", "right") == "wrong"
WIDTH, HIDDEN = 4, 6


class Net(nn.Module):
    def __init__(self, hidden=HIDDEN):
        super().__init__()
        self.value = nn.Linear(WIDTH, hidden)
        self.out = nn.Linear(hidden, WIDTH)

    def mixed(self, x):
        return self.out(torch.tanh(self.value(x)))

    def forward(self, x):
        return x + self.mixed(x)


class ParallelNet(Net):
    def __init__(self):
        super().__init__(HIDDEN // WORLD)
        self.mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))

    def mixed(self, x):
        h = torch.tanh(self.value(x))
        y = F.linear(h, self.out.weight, self.out.bias if WRONG else None)
        y = DTensor.from_local(y, self.mesh, [Partial()])
        y = y.redistribute(self.mesh, [Replicate()]).to_local()
        return y if WRONG else y + self.out.bias


def twin():
    torch.manual_seed(661)
    return Net()


def shard(name, value, rank, world):
    dim = {"value.weight": 0, "value.bias": 0, "out.weight": 1}.get(name)
    return value if dim is None else value.chunk(world, dim)[rank]


def model(twin):
    net = ParallelNet()
    state = {k: shard(k, v, dist.get_rank(), WORLD) for k, v in twin.state_dict().items()}
    net.load_state_dict(state)
    return net


def batch():
    return tuple(torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(662)))


loss = F.mse_loss


FAULT = {
    "parameter": ["value.weight", "value.bias", "out.weight", "out.bias"],
    "kind": "bias counted by every rank", "factor": None, "loss": "differs",
    "note": "the bias is added to each rank's term before the sum",
    "place": ["out", "F.linear(h"],
    "report": None,
}  # fmt: skip
