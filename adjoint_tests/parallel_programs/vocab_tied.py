"""Embedding and logits that share one weight, cut over the vocabulary: behind the sum of the
embeddings, and before the logits."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_gather

torch.set_default_dtype(torch.float64)
WORLD = 2
WRONG = os.environ.get("CASE", "right") == "wrong"
VOCAB, WIDTH, TOKENS = 10, 4, 7


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        dist.all_reduce(x := x.clone())
        return x

    backward = staticmethod(lambda ctx, grad: grad)


class Copy(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x.view_as(x))

    @staticmethod
    def backward(ctx, grad):
        if not WRONG:
            dist.all_reduce(grad := grad.clone())
        return grad


class Net(nn.Module):
    def __init__(self, rows=VOCAB):
        super().__init__()
        self.words = nn.Embedding(rows, WIDTH)
        self.trunk = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids):
        return torch.tanh(self.trunk(self.words(ids))) @ self.words.weight.T


class CutNet(Net):
    def forward(self, ids):
        rows = self.words.weight.shape[0]
        local = ids - dist.get_rank() * rows
        owned = (local >= 0) & (local < rows)
        h = self.words(local.clamp(0, rows - 1)) * owned[:, None]
        h = torch.tanh(self.trunk(Reduce.apply(h)))
        return torch.cat(all_gather(Copy.apply(h) @ self.words.weight.T), 1)


def twin():
    torch.manual_seed(821)
    return Net()


def shard(name, value, rank, world):
    return value.chunk(world)[rank] if name == "words.weight" else value


def model(twin):
    net = CutNet(VOCAB // WORLD)
    rank, values = dist.get_rank(), twin.state_dict()
    net.load_state_dict({k: shard(k, v, rank, WORLD) for k, v in values.items()})
    return net


def batch():
    g = torch.Generator().manual_seed(822)
    ids, target = torch.randint(0, VOCAB, (2, TOKENS), generator=g)
    return ids, target


loss = nn.functional.cross_entropy


def step(model, mine):
    ids, target = mine
    value = loss(model(ids), target)
    (value / WORLD).backward()
    return value.detach()


FAULT = {
    "parameter": ["words.weight", "trunk.weight", "trunk.bias"],
    "kind": "missing sum over 2 ranks", "factor": None, "loss": "equal",
    "kinds": {"words.weight": "other"},
    "note": "no sum before the logits: what comes through the trunk is a term on each rank, and "
            "that of the logits is whole; the sum behind the embedding is right",
    "place": ["Copy.apply(h) @ self.words.weight.T"],
    "report": None,
}  # fmt: skip
