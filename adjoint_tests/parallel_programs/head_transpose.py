"""Language model head cut by vocabulary. Hidden states are kept as [batch, time, width] and
given to the head as [time, batch, width]; the loss is computed on the gathered logits."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

torch.set_default_dtype(torch.float64)
WORLD = 2
WRONG = os.environ.get("CASE", "right") == "wrong"
VOCAB, WIDTH = 6, 4


def reduce(x):
    """Sums over the ranks; the collective wants contiguous memory."""
    if WORLD == 1:
        return x
    dist.all_reduce(x.contiguous())
    return x


class CopyToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return reduce(grad)


class GatherLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(WORLD)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx, grad):
        return grad.chunk(WORLD, -1)[dist.get_rank()].contiguous()


class Lm(nn.Module):
    def __init__(self, rows=VOCAB):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, rows, bias=False)

    def hidden(self, ids):
        return torch.tanh(self.body(self.embed(ids)))

    def forward(self, ids):
        return self.head(self.hidden(ids))


class ParallelLm(Lm):
    def forward(self, ids):
        h = self.hidden(ids)
        if WRONG:
            h = CopyToRegion.apply(h)
            h = h.transpose(0, 1).contiguous()
        else:
            h = h.transpose(0, 1).contiguous()
            h = CopyToRegion.apply(h)
        return GatherLogits.apply(self.head(h)).transpose(0, 1)


def twin():
    torch.manual_seed(521)
    return Lm()


def shard(name, value, rank, world):
    return value.chunk(world)[rank] if name == "head.weight" else value


def model(twin):
    net = ParallelLm(VOCAB // WORLD)
    state = {k: shard(k, v, dist.get_rank(), WORLD) for k, v in twin.state_dict().items()}
    net.load_state_dict(state)
    return net


def batch():
    g = torch.Generator().manual_seed(522)
    ids = torch.randint(0, VOCAB, (2, 6), generator=g)
    return ids[:, :-1], ids[:, 1:]


def loss(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


FAULT = {
    "parameter": ["embed.weight", "body.weight", "body.bias"],
    "kind": "missing sum over 2 ranks", "factor": None, "loss": "equal",
    "note": "the gradient that comes through the transposition is not contiguous: a copy of it is"
            " summed, and dropped",
    "place": ["dist.all_reduce(x.contiguous())", "h = CopyToRegion.apply(h)", "head", "reduce"],
    "report": "NovaSky-AI/SkyRL#1886",
}  # fmt: skip
