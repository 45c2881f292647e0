"""Retrieval by rows: queries stay on their rank, documents are gathered from all ranks, and
every rank scores its own queries against all documents. Gradients are summed by hand."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

torch.set_default_dtype(torch.float64)
WORLD = 2
WRONG = os.environ.get("CASE", "right") == "wrong"


class GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(WORLD)]
        dist.all_gather(parts, x.contiguous())
        ctx.rows = len(x)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        if not WRONG:
            dist.all_reduce(grad := grad.clone())
        return grad[ctx.rows * dist.get_rank() :][: ctx.rows]


class Retriever(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(4, 5)
        self.document = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5, bias=False))

    def gather(self, d):
        return d

    def forward(self, x):
        q, d = x.split([4, 6], 1)
        return self.query(q) @ self.gather(self.document(d)).T


class ParallelRetriever(Retriever):
    def gather(self, d):
        return GatherRows.apply(d)


def twin():
    torch.manual_seed(901)
    return Retriever()


def model(twin):
    (net := ParallelRetriever()).load_state_dict(twin.state_dict())
    return net


def batch():
    x = torch.randn(8, 10, generator=torch.Generator().manual_seed(902))
    return x, torch.arange(8)


def mine(batch, rank, world):
    return tuple(v.chunk(world)[rank] for v in batch)


loss = F.cross_entropy


def step(model, mine):
    value = loss(model(mine[0]), mine[1]) / WORLD
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    dist.all_reduce(total := value.detach().clone())
    return total


FAULT = {
    "parameter": ["document.0.weight", "document.0.bias", "document.2.weight"],
    "kind": "other", "factor": None, "loss": "equal",
    "note": "the gathered documents are used by other losses on each rank, and the backward takes"
            " the slice of its own one: a reduce-scatter is its adjoint",
    "place": ["document", "return grad[ctx.rows", "GatherRows", "gather"],
    "report": None,
}  # fmt: skip
