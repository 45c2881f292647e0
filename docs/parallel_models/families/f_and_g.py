"""Tensor parallel MLP between two replicated layers: Megatron's f and g as autograd functions."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

WORLD = 2


def total(x):
    dist.all_reduce(x := x.clone())
    return x


# wrong
class WrongF(torch.autograd.Function):  # where the split layers begin
    forward = staticmethod(lambda ctx, x: x.view_as(x))
    backward = staticmethod(lambda ctx, grad: grad)


class WrongG(torch.autograd.Function):  # where they end
    forward = staticmethod(lambda ctx, x: total(x))
    backward = staticmethod(lambda ctx, grad: total(grad))


# right
class F_(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x.view_as(x))
    backward = staticmethod(lambda ctx, grad: total(grad))


class G(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: total(x))
    backward = staticmethod(lambda ctx, grad: grad)


# end
f, g = (WrongF, WrongG) if os.environ.get("CASE") == "wrong" else (F_, G)


class Net(nn.Module):
    def __init__(self, hidden=8):
        super().__init__()
        self.inp, self.out = nn.Linear(5, 6), nn.Linear(6, 3)
        self.up, self.down = nn.Linear(6, hidden), nn.Linear(hidden, 6, bias=False)

    def mlp(self, x):
        return self.down(F.gelu(self.up(x)))

    def forward(self, x):
        return self.out(self.mlp(torch.tanh(self.inp(x))))


class ParallelNet(Net):
    def mlp(self, x):
        return g.apply(super().mlp(f.apply(x)))


def twin():
    torch.manual_seed(0)
    return Net()


def shard(name, value, rank, world):
    dim = {"up.weight": 0, "up.bias": 0, "down.weight": 1}.get(name)
    return value if dim is None else value.chunk(world, dim)[rank]


def model(twin):
    rank, world = dist.get_rank(), dist.get_world_size()
    net = ParallelNet(8 // world)
    net.load_state_dict({k: shard(k, v, rank, world) for k, v in twin.state_dict().items()})
    return net


def batch():
    g = torch.Generator().manual_seed(1)
    return torch.randn(4, 5, generator=g), torch.randn(4, 3, generator=g)


loss = F.mse_loss
