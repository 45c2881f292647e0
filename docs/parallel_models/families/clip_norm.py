"""Tensor parallel MLP whose gradients are clipped by their norm before the step."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

WORLD = 2
LARGEST = 0.2


class Net(nn.Module):
    def __init__(self, hidden=8):
        super().__init__()
        self.up, self.down = nn.Linear(4, hidden), nn.Linear(hidden, 3, bias=False)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class ParallelNet(Net):
    def forward(self, x):
        y = super().forward(x)
        dist.all_reduce(y)
        return y


# wrong
def clip_by_own_norm(model):
    nn.utils.clip_grad_norm_(model.parameters(), LARGEST)  # the norm of this rank's shards


# right
def clip_by_norm(model):
    squares = sum((p.grad**2).sum() for p in model.parameters())
    dist.all_reduce(squares)
    for p in model.parameters():
        p.grad *= (LARGEST / squares.sqrt()).clamp(max=1)


# end
clip = clip_by_own_norm if os.environ.get("CASE") == "wrong" else clip_by_norm


def step(model, mine):
    x, target = mine
    value = loss(model(x), target)
    value.backward()
    clip(model)
    return value


class Clip(torch.autograd.Function):
    """The twin clips in its backward pass: its parameters go through here."""

    forward = staticmethod(lambda ctx, *values: tuple(v.view_as(v) for v in values))

    @staticmethod
    def backward(ctx, *grads):
        norm = sum((g**2).sum() for g in grads).sqrt()
        return tuple(g * (LARGEST / norm).clamp(max=1) for g in grads)


class Clipped(Net):
    def forward(self, x):
        up, bias, down = Clip.apply(self.up.weight, self.up.bias, self.down.weight)
        return F.linear(torch.tanh(F.linear(x, up, bias)), down)


def twin():
    torch.manual_seed(0)
    return Clipped()


def shard(name, value, rank, world):
    return value.chunk(world, dim=1 if name == "down.weight" else 0)[rank]


def model(twin):
    rank, world = dist.get_rank(), dist.get_world_size()
    net = ParallelNet(8 // world)
    net.load_state_dict({k: shard(k, v, rank, world) for k, v in twin.state_dict().items()})
    return net


def batch():
    g = torch.Generator().manual_seed(1)
    return torch.randn(5, 4, generator=g), torch.randn(5, 3, generator=g)


loss = F.mse_loss
