"""Feed-forward block, its first layer cut by outputs, its second by inputs."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

WORLD = 2


class FeedForward(nn.Module):
    def __init__(self, width=4, hidden=8):
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


# wrong
class BiasOnEveryRank(nn.Linear):
    def forward(self, h):
        y = F.linear(h, self.weight, self.bias)
        dist.all_reduce(y)  # sums the bias of every rank
        return y


# right
class BiasOnce(nn.Linear):
    def forward(self, h):
        y = F.linear(h, self.weight)
        dist.all_reduce(y)
        return y + self.bias


# end
RowParallel = BiasOnEveryRank if os.environ.get("CASE") == "wrong" else BiasOnce


def twin():
    torch.manual_seed(0)
    return FeedForward()


def shard(name, value, rank, world):
    dim = {"up.weight": 0, "up.bias": 0, "down.weight": 1}.get(name)
    return value if dim is None else value.chunk(world, dim)[rank]


def model(twin):
    rank, world = dist.get_rank(), dist.get_world_size()
    net = FeedForward(4, 8 // world)
    net.down = RowParallel(8 // world, 4)
    net.load_state_dict({k: shard(k, v, rank, world) for k, v in twin.state_dict().items()})
    return net


def batch():
    g = torch.Generator().manual_seed(1)
    return torch.randn(6, 4, generator=g), torch.randn(6, 4, generator=g)


loss = F.mse_loss
