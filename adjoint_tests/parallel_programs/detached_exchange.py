"""Rows that ranks exchange by an all-to-all, beside their own; it is outside of every function with
a backward of its own."""

import os

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dfn
from torch import nn

torch.set_default_dtype(torch.float64)
WORLD = 2
WRONG = os.environ.get("CASE", "right") == "wrong"
ORDER = [0, 1, 4, 5, 2, 3, 6, 7]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.mix, self.out = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 2)

    def exchanged(self, h):
        return h[ORDER]

    def forward(self, x):
        h = torch.tanh(self.inp(x))
        return self.out(h + torch.tanh(self.mix(self.exchanged(h))))


class Exchanging(Net):
    def exchanged(self, h):
        got = torch.empty_like(h)
        if WRONG:
            dist.all_to_all_single(got, h)
            return got
        return dfn.all_to_all_single(got, h)


def twin():
    torch.manual_seed(561)
    return Net()


def model(twin):
    net = Exchanging()
    net.load_state_dict(twin.state_dict())
    return net


def batch():
    g = torch.Generator().manual_seed(562)
    return torch.randn(8, 3, generator=g), torch.randn(8, 2, generator=g)


def mine(batch, rank, world):
    return tuple(one.chunk(world)[rank] for one in batch)


def loss(output, target):
    return ((output - target) ** 2).sum()


def step(net, mine):
    value = loss(net(mine[0]), mine[1])
    value.backward()
    for p in net.parameters():
        dist.all_reduce(p.grad)
    dist.all_reduce(total := value.detach().clone())
    return total


FAULT = {
    "parameter": ["inp.weight", "inp.bias"],
    "kind": "other",
    "factor": None,
    "loss": "equal",
    "note": "an all-to-all is not differentiated; the other use of its argument is",
    "place": ["dist.all_to_all_single"],
    "operator": ["all-to-all over ranks 0, 1, in the backward pass"],
    "says": "sends no gradients back",
    "report": None,
}
