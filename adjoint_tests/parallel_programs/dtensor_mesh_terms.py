"""Samples over dp and hidden units over tp, on a mesh of 2 x 2. The stem's weights are DTensors
that are replicated on both axes, and are used as plain tensors."""

import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

torch.set_default_dtype(torch.float64)
WORLD = 4
WRONG = os.environ.get("CASE", "right") == "wrong"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(3, 4)
        self.up = nn.Linear(4, 6, bias=False)
        self.down = nn.Linear(6, 2, bias=False)

    def forward(self, x):
        return self.down(torch.tanh(self.up(torch.tanh(self.stem(x)))))


class ParallelNet(Net):
    def forward(self, x):
        terms = [Replicate(), Partial()] if WRONG else [Partial(), Replicate()]
        w, b = (p.to_local(grad_placements=terms) for p in (self.stem.weight, self.stem.bias))
        h = torch.tanh(F.linear(x, w, b))
        h = DTensor.from_local(h, self.mesh, [Shard(0), Replicate()])
        y = self.down(torch.tanh(self.up(h)))
        return y.redistribute(self.mesh, [Shard(0), Replicate()]).to_local()


def twin():
    torch.manual_seed(651)
    return Net()


def model(twin):
    net = ParallelNet()
    net.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net.load_state_dict(twin.state_dict())
    for path, cut in (
        ("stem.weight", Replicate()),
        ("stem.bias", Replicate()),
        ("up.weight", Shard(0)),
        ("down.weight", Shard(1)),
    ):
        layer, name = path.split(".")
        value = getattr(net.get_submodule(layer), name).data
        value = nn.Parameter(distribute_tensor(value, net.mesh, [Replicate(), cut]))
        setattr(net.get_submodule(layer), name, value)
    return net


def batch():
    g = torch.Generator().manual_seed(652)
    return torch.randn(6, 3, generator=g), torch.randn(6, 2, generator=g)


def mine(batch, rank, world):
    return tuple(one.chunk(2)[rank // 2] for one in batch)


def loss(output, target):
    return ((output - target) ** 2).sum() / 6


def step(net, mine):
    value = loss(net(mine[0]), mine[1])
    value.backward()
    value = DTensor.from_local(value.detach(), net.mesh, [Partial(), Replicate()])
    return value.full_tensor()


FAULT = {
    "parameter": ["stem.weight", "stem.bias"],
    "kind": "other", "factor": None, "loss": "equal",
    "accept": ["sum over the wrong", "missing sum over 2 ranks"],
    "note": "the terms of this gradient are on the ranks of dp, and are declared to be on those of"
            " tp: summed twice there, and not at all over dp",
    "place": ["p.to_local", "terms"],
    "operator": ["grad_placements", "ranks 0, 2 and 1, 3"],
    "report": None,
}  # fmt: skip
