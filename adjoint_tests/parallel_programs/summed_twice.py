"""Four ranks: tokens are cut over pairs (sequence parallel), samples over the two pairs. Gradients
of a norm are summed over both axes."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

torch.set_default_dtype(torch.float64)

WORLD = 4
WRONG = os.environ.get("CASE", "right") == "wrong"
GROUPS = {}


def groups():
    """Rank = 2 * sequence + data."""
    rank = dist.get_rank()
    for name, each in (("data", ((0, 1), (2, 3))), ("sequence", ((0, 2), (1, 3)))):
        for ranks in each:
            group = dist.new_group(ranks)
            if rank in ranks:
                GROUPS[name] = group


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.norm, self.out = nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 2)

    def forward(self, x):
        return self.out(torch.tanh(self.norm(self.inp(x))))


def twin():
    torch.manual_seed(1121)
    return Net()


def model(twin):
    groups()
    (net := Net()).load_state_dict(twin.state_dict())
    return net


def batch():
    g = torch.Generator().manual_seed(1122)
    return torch.randn(4, 6, 3, generator=g), torch.randn(4, 6, 2, generator=g)


def mine(batch, rank, world):
    return tuple(v.chunk(2)[rank % 2].chunk(2, 1)[rank // 2] for v in batch)


loss = F.mse_loss


def step(model, mine):
    value = loss(model(mine[0]), mine[1]) / WORLD
    value.backward()
    for name, p in model.named_parameters():
        dist.all_reduce(p.grad, group=GROUPS["data"])
        second = "data" if WRONG and name.startswith("norm.") else "sequence"
        dist.all_reduce(p.grad, group=GROUPS[second])
    dist.all_reduce(total := value.detach().clone())
    return total


FAULT = {
    "parameter": ["norm.weight", "norm.bias"],
    "kind": "sum over the wrong group", "factor": None, "loss": "equal",
    "note": "summed over data twice, and not over the parts of the sequence",
    "place": ["norm", "dist.all_reduce(p.grad, group=GROUPS[second])"],
    "accept": ["missing sum over 2 ranks"],
    "report": None,
}  # fmt: skip
