"""Data parallel net whose first weight lives on rank 0, and is broadcast in the forward pass."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

WORLD = 2


# wrong
class PassedThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        dist.broadcast(weight := weight.clone(), src=0)
        return weight

    @staticmethod
    def backward(ctx, grad):
        return grad  # of this rank's samples alone


# right
class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        dist.broadcast(weight := weight.clone(), src=0)
        return weight

    @staticmethod
    def backward(ctx, grad):
        dist.all_reduce(grad := grad.clone())
        return grad


# end
Broadcast = PassedThrough if os.environ.get("CASE") == "wrong" else Summed


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 4, bias=False), nn.Linear(4, 2)

    def weight(self):
        return self.first.weight

    def forward(self, x):
        return self.last(torch.sigmoid(F.linear(x, self.weight())))


class SharedNet(Net):
    def weight(self):
        return Broadcast.apply(self.first.weight)


def twin():
    torch.manual_seed(0)
    return Net()


def model(twin):
    net = SharedNet()
    net.load_state_dict(twin.state_dict())
    return net


def batch():
    g = torch.Generator().manual_seed(1)
    return torch.randn(6, 5, generator=g), torch.randn(6, 2, generator=g)


def mine(batch, rank, world):
    return tuple(one.chunk(world)[rank] for one in batch)


loss = F.mse_loss


def step(model, mine):
    x, target = mine
    value = loss(model(x), target) / dist.get_world_size()
    value.backward()
    for p in model.last.parameters():
        dist.all_reduce(p.grad)
    return value
