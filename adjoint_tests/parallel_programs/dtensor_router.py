"""Mixture of experts with tensor parallel experts. The router is a replicated DTensor, applied
to the whole input on each rank; every rank runs its slice of each expert's hidden units."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

torch.set_default_dtype(torch.float64)
WORLD = 2
WRONG = os.environ.get("CASE", "right") == "wrong"
EXPERTS, WIDTH, HIDDEN = 3, 4, 6


class Moe(nn.Module):
    def __init__(self, hidden=HIDDEN):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.w1 = nn.Parameter(torch.randn(EXPERTS, hidden, WIDTH) / 2)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, WIDTH, hidden) / 2)

    def scores(self, x):
        return torch.softmax(self.gate(x), -1)

    def forward(self, x):
        h = torch.einsum("ehi,ti->teh", self.w1, x)
        return torch.einsum("te,eoh,teh->to", self.scores(x), self.w2, F.silu(h))


class SumPartial(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        dist.all_reduce(x := x.clone())
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class ParallelMoe(Moe):
    def __init__(self):
        super().__init__(HIDDEN // WORLD)
        self.mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))

    def scores(self, x):
        x = DTensor.from_local(x, self.mesh, [Replicate()])
        out = torch.softmax(self.gate(x), -1)
        return out.to_local() if WRONG else out.to_local(grad_placements=[Partial()])

    def forward(self, x):
        return SumPartial.apply(super().forward(x))


def twin():
    torch.manual_seed(401)
    return Moe()


def shard(name, value, rank, world):
    dim = {"w1": 1, "w2": 2}.get(name)
    return value if dim is None else value.chunk(world, dim)[rank]


def model(twin):
    net = ParallelMoe()
    state = {k: shard(k, v, dist.get_rank(), WORLD) for k, v in twin.state_dict().items()}
    net.load_state_dict(state)
    weight = distribute_tensor(net.gate.weight.data, net.mesh, [Replicate()])
    net.gate.weight = nn.Parameter(weight)
    return net


def batch():
    return tuple(torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(402)))


loss = F.mse_loss


FAULT = {
    "parameter": ["gate.weight"],
    "kind": "missing sum over 2 ranks", "factor": None, "loss": "equal",
    "note": "each rank's scores weigh its slice of the hidden units: their gradients are terms of"
            " a sum over tp, and to_local() takes them for whole ones",
    "place": ["gate", "out.to_local()", "scores"],
    "report": "pytorch/torchtitan#2387",
}  # fmt: skip
