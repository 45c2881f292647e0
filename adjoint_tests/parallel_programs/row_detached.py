"""A column and a row parallel layer whose tokens are gathered before and scattered behind; the
bias of the second is added to the own tokens."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_gather, reduce_scatter

torch.set_default_dtype(torch.float64)
WORLD = 2
WRONG = os.environ.get("CASE", "right") == "wrong"
WIDTH, HIDDEN, TOKENS = 4, 8, 6


class Net(nn.Module):
    def __init__(self, hidden=HIDDEN):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class CutNet(Net):
    def forward(self, x):
        h = torch.cat(all_gather(self.norm(x)))
        terms = F.linear(F.gelu(self.up(h)), self.down.weight)
        if WRONG:
            dist.all_reduce(total := terms.detach().clone())
            own = (total + (terms - terms.detach())).chunk(WORLD)[dist.get_rank()]
        else:
            own = reduce_scatter(torch.empty_like(x), list(terms.chunk(WORLD)))
        return x + own + self.down.bias


def shard(name, value, rank, world):
    dim = {"up.weight": 0, "up.bias": 0, "down.weight": 1}.get(name)
    return value if dim is None else value.chunk(world, dim)[rank]


def twin():
    torch.manual_seed(841)
    return Net()


def model(twin):
    net = CutNet(HIDDEN // WORLD)
    rank, values = dist.get_rank(), twin.state_dict()
    net.load_state_dict({k: shard(k, v, rank, WORLD) for k, v in values.items()})
    return net


def batch():
    g = torch.Generator().manual_seed(842)
    return torch.randn(TOKENS, WIDTH, generator=g), torch.randn(TOKENS, WIDTH, generator=g)


loss = F.mse_loss


def mine(batch, rank, world):
    return tuple(v.chunk(world)[rank] for v in batch)


def step(model, mine):
    value = loss(model(mine[0]), mine[1]) / WORLD
    value.backward()
    for name in ("norm.weight", "norm.bias", "down.bias"):
        dist.all_reduce(model.get_parameter(name).grad)
    dist.all_reduce(value := value.detach().clone())
    return value


FAULT = {
    "parameter": ["norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight"],
    "kind": "other", "factor": None, "loss": "equal",
    "note": "the sum over the ranks is of detached terms: each rank's terms of the other rank's "
            "tokens get no gradient",
    "place": ["dist.all_reduce(total := terms.detach().clone())",
              "own = (total + (terms - terms.detach())).chunk(WORLD)[dist.get_rank()]"],
    "report": None,
}  # fmt: skip
