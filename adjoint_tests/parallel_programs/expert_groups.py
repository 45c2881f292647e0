"""Four ranks with two experts: each expert has a copy on two ranks, and tokens are exchanged
within pairs of ranks that hold both. Copies average their gradients after the backward pass."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

torch.set_default_dtype(torch.float64)
WORLD = 4
WRONG = os.environ.get("CASE", "right") == "wrong"
EXPERTS, WIDTH = 2, 3


def groups():
    """The pair that exchanges tokens (ranks 0 1, 2 3), and that of an expert's copies."""
    rank = dist.get_rank()
    exchange = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    copies = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    pair = exchange[rank // 2]
    return pair, exchange[rank // 2] if WRONG else copies[rank % 2]


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        dist.all_reduce(grad := grad.clone(), group=ctx.group)
        return grad.chunk(2)[dist.get_rank(ctx.group)], None


class ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        dist.all_reduce(x := x.clone(), group=group)
        return x.chunk(2)[dist.get_rank(group)].contiguous()

    @staticmethod
    def backward(ctx, grad):
        parts = [torch.empty_like(grad) for _ in range(2)]
        dist.all_gather(parts, grad.contiguous(), group=ctx.group)
        return torch.cat(parts), None


class Moe(nn.Module):
    def __init__(self, experts=EXPERTS, exchange=None):
        super().__init__()
        self.exchange = exchange
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.Parameter(torch.randn(experts, WIDTH, WIDTH))

    def forward(self, x):
        scores = torch.softmax(self.router(x), -1)
        if self.exchange is None:
            return torch.einsum("te,eio,ti->to", scores, self.experts, x)
        scores, x = (Gather.apply(v, self.exchange) for v in (scores, x))
        own = scores[:, dist.get_rank(self.exchange), None]
        return ReduceScatter.apply(own * (x @ self.experts[0]), self.exchange)


def twin():
    torch.manual_seed(951)
    return Moe()


def shard(name, value, rank, world):
    return value[rank % 2 :][:1] if name == "experts" else value


def model(twin):
    pair, copies = groups()
    net = Moe(1, pair)
    state = {k: shard(k, v, dist.get_rank(), WORLD) for k, v in twin.state_dict().items()}
    net.load_state_dict(state)
    net.copies = copies
    return net


def batch():
    return tuple(torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(952)))


def mine(batch, rank, world):
    return tuple(v.chunk(world)[rank] for v in batch)


loss = F.mse_loss


def step(model, mine):
    value = loss(model(mine[0]), mine[1]) / WORLD
    value.backward()
    dist.all_reduce(model.experts.grad, group=model.copies)
    for p in model.router.parameters():
        dist.all_reduce(p.grad)
    dist.all_reduce(total := value.detach().clone())
    return total


FAULT = {
    "parameter": ["experts"],
    "kind": "sum over the wrong group", "factor": None, "loss": "equal",
    "note": "the gradients of two different experts are added, over the pair that exchanges "
            "tokens, and not those of the copies of one",
    "place": ["experts", "exchange[rank // 2] if WRONG", "dist.all_reduce(model.experts.grad"],
    "report": "NVIDIA/Megatron-LM#5916",
}  # fmt: skip
