"""Adapters for a DDP model: linear layers are replaced by ones with low-rank adapters, and the
base is frozen. The adapter of the last layer is attached in a second round."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_default_dtype(torch.float64)
WORLD = 2
WRONG = os.environ.get("CASE", "right") == "wrong"


class LoraLinear(nn.Module):
    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def build():
    return nn.Sequential(
        nn.Linear(4, 6), nn.LeakyReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)
    )


def attach(net, number):
    net[number] = LoraLinear(net[number])


def twin():
    torch.manual_seed(881)
    net = build()
    for number in (0, 2, 4):
        attach(net, number)
    return net


def model(twin):
    net = build()
    for number in (0, 2):
        attach(net, number)
    if WRONG:
        wrapped = DistributedDataParallel(net)
        attach(net, 4)
    else:
        attach(net, 4)
        wrapped = DistributedDataParallel(net)
    net.load_state_dict(twin.state_dict())
    return wrapped


def batch():
    g = torch.Generator().manual_seed(882)
    return torch.randn(8, 4, generator=g), torch.randint(0, 3, (8,), generator=g)


def mine(batch, rank, world):
    return tuple(v[rank::world] for v in batch)


loss = F.cross_entropy


def step(model, mine):
    value = loss(model(mine[0]), mine[1])
    value.backward()
    dist.all_reduce(total := value.detach() / WORLD)
    return total


FAULT = {
    "parameter": ["0.down.weight", "0.up.weight", "2.down.weight", "2.up.weight", "4.down.weight",
                  "4.up.weight"],
    "kind": "missing sum over 2 ranks", "factor": None, "loss": "equal",
    "note": "DDP lists the parameters of the plain last layer, which is then replaced and frozen:"
            " its bucket never fills, and no adapter is averaged (the ranks' gradients sum to 2 "
            "times the twin's)",
    "place": ["wrapped = DistributedDataParallel(net)", "attach(net, 4)", "4"],
    "report": "kohya-ss/sd-scripts#989",
}  # fmt: skip
