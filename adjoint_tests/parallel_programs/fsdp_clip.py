"""FSDP2 whose gradients are scaled down to a norm before the step."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

torch.set_default_dtype(torch.float64)
WORLD = 2
WRONG = os.environ.get("CASE", "right") == "wrong"
LARGEST = 0.05


class Clip(torch.autograd.Function):
    """Scales the gradients of all that goes through it down to a norm."""

    forward = staticmethod(lambda ctx, *values: tuple(v.view_as(v) for v in values))

    @staticmethod
    def backward(ctx, *grads):
        norm = sum((g**2).sum() for g in grads).sqrt()
        return tuple(g * (LARGEST / norm).clamp(max=1) for g in grads)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class Clipped(Net):
    def forward(self, x):
        up, b, down, c = Clip.apply(*self.parameters())
        return F.linear(torch.tanh(F.linear(x, up, b)), down, c)


def twin():
    torch.manual_seed(831)
    return Clipped()


def model(twin):
    net = Net()
    net.load_state_dict(twin.state_dict())
    fully_shard(net.up)
    fully_shard(net)
    return net


def batch():
    g = torch.Generator().manual_seed(832)
    return torch.randn(8, 5, generator=g), torch.randn(8, 3, generator=g)


loss = F.mse_loss


def mine(batch, rank, world):
    return tuple(v.chunk(world)[rank] for v in batch)


def clip(model):
    pieces = [p.grad.to_local() for p in model.parameters()]
    square = sum((piece**2).sum() for piece in pieces)
    if not WRONG:
        dist.all_reduce(square)
    for piece in pieces:
        piece *= (LARGEST / square.sqrt()).clamp(max=1)


def step(model, mine):
    value = loss(model(mine[0]), mine[1])
    value.backward()
    clip(model)
    dist.all_reduce(value := value.detach() / WORLD)
    return value


FAULT = {
    "parameter": ["up.weight", "up.bias", "down.weight", "down.bias"],
    "kind": "other", "factor": None, "loss": "equal", "accept": ["factor k"],
    "note": "each rank clips by the norm of its own shards, so ranks scale by different factors",
    "place": ["clip"],
    "report": None,
}  # fmt: skip
