"""Data parallel projection head with features centred over the whole batch: the mean comes from
all ranks, in the forward pass. DDP averages the gradients."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_default_dtype(torch.float64)
WORLD = 2
WRONG = os.environ.get("CASE", "right") == "wrong"


class SumOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        dist.all_reduce(x := x.clone())
        return x

    @staticmethod
    def backward(ctx, grad):
        if WRONG:
            return grad
        dist.all_reduce(grad := grad.clone())
        return grad


class Centre(nn.Module):
    """Subtracts the features' mean over the samples of the batch, wherever they are."""

    def __init__(self, spread):
        super().__init__()
        self.spread = spread

    def forward(self, h):
        total, count = h.sum(0), len(h)
        if self.spread:
            total, count = SumOver.apply(total), count * dist.get_world_size()
        return h - total / count


class Projector(nn.Module):
    def __init__(self, spread=False):
        super().__init__()
        self.features = nn.Linear(5, 6, bias=False)
        self.centre = Centre(spread)
        self.classes = nn.Linear(6, 3)

    def forward(self, x):
        return self.classes(torch.relu(self.centre(self.features(x))))


def twin():
    torch.manual_seed(681)
    return Projector()


def model(twin):
    net = Projector(spread=True)
    net.load_state_dict(twin.state_dict())
    return DistributedDataParallel(net)


def batch():
    g = torch.Generator().manual_seed(682)
    return torch.randn(8, 5, generator=g), torch.randint(0, 3, (8,), generator=g)


def mine(batch, rank, world):
    return tuple(v[rank::world] for v in batch)


loss = F.cross_entropy


def step(model, mine):
    value = loss(model(mine[0]), mine[1])
    value.backward()
    dist.all_reduce(total := value.detach() / WORLD)
    return total


FAULT = {
    "parameter": ["features.weight"],
    "kind": "other", "factor": None, "loss": "equal",
    "note": "the mean enters the losses of both ranks, and its gradient is that of one of them: "
            "the all-reduce between independent copies has the identity as backward",
    "place": ["centre", "SumOver", "return grad"],
    "report": "Dao-AILab/flash-attention#1244",
}  # fmt: skip
