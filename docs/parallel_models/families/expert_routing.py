"""Mixture of two experts, one on each rank: tokens are sent to their expert, results sent back."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

WORLD = 2
EXPERTS, WIDTH = 2, 4


def send(rows, out, back):
    """Rows to their ranks: ``out[r]`` of them to rank r, ``back[r]`` from it."""
    made = rows.new_empty(sum(back), *rows.shape[1:])
    dist.all_to_all_single(made, rows.contiguous(), back, out)
    return made


class Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, out, back):
        ctx.counts = out, back
        return send(rows, out, back)

    @staticmethod
    def backward(ctx, grad):
        out, back = ctx.counts
        return send(grad, back, out), None, None


# wrong
def wrong_run(expert, tokens, gates, out, back):
    gates = send(gates, out, back)  # moved outside of autograd: the router learns nothing
    results = torch.tanh(expert(Send.apply(tokens, out, back))) * gates
    return Send.apply(results, back, out)


# right
def right_run(expert, tokens, gates, out, back):
    gates = Send.apply(gates, out, back)
    results = torch.tanh(expert(Send.apply(tokens, out, back))) * gates
    return Send.apply(results, back, out)


# end
run = wrong_run if os.environ.get("CASE") == "wrong" else right_run


class Mixture(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleDict({str(k): nn.Linear(WIDTH, WIDTH) for k in experts})

    def forward(self, x):
        gates, chosen = torch.softmax(self.router(x), -1).max(-1, keepdim=True)
        order = chosen[:, 0].argsort(stable=True)
        counts = chosen[:, 0].bincount(minlength=EXPERTS).tolist()
        results = self.run(x[order], gates[order], counts)
        return results[order.argsort()]

    def run(self, tokens, gates, counts):
        parts = tokens.split(counts)
        results = [torch.tanh(self.experts[str(k)](part)) for k, part in enumerate(parts)]
        return torch.cat(results) * gates


class ParallelMixture(Mixture):
    def run(self, tokens, gates, counts):
        theirs = torch.empty(WORLD, dtype=torch.long)
        dist.all_to_all_single(theirs, torch.tensor(counts))
        expert = self.experts[str(dist.get_rank())]
        return run(expert, tokens, gates, counts, theirs.tolist())


def twin():
    torch.manual_seed(0)
    return Mixture(range(EXPERTS))


def model(twin):
    net = ParallelMixture([dist.get_rank()])
    net.load_state_dict(twin.state_dict(), strict=False)
    return net


def batch():
    g = torch.Generator().manual_seed(1)
    return torch.randn(8, WIDTH, generator=g), torch.randn(8, WIDTH, generator=g)


def mine(batch, rank, world):
    return tuple(one.chunk(world)[rank] for one in batch)


loss = F.mse_loss


def step(model, mine):
    x, target = mine
    value = loss(model(x), target) / dist.get_world_size()
    value.backward()
    if model.router.weight.grad is not None:
        dist.all_reduce(model.router.weight.grad)
    return value
