"""Data parallel classifier of tokens, some of which are padding."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WORLD = 2
PADDING = -100


def loss(output, target):
    return F.cross_entropy(output, target, ignore_index=PADDING)


# wrong
def wrong_step(model, mine):
    tokens, target = mine
    value = loss(model(tokens), target)  # the mean over this rank's tokens
    value.backward()  # and DDP takes the mean over ranks
    return value


# right
def right_step(model, mine):
    tokens, target = mine
    dist.all_reduce(count := (target != PADDING).sum())
    total = F.cross_entropy(model(tokens), target, ignore_index=PADDING, reduction="sum")
    value = total * dist.get_world_size() / count
    value.backward()
    return value


# end
step = wrong_step if os.environ.get("CASE") == "wrong" else right_step


def twin():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def model(twin):
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    net.load_state_dict(twin.state_dict())
    return DistributedDataParallel(net)


def batch():
    tokens = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    return tokens, torch.tensor([0, 2, 1, 1, 2, PADDING, 0, PADDING])


def mine(batch, rank, world):
    return tuple(one.chunk(world)[rank] for one in batch)
