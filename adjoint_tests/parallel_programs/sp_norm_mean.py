"""Sequence parallel layers whose norms register hooks: when a gradient has been accumulated, the
ranks of the tensor parallel group bring theirs together, while backward goes on."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

torch.set_default_dtype(torch.float64)
WORLD = 4
WRONG = os.environ.get("CASE", "right") == "wrong"
WIDTH = 6


class ToWholeSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = x.new_empty(WORLD * len(x), *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx, grad):
        dist.all_reduce(grad := grad.clone())
        return grad.chunk(WORLD)[dist.get_rank()]


class ToOwnTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        dist.all_reduce(x := x.clone())
        return x.chunk(WORLD)[dist.get_rank()]

    @staticmethod
    def backward(ctx, grad):
        out = grad.new_empty(WORLD * len(grad), *grad.shape[1:])
        dist.all_gather_into_tensor(out, grad.contiguous())
        return out


class Mixer(nn.Module):
    """Gated linear unit after a root mean square norm."""

    def __init__(self, hidden=8):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, hidden, bias=False)
        self.value = nn.Linear(WIDTH, hidden, bias=False)
        self.out = nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x):
        h = self.norm(x)
        return x + self.out(F.silu(self.gate(h)) * self.value(h))


class ParallelMixer(Mixer):
    def forward(self, x):
        h = ToWholeSequence.apply(self.norm(x))
        return x + ToOwnTokens.apply(self.out(F.silu(self.gate(h)) * self.value(h)))


def twin():
    torch.manual_seed(511)
    return nn.Sequential(Mixer(), Mixer())


def shard(name, value, rank, world):
    if "norm" in name:
        return value
    return value.chunk(world, 1 if "out" in name else 0)[rank]


def reduce_norm(p):
    dist.all_reduce(p.grad)
    if WRONG:
        p.grad /= WORLD


def model(twin):
    net = nn.Sequential(ParallelMixer(8 // WORLD), ParallelMixer(8 // WORLD))
    state = {k: shard(k, v, dist.get_rank(), WORLD) for k, v in twin.state_dict().items()}
    net.load_state_dict(state)
    for mixer in net:
        mixer.norm.weight.register_post_accumulate_grad_hook(reduce_norm)
    return net


def batch():
    g = torch.Generator().manual_seed(512)
    return torch.randn(8, WIDTH, generator=g), torch.randn(8, WIDTH, generator=g)


def mine(batch, rank, world):
    return tuple(v.chunk(world)[rank] for v in batch)


def loss(output, target):
    return F.l1_loss(output, target)


def step(model, mine):
    value = loss(model(mine[0]), mine[1]) / WORLD
    value.backward()
    dist.all_reduce(total := value.detach().clone())
    return total


FAULT = {
    "parameter": ["0.norm.weight", "1.norm.weight"],
    "kind": "factor 0.25", "factor": 0.25, "loss": "equal",
    "note": "the gradients of tokens are terms of a sum, and the hook takes their mean: 1 / the 4"
            " ranks of tp",
    "place": ["0.norm", "1.norm", "p.grad /= WORLD", "reduce_norm"],
    "report": "EleutherAI/gpt-neox#1259",
}  # fmt: skip
