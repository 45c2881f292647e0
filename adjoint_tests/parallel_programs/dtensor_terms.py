"""A feed-forward layer of local matrix products between DTensors: hidden units are cut over the
ranks, and the product with the second matrix leaves a term of the result on each."""

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
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, 2)

    def hidden(self, x):
        return self.down(F.gelu(self.up(x)))

    def forward(self, x):
        return self.head(torch.tanh(self.hidden(x)))


class ParallelNet(Net):
    def __init__(self):
        super().__init__(HIDDEN // WORLD)
        self.mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))

    def hidden(self, x):
        kind = Replicate() if WRONG else Partial()
        y = DTensor.from_local(super().hidden(x), self.mesh, [kind])
        return y.redistribute(self.mesh, [Replicate()]).to_local()


def twin():
    torch.manual_seed(601)
    return Net()


def shard(name, value, rank, world):
    dim = {"up.weight": 0, "up.bias": 0, "down.weight": 1}.get(name)
    return value if dim is None else value.chunk(world, dim)[rank]


def model(twin):
    net = ParallelNet()
    state = {k: shard(k, v, dist.get_rank(), WORLD) for k, v in twin.state_dict().items()}
    net.load_state_dict(state)
    return net


def batch():
    g = torch.Generator().manual_seed(602)
    return torch.randn(5, WIDTH, generator=g), torch.randn(5, 2, generator=g)


loss = F.mse_loss


FAULT = {
    "parameter": ["up.weight", "up.bias", "down.weight", "head.weight", "head.bias"],
    "kind": "other", "factor": None, "loss": "differs",
    "note": "terms of a sum are declared a replicated tensor: nobody sums them",
    "place": ["DTensor.from_local(super().hidden(x)"],
    "operator": ["Partial()"],
    "report": None,
}  # fmt: skip
