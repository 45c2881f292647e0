"""Data parallel net that subtracts the mean of its features over all samples."""

import os

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WORLD = 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 5), nn.Linear(5, 6)

    def mean(self, h):
        return h.mean(0)

    def forward(self, x):
        h = torch.tanh(self.encode(x))
        return self.decode(torch.tanh(h - self.mean(h)))


# wrong
class InPlace(Net):
    def mean(self, h):
        mean = h.mean(0) / dist.get_world_size()
        dist.all_reduce(mean)  # in place: autograd does not see it, the gradient passes unchanged
        return mean


# right
class Differentiated(Net):
    def mean(self, h):
        mean = h.mean(0) / dist.get_world_size()
        return dist_nn.all_reduce(mean)  # its backward is an all-reduce, too


# end
Parallel = InPlace if os.environ.get("CASE") == "wrong" else Differentiated


def twin():
    torch.manual_seed(0)
    return Net()


def model(twin):
    net = Parallel()
    net.load_state_dict(twin.state_dict())
    return DistributedDataParallel(net)


def batch():
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    return x, x


def mine(batch, rank, world):
    return tuple(one.chunk(world)[rank] for one in batch)


loss = F.mse_loss
