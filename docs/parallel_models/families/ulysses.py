"""Attention with the tokens split over ranks: an all-to-all splits the heads instead, and back."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

WORLD = 2
TOKENS, HEADS, SIZE = 6, 4, 3


def exchange(blocks):
    out = torch.empty_like(blocks := blocks.contiguous())
    dist.all_to_all_single(out, blocks)
    return out


def to_heads(x):  # [tokens of this rank, all heads] to [all tokens, heads of this rank]
    x = x.reshape(len(x), WORLD, HEADS // WORLD, SIZE).transpose(0, 1)
    return exchange(x).reshape(-1, HEADS // WORLD, SIZE)


def to_tokens(x):  # and back
    x = exchange(x.reshape(WORLD, -1, HEADS // WORLD, SIZE))
    return x.transpose(0, 1).reshape(-1, HEADS, SIZE)


# wrong
class WrongToHeads(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: to_heads(x))

    @staticmethod
    def backward(ctx, grad):  # an all-to-all, but the heads are not put side by side again
        return exchange(grad).reshape(-1, HEADS, SIZE)


# right
class RightToHeads(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: to_heads(x))

    @staticmethod
    def backward(ctx, grad):
        return to_tokens(grad)


# end
ToHeads = WrongToHeads if os.environ.get("CASE") == "wrong" else RightToHeads


class ToTokens(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: to_tokens(x))
    backward = staticmethod(lambda ctx, grad: to_heads(grad))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (
            nn.Linear(5, HEADS * SIZE, bias=False) for _ in range(3)
        )
        self.out = nn.Linear(HEADS * SIZE, 5, bias=False)

    def attend(self, q, k, v):
        weights = torch.softmax(torch.einsum("ihd,jhd->hij", q, k) / SIZE**0.5, -1)
        return torch.einsum("hij,jhd->ihd", weights, v)

    def forward(self, x):
        q, k, v = (f(x).view(-1, HEADS, SIZE) for f in (self.query, self.key, self.value))
        return self.out(self.attend(q, k, v).flatten(1))


class Ulysses(Attention):
    def attend(self, q, k, v):
        q, k, v = (ToHeads.apply(one) for one in (q, k, v))
        return ToTokens.apply(super().attend(q, k, v))


def twin():
    torch.manual_seed(0)
    return Attention()


def model(twin):
    net = Ulysses()
    net.load_state_dict(twin.state_dict())
    return net


def batch():
    g = torch.Generator().manual_seed(1)
    return torch.randn(TOKENS, 5, generator=g), torch.randn(TOKENS, 5, generator=g)


def mine(batch, rank, world):
    return tuple(one.chunk(world)[rank] for one in batch)


loss = F.mse_loss


def step(model, mine):
    x, target = mine
    value = loss(model(x), target) / dist.get_world_size()
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    return value
