"""Sequence parallel transformer MLP on a 2 x 2 mesh (dp, tp) of DTensors. The norm runs on local
tensors, by a kernel that knows no DTensor; each rank has its samples' share of the sequence."""

import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

torch.set_default_dtype(torch.float64)
WORLD = 4
WRONG = os.environ.get("CASE", "right") == "wrong"
WIDTH, HIDDEN = 4, 8


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x):
        if not isinstance(x, DTensor):
            return F.rms_norm(x, (WIDTH,), self.weight)
        summed = [Partial(), Replicate() if WRONG else Partial()]
        weight = self.weight.to_local(grad_placements=summed)
        y = F.rms_norm(x.to_local(), (WIDTH,), weight)
        return DTensor.from_local(y, x.device_mesh, x.placements)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = RMSNorm()
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        h = self.norm(x)
        if isinstance(h, DTensor):
            h = h.redistribute(placements=[Shard(0), Replicate()])
        h = self.down(F.gelu(self.up(h)))
        if isinstance(h, DTensor):
            h = h.redistribute(placements=x.placements)
        return x + h


def twin():
    torch.manual_seed(431)
    return Block()


def model(twin):
    net = Block()
    net.load_state_dict(twin.state_dict())
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    layouts = {net.norm: Replicate(), net.up: Shard(0), net.down: Shard(1)}
    for module, placement in layouts.items():
        weight = distribute_tensor(module.weight.data, mesh, [Replicate(), placement])
        module.weight = nn.Parameter(weight)
    net.mesh = mesh
    return net


def batch():
    g = torch.Generator().manual_seed(432)
    return torch.randn(4, 6, WIDTH, generator=g), torch.randn(4, 6, WIDTH, generator=g)


def loss(output, target):
    return ((output - target) ** 2).sum() / target.numel()


def step(model, mine):
    x, t = (distribute_tensor(v, model.mesh, [Shard(0), Shard(1)]) for v in mine)
    value = loss(model(x), t).redistribute(placements=[Replicate(), Replicate()])
    value.backward()
    return value.detach().to_local()


FAULT = {
    "parameter": ["norm.weight"],
    "kind": "missing sum over 2 ranks", "factor": None, "loss": "equal",
    "note": "the norm sees a part of the sequence on each rank of tp, and its gradient is taken "
            "for replicated on that axis",
    "place": ["norm", "self.weight.to_local(grad_placements=summed)", "Replicate() if WRONG"],
    "report": "pytorch/torchtitan#2532",
}  # fmt: skip
