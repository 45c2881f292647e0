"""A layer norm of features in two parts, of sequences in two parts: the squares are summed over the
ranks that have the other tokens."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

torch.set_default_dtype(torch.float64)
WRONG = os.environ.get("CASE", "right") == "wrong"

WORLD = 4


class Red(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        y = x.clone()
        dist.all_reduce(y, group=group)
        return y

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g, group=ctx.group)
        return g, None


class Norm(nn.LayerNorm):
    """Over features split in two (ranks r and r ^ 1), tokens split in two (r // 2)."""

    def forward(self, x):
        group = self.groups[0] if not WRONG else self.groups[1]
        n = 2 * x.shape[-1]
        mean = Red.apply(x.sum(-1, keepdim=True), self.groups[0]) / n
        var = Red.apply(((x - mean) ** 2).sum(-1, keepdim=True), group) / n
        return (x - mean) / (var + self.eps).sqrt() * self.weight + self.bias


class Net(nn.Module):
    def __init__(self, d=6, kind=nn.LayerNorm):
        super().__init__()
        self.inp, self.norm = nn.Linear(3, d), kind(d)

    def forward(self, x):
        return self.norm(self.inp(x))


def twin():
    torch.manual_seed(3)
    return Net()


def shard(n, v, r, w):
    return v.chunk(2)[r % 2]


def model(twin):
    net = Net(3, Norm)
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    cols = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    r = dist.get_rank()
    net.norm.groups = rows[r // 2], cols[r % 2]
    net.load_state_dict({n: shard(n, v, r, 4) for n, v in twin.state_dict().items()})
    return net


def batch():
    g = torch.Generator().manual_seed(5)
    return torch.randn(8, 3, generator=g), torch.randn(8, 6, generator=g)


def mine(batch, rank, world):
    x, t = batch
    return x.chunk(2)[rank // 2], t.chunk(2)[rank // 2].chunk(2, 1)[rank % 2]


loss = F.mse_loss


def step(model, mine):
    value = loss(model(mine[0]), mine[1]) / 4
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=model.norm.groups[1])
    dist.all_reduce(total := value.detach().clone())
    return total


FAULT = {
    "parameter": ["inp.weight", "inp.bias", "norm.weight", "norm.bias"],
    "kind": "sum over the wrong group",
    "factor": None,
    "loss": "differs",
    "note": "the groups of a mesh are confused in a forward pass",
    "accept": ["other"],
    "place": ["var = Red.apply"],
    "operator": ["all-reduce over ranks 0, 1 and 2, 3"],
    "report": None,
}
