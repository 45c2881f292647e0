"""Cross entropy of logits that are cut over the vocabulary, as one function with a backward of its
own, behind a layer that begins with the usual function of the identity and an all-reduce."""

import os

import torch
import torch.distributed as dist
from torch import nn

torch.set_default_dtype(torch.float64)
WORLD = 2
WRONG = os.environ.get("CASE", "right") == "wrong"
VOCAB, WIDTH, TOKENS = 10, 4, 7


class CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target):
        rows = logits.shape[1]
        top = logits.max(1).values
        dist.all_reduce(top, op=dist.ReduceOp.MAX)
        exp = (logits - top[:, None]).exp()
        dist.all_reduce(total := exp.sum(1))
        local = target - dist.get_rank() * rows
        owned = (local >= 0) & (local < rows)
        local = local.clamp(0, rows - 1)
        picked = logits.gather(1, local[:, None])[:, 0].masked_fill(~owned, 0.0)
        dist.all_reduce(picked)
        ctx.save_for_backward(exp / total[:, None], owned, local)
        return (total.log() + top - picked).mean()

    @staticmethod
    def backward(ctx, grad):
        p, owned, local = ctx.saved_tensors
        ones = torch.ones_like(p[:, 0]) if WRONG else owned.to(p.dtype)
        p = p.scatter_add(1, local[:, None], -ones[:, None])
        return grad * p / len(p), None


class Copy(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x.view_as(x))

    @staticmethod
    def backward(ctx, grad):
        dist.all_reduce(grad := grad.clone())
        return grad


class Net(nn.Module):
    def __init__(self, rows=VOCAB, cut=False):
        super().__init__()
        self.words = nn.Embedding(VOCAB, WIDTH)
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.logits = nn.Linear(WIDTH, rows, bias=False)
        self.cut = cut

    def forward(self, ids):
        h = torch.tanh(self.trunk(self.words(ids)))
        return self.logits(Copy.apply(h) if self.cut else h)


def twin():
    torch.manual_seed(811)
    return Net()


def shard(name, value, rank, world):
    return value.chunk(world)[rank] if name == "logits.weight" else value


def model(twin):
    net = Net(VOCAB // WORLD, cut=True)
    rank, values = dist.get_rank(), twin.state_dict()
    net.load_state_dict({k: shard(k, v, rank, WORLD) for k, v in values.items()})
    return net


def batch():
    g = torch.Generator().manual_seed(812)
    ids, target = torch.randint(0, VOCAB, (2, TOKENS), generator=g)
    return ids, target


loss = nn.functional.cross_entropy


def step(model, mine):
    ids, target = mine
    value = CrossEntropy.apply(model(ids), target)
    value.backward()
    return value.detach()


FAULT = {
    "parameter": ["words.weight", "trunk.weight", "trunk.bias", "logits.weight"],
    "kind": "other", "factor": None, "loss": "equal",
    "note": "the backward of the cross entropy subtracts one for every token, where the rank has "
            "the token's row or not; the all-reduce before the logits is right",
    "place": ["CrossEntropy.apply(model(ids), target)", "CrossEntropy"],
    "report": None,
}  # fmt: skip
