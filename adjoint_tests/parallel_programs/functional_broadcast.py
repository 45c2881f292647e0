"""A codebook that lives on rank 0: a functional broadcast gives it to all ranks, each of which
quantises its own samples with it."""

import os

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn

torch.set_default_dtype(torch.float64)
WORLD = 2
WRONG = os.environ.get("CASE", "right") == "wrong"


class FromFirst(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return funcol.wait_tensor(funcol.broadcast(x, 0, dist.group.WORLD))

    @staticmethod
    def backward(ctx, grad):
        total = funcol.wait_tensor(funcol.all_reduce(grad.contiguous(), "sum", dist.group.WORLD))
        return total if dist.get_rank() == 0 else torch.zeros_like(total)


class Codes(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(3, 4)
        self.book = nn.Parameter(torch.randn(5, 4))

    def codes(self):
        return self.book

    def forward(self, x):
        book = self.codes()
        weights = torch.softmax(-torch.cdist(torch.tanh(self.encode(x)), book), -1)
        return weights @ book


class ParallelCodes(Codes):
    def codes(self):
        if WRONG:
            return funcol.wait_tensor(funcol.broadcast(self.book, 0, dist.group.WORLD))
        return FromFirst.apply(self.book)


def twin():
    torch.manual_seed(561)
    return Codes()


def model(twin):
    net = ParallelCodes()
    net.load_state_dict(twin.state_dict())
    return net


def batch():
    g = torch.Generator().manual_seed(562)
    return torch.randn(6, 3, generator=g), torch.randn(6, 4, generator=g)


def mine(batch, rank, world):
    return tuple(one.chunk(world)[rank] for one in batch)


def loss(output, target):
    return ((output - target) ** 2).sum() / 6


def step(net, mine):
    value = loss(net(mine[0]), mine[1])
    value.backward()
    for p in net.encode.parameters():
        dist.all_reduce(p.grad)
    dist.broadcast(net.book.grad, 0)
    dist.all_reduce(value := value.detach().clone())
    return value


FAULT = {
    "parameter": ["book"],
    "kind": "other", "factor": None, "loss": "equal",
    "accept": ["missing sum over 2 ranks"],
    "note": "the functional broadcast is the identity to autograd: rank 0 has the gradient of its"
            " own samples alone",
    "place": ["funcol.broadcast(self.book"],
    "operator": ["sum-reduce", "all-reduce", "reduce"],
    "report": None,
}  # fmt: skip
