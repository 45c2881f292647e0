"""FSDP2 over dp and tensor parallelism over tp, on a mesh of 2 x 2: the layers of an expert are
DTensors that are cut over tp. A gate, replicated over tp, scales each rank's hidden units."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

torch.set_default_dtype(torch.float64)
WORLD = 4
WRONG = os.environ.get("CASE", "right") == "wrong"


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(4, 1)
        self.up = nn.Linear(4, 6, bias=False)
        self.down = nn.Linear(6, 4, bias=False)

    def gates(self, x):
        return torch.sigmoid(self.gate(x))

    def forward(self, x):
        return self.down(F.silu(self.up(x)) * self.gates(x))


class ParallelExpert(Expert):
    def gates(self, x):
        return torch.sigmoid(self.gate(x)).to_local(grad_placements=None if WRONG else [Partial()])

    def forward(self, x):
        x = DTensor.from_local(x, self.tp, [Replicate()])
        h = F.silu(self.up(x)).to_local() * self.gates(x)
        y = self.down(DTensor.from_local(h, self.tp, [Shard(1)]))
        return y.redistribute(self.tp, [Replicate()]).to_local()


def net_of(expert):
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), expert())


def twin():
    torch.manual_seed(671)
    return net_of(Expert)


def model(twin):
    net = net_of(ParallelExpert)
    net.load_state_dict(twin.state_dict())
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    expert, tp = net[2], mesh["tp"]
    expert.tp = tp
    for layer, name, cut in (
        (expert.gate, "weight", Replicate()),
        (expert.gate, "bias", Replicate()),
        (expert.up, "weight", Shard(0)),
        (expert.down, "weight", Shard(1)),
    ):
        setattr(layer, name, nn.Parameter(distribute_tensor(getattr(layer, name).data, tp, [cut])))
    for layer in net[0], expert:
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(net, mesh=mesh["dp"])


def batch():
    return tuple(torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(672)))


def mine(batch, rank, world):
    return tuple(one.chunk(2)[rank // 2] for one in batch)


def loss(output, target):
    return ((output - target) ** 2).mean()


def step(net, mine):
    value = loss(net(mine[0]), mine[1])
    value.backward()
    dist.all_reduce(value := value.detach() / WORLD)
    return value


FAULT = {
    "parameter": ["2.gate.weight", "2.gate.bias", "0.weight", "0.bias"],
    "kind": "other", "factor": None, "loss": "equal",
    "accept": ["missing sum over 2 ranks"],
    "note": "each rank's gates scale its slice of the hidden units: their gradients are terms of a"
            " sum over tp, and to_local() takes them for whole ones",
    "place": ["gate", "torch.sigmoid(self.gate(x)).to_local", "gates"],
    "operator": ["grad_placements", "all-reduce over ranks 0, 1 and 2, 3"],
    "report": "pytorch/torchtitan#2387",
}  # fmt: skip
