"""Hybrid sharding by hand on 2 x 2 ranks: ranks 0 2 and 1 3 hold the two halves of the
parameters, and copies of a half average. A rank's half is its place in its group."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

torch.set_default_dtype(torch.float64)
WORLD = 4
WRONG = os.environ.get("CASE", "right") == "wrong"
WIDTH = 4


class Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx, half, group):
        ctx.group = group
        parts = [torch.empty_like(half) for _ in range(2)]
        dist.all_gather(parts, half.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        dist.all_reduce(grad := grad.clone(), group=ctx.group)
        index = dist.get_rank() % 2 if WRONG else dist.get_rank(ctx.group)
        return grad.chunk(2)[index].clone(), None


class Net(nn.Module):
    def __init__(self, rows=2 * WIDTH, group=None):
        super().__init__()
        self.group = group
        self.w1 = nn.Parameter(torch.randn(rows, WIDTH) / 2)
        self.w2 = nn.Parameter(torch.randn(rows, WIDTH) / 2)

    def whole(self, w):
        return w if self.group is None else Whole.apply(w, self.group)

    def forward(self, x):
        return F.elu(x @ self.whole(self.w1).T) @ self.whole(self.w2)


def twin():
    torch.manual_seed(981)
    return Net()


def shard(name, value, rank, world):
    return value.chunk(2)[rank // 2]


def model(twin):
    rank = dist.get_rank()
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    copies = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    net = Net(WIDTH, halves[rank % 2])
    net.load_state_dict({k: shard(k, v, rank, WORLD) for k, v in twin.state_dict().items()})
    for p in net.parameters():
        p.copies = copies[rank // 2]
    return net


def batch():
    return tuple(torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(982)))


def mine(batch, rank, world):
    return tuple(v[rank::world] for v in batch)


loss = F.mse_loss


def step(model, mine):
    value = loss(model(mine[0]), mine[1]) / WORLD
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=p.copies)
    dist.all_reduce(total := value.detach().clone())
    return total


FAULT = {
    "parameter": ["w1", "w2"],
    "kind": "other", "factor": None, "loss": "equal", "accept": ["gradient of another shard"],
    "note": "the half is chosen by the rank in the world, which is another one than in the group "
            "on ranks 1 and 2; the average over copies then mixes the halves",
    "place": ["index = dist.get_rank() % 2 if WRONG", "Whole", "whole"],
    "report": None,
}  # fmt: skip
