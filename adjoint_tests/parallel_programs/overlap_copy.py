"""Two tensor parallel layers whose linear function overlaps the sum of its input's gradient with
the computation of its weight's; the sum runs on a copy."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

torch.set_default_dtype(torch.float64)
WRONG = os.environ.get("CASE", "right") == "wrong"

WORLD = 2


class LinearAsync(torch.autograd.Function):
    """x @ w.T + b with the input gradient's sum overlapped with the weight's."""

    @staticmethod
    def forward(ctx, x, w, b):
        ctx.save_for_backward(x, w)
        return x @ w.t() + b

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        gx = (w.t() @ g.t()).t()
        if WRONG:
            handle = dist.all_reduce(gx.contiguous(), async_op=True)
        else:
            gx = gx.contiguous()
            handle = dist.all_reduce(gx, async_op=True)
        gw = g.t() @ x
        gb = g.sum(0)
        handle.wait()
        return gx, gw, gb


class Row(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(o, i)), nn.Parameter(torch.empty(o))

    def forward(self, x):
        y = F.linear(x, self.weight)
        work = dist.all_reduce(y, async_op=True)
        work.wait()
        return y + self.bias


class Col(nn.Linear):
    def forward(self, x):
        return LinearAsync.apply(x, self.weight, self.bias)


class MLP(nn.Module):
    def __init__(self, d, h, col=nn.Linear, row=nn.Linear):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.up, self.down = col(d, h), row(h, d)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, h=8, **kw):
        super().__init__()
        self.layers = nn.ModuleList(MLP(6, h, **kw) for _ in range(2))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def twin():
    torch.manual_seed(3)
    return Net()


def shard(name, value, rank, world):
    if ".up." in name:
        return value.chunk(world, 0)[rank]
    if name.endswith("down.weight"):
        return value.chunk(world, 1)[rank]
    return value


def model(twin):
    net = Net(8 // dist.get_world_size(), col=Col, row=Row)
    net.load_state_dict(
        {
            k: shard(k, v, dist.get_rank(), dist.get_world_size())
            for k, v in twin.state_dict().items()
        }
    )
    return net


def batch():
    g = torch.Generator().manual_seed(5)
    return torch.randn(7, 6, generator=g), torch.randint(0, 3, (7,), generator=g)


loss = F.cross_entropy


FAULT = {
    "parameter": [
        "layers.0.norm.weight",
        "layers.0.norm.bias",
        "layers.0.up.weight",
        "layers.0.up.bias",
        "layers.0.down.weight",
        "layers.0.down.bias",
        "layers.1.norm.weight",
        "layers.1.norm.bias",
    ],
    "kind": "other",
    "factor": None,
    "loss": "equal",
    "note": "contiguous() makes a copy of a transposed gradient, and its sum is dropped",
    "kinds": {
        "layers.1.norm.weight": "missing sum over 2 ranks",
        "layers.1.norm.bias": "missing sum over 2 ranks",
    },
    "place": ["LinearAsync"],
    "operator": ["all-reduce over ranks 0, 1, in the backward pass"],
    "says": "it is of a copy",
    "report": None,
}
