"""Experts on two ranks: tokens are gathered to all ranks, each runs its experts, and results are
summed back to the tokens' ranks."""

import os

import torch
import torch.distributed as dist
from torch import nn

torch.set_default_dtype(torch.float64)
WORLD = 2
WRONG = os.environ.get("CASE", "right") == "wrong"
WIDTH, EXPERTS = 4, 4


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(WORLD)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, g):
        if not WRONG:
            dist.all_reduce(g := g.contiguous().clone())
        return g.chunk(WORLD)[dist.get_rank()]


class Weights(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return Gather.forward(ctx, x)

    @staticmethod
    def backward(ctx, g):
        dist.all_reduce(g := g.contiguous().clone())
        return g.chunk(WORLD)[dist.get_rank()]


class Return(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        dist.all_reduce(x := x.clone())
        return x.chunk(WORLD)[dist.get_rank()].clone()

    @staticmethod
    def backward(ctx, g):
        parts = [torch.empty_like(g) for _ in range(WORLD)]
        dist.all_gather(parts, g.contiguous())
        return torch.cat(parts)


class Experts(nn.Module):
    def __init__(self, numbers=range(EXPERTS)):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.expert = nn.ModuleDict({str(k): nn.Linear(WIDTH, WIDTH) for k in numbers})

    def weights(self, x):
        p = torch.softmax(self.router(x), -1)
        best, which = p.topk(2, -1)
        return torch.zeros_like(p).scatter(-1, which, best / best.sum(-1, keepdim=True))

    def mixed(self, x, weights):
        total = torch.zeros_like(x)
        for k, expert in self.expert.items():
            rows = weights[:, int(k)].nonzero()[:, 0]
            results = torch.tanh(expert(x[rows])) * weights[rows, int(k), None]
            total = total.index_add(0, rows, results)
        return total

    def forward(self, x):
        x = torch.tanh(self.inner(x))
        return x + self.mixed(x, self.weights(x))


class OwnExperts(Experts):
    def forward(self, x):
        x = torch.tanh(self.inner(x))
        weights = Weights.apply(self.weights(x))
        return x + Return.apply(self.mixed(Gather.apply(x), weights))


def twin():
    torch.manual_seed(971)
    return Experts()


def model(twin):
    per = EXPERTS // WORLD
    first = per * dist.get_rank()
    net = OwnExperts(range(first, first + per))
    values = twin.state_dict()
    net.load_state_dict({name: values[name] for name in net.state_dict()})
    return net


def batch():
    g = torch.Generator().manual_seed(972)
    return torch.randn(8, WIDTH, generator=g), torch.randn(8, WIDTH, generator=g)


def mine(batch, rank, world):
    return tuple(v.chunk(world)[rank] for v in batch)


def loss(output, target):
    return (output - target).square().sum(-1).mean()


def step(model, mine):
    value = loss(model(mine[0]), mine[1]) / WORLD
    value.backward()
    for name, p in model.named_parameters():
        if not name.startswith("expert"):
            dist.all_reduce(p.grad)
    dist.all_reduce(value := value.detach().clone())
    return value


FAULT = {
    "parameter": ["inner.weight", "inner.bias"],
    "kind": "other", "factor": None, "loss": "equal",
    "note": "the ranks run other experts on the tokens that all of them have, and the backward of "
            "the gather takes the own rank's gradients alone",
    "place": ["Gather.apply(x)", "Gather", "class Gather"],
    "report": None,
}  # fmt: skip
