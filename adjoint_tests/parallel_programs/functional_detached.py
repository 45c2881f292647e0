"""Two encoders, trained to agree: each rank encodes its pairs, and compares its images with the
texts of all ranks, which a functional collective gathers."""

import os

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn

torch.set_default_dtype(torch.float64)
WORLD = 2
WRONG = os.environ.get("CASE", "right") == "wrong"
PAIRS = 6


class Encoders(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))
        self.text = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4))

    def texts(self, x):
        return self.text(x)

    def forward(self, x):
        return self.image(x[:, :5]) @ self.texts(x[:, 5:]).T


class ParallelEncoders(Encoders):
    def texts(self, x):
        own = self.text(x)
        given = own.detach() if WRONG else own
        return funcol.all_gather_tensor(given, 0, dist.group.WORLD)


def twin():
    torch.manual_seed(511)
    return Encoders()


def model(twin):
    net = ParallelEncoders()
    net.load_state_dict(twin.state_dict())
    return net


def batch():
    return torch.randn(PAIRS, 8, generator=torch.Generator().manual_seed(512)), torch.arange(PAIRS)


def mine(batch, rank, world):
    return tuple(one.chunk(world)[rank] for one in batch)


def loss(output, target):
    return F.cross_entropy(output, target, reduction="sum") / PAIRS


def step(net, mine):
    value = loss(net(mine[0]), mine[1])
    value.backward()
    for p in net.parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        dist.all_reduce(p.grad)
    dist.all_reduce(value := value.detach().clone())
    return value


FAULT = {
    "parameter": ["text.0.weight", "text.0.bias", "text.2.weight"],
    "kind": "no gradient", "factor": None, "loss": "equal",
    "note": "the texts are detached before they are gathered: no gradient comes back to them",
    "place": ["own.detach()", "funcol.all_gather_tensor(given"],
    "operator": ["detach", "reduce-scatter"],
    "report": None,
}  # fmt: skip
