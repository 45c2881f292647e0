"""Policy gradient on a vocabulary that is cut over the ranks: the log-probability of each chosen
token, from the ranks' parts of the logits, weighted by advantages."""

import os

import torch
import torch.distributed as dist
from torch import nn

torch.set_default_dtype(torch.float64)
WORLD = 2
WRONG = os.environ.get("CASE", "right") == "wrong"
VOCAB, WIDTH, TOKENS = 10, 4, 7


class ReduceForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        dist.all_reduce(x := x.clone())
        return x

    backward = staticmethod(lambda ctx, grad: grad)


class ReduceBackward(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x.view_as(x))

    @staticmethod
    def backward(ctx, grad):
        dist.all_reduce(grad := grad.clone())
        return grad


class Policy(nn.Module):
    def __init__(self, rows=VOCAB, cut=False):
        super().__init__()
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.logits = nn.Linear(WIDTH, rows, bias=False)
        self.cut = cut

    def forward(self, x):
        h = torch.relu(self.trunk(x))
        return self.logits(ReduceBackward.apply(h) if self.cut else h)


def twin():
    torch.manual_seed(551)
    return Policy()


def shard(name, value, rank, world):
    return value.chunk(world)[rank] if name == "logits.weight" else value


def model(twin):
    net = Policy(VOCAB // WORLD, cut=True)
    rank, values = dist.get_rank(), twin.state_dict()
    net.load_state_dict({k: shard(k, v, rank, WORLD) for k, v in values.items()})
    return net


def batch():
    g = torch.Generator().manual_seed(552)
    chosen = torch.randint(0, VOCAB, (TOKENS,), generator=g).double()
    advantage = torch.randn(TOKENS, generator=g)
    return torch.randn(TOKENS, WIDTH, generator=g), torch.stack([chosen, advantage])


def loss(logits, target):
    chosen, advantage = target
    logp = torch.log_softmax(logits, -1).gather(1, chosen.long()[:, None])[:, 0]
    return -(advantage * logp).mean()


def log_normaliser(logits):
    """log of the sum of exponentials over all ranks' parts."""
    local = torch.logsumexp(logits, -1)
    if WRONG:
        parts = [torch.empty_like(local) for _ in range(WORLD)]
        dist.all_gather(parts, local.detach())
        return torch.logsumexp(torch.stack(parts), 0)
    top = local.detach().clone()
    dist.all_reduce(top, op=dist.ReduceOp.MAX)
    return ReduceForward.apply((local - top).exp()).log() + top


def step(model, mine):
    x, (chosen, advantage) = mine
    logits = model(x)
    rows = logits.shape[1]
    local = chosen.long() - dist.get_rank() * rows
    owned = (local >= 0) & (local < rows)
    picked = logits.gather(1, local.clamp(0, rows - 1)[:, None])[:, 0].masked_fill(~owned, 0.0)
    logp = ReduceForward.apply(picked) - log_normaliser(logits)
    value = -(advantage * logp).mean()
    value.backward()
    return value.detach()


FAULT = {
    "parameter": ["trunk.weight", "trunk.bias", "logits.weight"],
    "kind": "other", "factor": None, "loss": "equal",
    "note": "the normaliser is gathered outside of autograd: tokens that the rank does not own "
            "get no gradient, and the softmax's share is missing everywhere",
    "place": ["dist.all_gather(parts, local.detach())", "log_normaliser", "logits"],
    "report": "modelscope/ms-swift#9947",
}  # fmt: skip
