"""Gradients in one flat tensor, reduce-scattered and gathered again: a part is divided by the
number of ranks, as the loss is already."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

torch.set_default_dtype(torch.float64)
WRONG = os.environ.get("CASE", "right") == "wrong"

WORLD = 2


def twin():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))


def model(twin):
    import copy

    return copy.deepcopy(twin)


def batch():
    g = torch.Generator().manual_seed(5)
    return torch.randn(8, 3, generator=g), torch.randn(8, 3, generator=g)


def mine(batch, rank, world):
    return tuple(b[rank::world] for b in batch)


loss = F.mse_loss


def step(model, mine):
    value = loss(model(mine[0]), mine[1]) / dist.get_world_size()
    value.backward()
    params = list(model.parameters())
    flat = torch.cat([p.grad.flatten() for p in params])
    world = dist.get_world_size()
    flat = F.pad(flat, (0, -len(flat) % world))
    part = flat.new_empty(len(flat) // world)
    dist.reduce_scatter_tensor(part, flat)
    if WRONG:
        part /= world
    dist.all_gather_into_tensor(flat, part)
    at = 0
    for p in params:
        p.grad = flat[at : at + p.numel()].view_as(p).clone()
        at += p.numel()
    dist.all_reduce(total := value.detach().clone())
    return total


FAULT = {
    "parameter": ["0.weight", "0.bias", "2.weight", "2.bias"],
    "kind": "factor 0.5",
    "factor": 0.5,
    "loss": "equal",
    "note": "divided twice",
    "place": ["part /= world"],
    "report": None,
}
