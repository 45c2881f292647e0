"""Transformer MLP with sequence parallelism: outside of its split part, tokens are split."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

WORLD = 2


def gather(x):
    out = x.new_empty(len(x) * dist.get_world_size(), *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous())
    return out


def reduce_scatter(x):
    dist.all_reduce(x := x.clone())
    return x.chunk(dist.get_world_size())[dist.get_rank()].contiguous()


class Gather(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: gather(x))
    backward = staticmethod(lambda ctx, grad: reduce_scatter(grad))


class ReduceScatter(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: reduce_scatter(x))
    backward = staticmethod(lambda ctx, grad: gather(grad))


class Block(nn.Module):
    def __init__(self, hidden=8):
        super().__init__()
        self.norm = nn.RMSNorm(6)
        self.up, self.down = nn.Linear(6, hidden), nn.Linear(hidden, 6, bias=False)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class ParallelBlock(Block):
    def forward(self, x):  # x: this rank's tokens
        return x + ReduceScatter.apply(self.down(F.gelu(self.up(Gather.apply(self.norm(x))))))


# wrong
def wrong_step(model, mine):
    x, target = mine
    value = loss(model(x), target) / dist.get_world_size()
    value.backward()
    return value


# right
def right_step(model, mine):
    x, target = mine
    value = loss(model(x), target) / dist.get_world_size()
    value.backward()
    dist.all_reduce(model.norm.weight.grad)  # each rank has normalised its own tokens
    return value


# end
step = wrong_step if os.environ.get("CASE") == "wrong" else right_step


def twin():
    torch.manual_seed(0)
    return Block()


def shard(name, value, rank, world):
    dim = {"up.weight": 0, "up.bias": 0, "down.weight": 1}.get(name)
    return value if dim is None else value.chunk(world, dim)[rank]


def model(twin):
    rank, world = dist.get_rank(), dist.get_world_size()
    net = ParallelBlock(8 // world)
    net.load_state_dict({k: shard(k, v, rank, world) for k, v in twin.state_dict().items()})
    return net


def batch():
    g = torch.Generator().manual_seed(1)
    return torch.randn(6, 6, generator=g), torch.randn(6, 6, generator=g)


def mine(batch, rank, world):
    return tuple(one.chunk(world)[rank] for one in batch)


loss = F.mse_loss
