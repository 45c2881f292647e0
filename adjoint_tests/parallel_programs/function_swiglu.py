"""A gated feed-forward layer whose hidden units are cut over the ranks. The gate is a fused
function with a backward of its own, as kernels have it; the twin computes it by operators."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

torch.set_default_dtype(torch.float64)
WORLD = 2
WRONG = os.environ.get("CASE", "right") == "wrong"
WIDTH, HIDDEN = 4, 6


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        dist.all_reduce(grad := grad.contiguous().clone())
        return grad


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        dist.all_reduce(x := x.clone())
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate):
        ctx.save_for_backward(x, gate)
        return F.silu(gate) * x

    @staticmethod
    def backward(ctx, grad):
        x, gate = ctx.saved_tensors
        s = torch.sigmoid(gate)
        slope = s if WRONG else s * (1 + gate * (1 - s))
        return grad * gate * s, grad * x * slope


class Layer(nn.Module):
    def __init__(self, hidden=HIDDEN):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, hidden, bias=False)
        self.gate = nn.Linear(WIDTH, hidden, bias=False)
        self.down = nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class ParallelLayer(Layer):
    def forward(self, x):
        h = Enter.apply(self.norm(x))
        return x + Leave.apply(self.down(Gated.apply(self.up(h), self.gate(h))))


def twin():
    torch.manual_seed(701)
    return Layer()


def shard(name, value, rank, world):
    dim = {"up.weight": 0, "gate.weight": 0, "down.weight": 1}.get(name)
    return value if dim is None else value.chunk(world, dim)[rank]


def model(twin):
    net = ParallelLayer(HIDDEN // WORLD)
    state = {k: shard(k, v, dist.get_rank(), WORLD) for k, v in twin.state_dict().items()}
    net.load_state_dict(state)
    return net


def batch():
    return tuple(torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(702)))


loss = F.mse_loss


FAULT = {
    "parameter": ["norm.weight", "norm.bias", "gate.weight"],
    "kind": "other", "factor": None, "loss": "equal",
    "note": "the fused backward has sigmoid in the place of the derivative of silu",
    "place": ["Gated"],
    "operator": ["the adjoint of Gated"],
    "says": "The backward of Gated",
    "report": None,
}  # fmt: skip
