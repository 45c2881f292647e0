"""Tensor parallel blocks that are recomputed, the first one by a reentrant checkpoint; the second
one does not sum the gradient of its input."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.set_default_dtype(torch.float64)
WRONG = os.environ.get("CASE", "right") == "wrong"


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        dist.all_reduce(g := g.contiguous().clone())
        return g


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        dist.all_reduce(x := x.clone())
        return x

    @staticmethod
    def backward(ctx, g):
        return g


WORLD = 2


class Block(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(d),
            nn.Linear(d, h),
            nn.Linear(h, d, bias=False),
        )
        self.bias = nn.Parameter(torch.randn(d))

    def enter(self, x):
        return x

    leave = enter

    def forward(self, x):
        return x + self.leave(self.down(F.gelu(self.up(self.enter(self.norm(x)))))) + self.bias


class TP(Block):
    last = False

    def enter(self, x):
        return x if WRONG and self.last else Enter.apply(x)

    def leave(self, x):
        return Leave.apply(x)


class Net(nn.Module):
    def __init__(self, kind=Block, h=8):
        super().__init__()
        self.inp = nn.Linear(3, 6)
        self.layers = nn.ModuleList(kind(6, h) for _ in range(3))
        self.out = nn.Linear(6, 3)

    def run(self, i, layer, x):
        return layer(x)

    def forward(self, x):
        x = self.inp(x)
        for i, layer in enumerate(self.layers):
            x = self.run(i, layer, x)
        return self.out(x)


class Ckpt(Net):
    def run(self, i, layer, x):
        return checkpoint(layer, x, use_reentrant=i == 0)


def twin():
    torch.manual_seed(3)
    return Net()


def shard(n, v, r, w):
    if ".up." in n:
        return v.chunk(w)[r]
    return v.chunk(w, 1)[r] if n.endswith("down.weight") else v


def model(twin):
    net = Ckpt(TP, 8 // dist.get_world_size())
    net.layers[1].last = True
    net.load_state_dict(
        {
            k: shard(k, v, dist.get_rank(), dist.get_world_size())
            for k, v in twin.state_dict().items()
        }
    )
    return net


def batch():
    g = torch.Generator().manual_seed(5)
    return torch.randn(5, 3, generator=g), torch.randn(5, 3, generator=g)


loss = F.mse_loss


FAULT = {
    "parameter": [
        "inp.weight",
        "inp.bias",
        "layers.0.bias",
        "layers.0.norm.weight",
        "layers.0.norm.bias",
        "layers.0.up.weight",
        "layers.0.up.bias",
        "layers.0.down.weight",
        "layers.1.norm.weight",
        "layers.1.norm.bias",
    ],
    "kind": "other",
    "factor": None,
    "loss": "equal",
    "note": "what is wrong behind a reentrant checkpoint follows from the fault before it",
    "kinds": {
        "layers.1.norm.weight": "missing sum over 2 ranks",
        "layers.1.norm.bias": "missing sum over 2 ranks",
    },
    "place": ["layers.1.up", "self.enter(self.norm(x))"],
    "operator": ["all-reduce over ranks 0, 1, in the backward pass"],
    "report": None,
}
