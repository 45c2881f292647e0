"""Contrastive model of images and texts: each rank compares its own with those of all ranks."""

import os

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WORLD = 2


# wrong
def gather_detached(z):
    parts = [torch.empty_like(z) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, z)  # not differentiated
    parts[dist.get_rank()] = z  # "keeps the gradient": of this rank's use alone
    return torch.cat(parts)


# right
def gather_differentiated(z):
    return torch.cat(dist_nn.all_gather(z))  # its backward is a reduce-scatter


# end
gather = gather_detached if os.environ.get("CASE") == "wrong" else gather_differentiated


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(6, 4), nn.Linear(5, 4)

    def everyones(self, z):
        return z

    def forward(self, images, texts):
        a, b = torch.tanh(self.image(images)), torch.tanh(self.text(texts))
        return a @ self.everyones(b).T, b @ self.everyones(a).T


class ParallelNet(Net):
    def everyones(self, z):
        return gather(z)


def twin():
    torch.manual_seed(0)
    return Net()


def model(twin):
    net = ParallelNet()
    net.load_state_dict(twin.state_dict())
    return DistributedDataParallel(net)


def batch():
    g = torch.Generator().manual_seed(1)
    return (torch.randn(6, 6, generator=g), torch.randn(6, 5, generator=g)), torch.arange(6)


def mine(batch, rank, world):
    (images, texts), pairs = batch
    own = slice(rank * 6 // world, (rank + 1) * 6 // world)
    return (images[own], texts[own]), pairs[own]


def loss(output, pairs):
    return (F.cross_entropy(output[0], pairs) + F.cross_entropy(output[1], pairs)) / 2
