"""Data and tensor parallelism on a mesh of 2 x 2: hidden units are cut over tp, samples over dp,
and functional collectives take the axes of the mesh."""

import os

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

torch.set_default_dtype(torch.float64)
WORLD = 4
WRONG = os.environ.get("CASE", "right") == "wrong"


def total(x, mesh, axis):
    return funcol.wait_tensor(funcol.all_reduce(x.contiguous(), "sum", (mesh, axis)))


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mesh):
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return total(grad, ctx.mesh, 0 if WRONG else 1), None


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mesh):
        return total(x, mesh, 1)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Net(nn.Module):
    def __init__(self, hidden=6):
        super().__init__()
        self.stem = nn.Linear(3, 4)
        self.up = nn.Linear(4, hidden)
        self.down = nn.Linear(hidden, 2, bias=False)

    def forward(self, x):
        return self.down(F.gelu(self.up(torch.tanh(self.stem(x)))))


class ParallelNet(Net):
    def __init__(self):
        super().__init__(3)
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def forward(self, x):
        h = Enter.apply(torch.tanh(self.stem(x)), self.mesh)
        return Leave.apply(self.down(F.gelu(self.up(h))), self.mesh)


def twin():
    torch.manual_seed(571)
    return Net()


def shard(name, value, rank, world):
    dim = {"up.weight": 0, "up.bias": 0, "down.weight": 1}.get(name)
    return value if dim is None else value.chunk(2, dim)[rank % 2]


def model(twin):
    net = ParallelNet()
    state = {k: shard(k, v, dist.get_rank(), WORLD) for k, v in twin.state_dict().items()}
    net.load_state_dict(state)
    return net


def batch():
    g = torch.Generator().manual_seed(572)
    return torch.randn(6, 3, generator=g), torch.randn(6, 2, generator=g)


def mine(batch, rank, world):
    return tuple(one.chunk(2)[rank // 2] for one in batch)


def loss(output, target):
    return ((output - target) ** 2).sum() / 6


def step(net, mine):
    value = loss(net(mine[0]), mine[1])
    value.backward()
    for p in net.parameters():
        p.grad = total(p.grad, net.mesh, 0)
    return total(value.detach(), net.mesh, 0)


FAULT = {
    "parameter": ["stem.weight", "stem.bias"],
    "kind": "other", "factor": None, "loss": "equal",
    "accept": ["sum over the wrong", "missing sum over 2 ranks"],
    "note": "the gradient of the input of the cut layer is summed over dp, where its terms are on"
            " the ranks of tp",
    "place": ["Enter"],
    "operator": ["ranks 0, 1 and 2, 3", "'tp'", "the adjoint of Enter"],
    "report": None,
}  # fmt: skip
