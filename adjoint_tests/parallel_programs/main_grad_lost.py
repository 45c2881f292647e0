"""Two parts of a batch, whose gradients hooks add to `main_grad`; that of the biases is set to zero
before the second one."""

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

    net = copy.deepcopy(twin)
    for p in net.parameters():
        p.main_grad = torch.zeros_like(p, dtype=torch.float64)
        p.get_accumulator = p.expand_as(p).grad_fn.next_functions[0][0]

        def add(*_, p=p):
            p.main_grad.add_(p.grad)
            p.grad = None

        p.get_accumulator.register_hook(add)
    return net


def batch():
    g = torch.Generator().manual_seed(5)
    return torch.randn(8, 3, generator=g), torch.randn(8, 3, generator=g)


def mine(batch, rank, world):
    return tuple(b.chunk(world)[rank] for b in batch)


loss = F.mse_loss


def step(model, mine):
    total = 0
    for i, (x, t) in enumerate(zip(mine[0].split(2), mine[1].split(2), strict=True)):
        if WRONG:
            for p in model.parameters():
                if i == 1 and p.ndim == 1:
                    p.main_grad.zero_()
        value = loss(model(x), t) / 2
        value.backward()
        total = total + value.detach()
    for p in model.parameters():
        dist.all_reduce(p.main_grad)
        p.grad = p.main_grad / dist.get_world_size()
    dist.all_reduce(total)
    return total / WORLD


FAULT = {
    "parameter": ["0.bias", "2.bias"],
    "kind": "other",
    "factor": None,
    "loss": "equal",
    "note": "the term of a backward pass is lost",
    "place": ["0", "2", "p.main_grad.zero_()"],
    "operator": ["the terms of 1 of 2 backward passes"],
    "report": None,
}
