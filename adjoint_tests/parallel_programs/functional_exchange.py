"""Attention with cut sequences: an all-to-all of functional collectives gives each rank some heads
of all tokens, and another one its tokens of all heads again."""

import os

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn

torch.set_default_dtype(torch.float64)
WORLD = 2
WRONG = os.environ.get("CASE", "right") == "wrong"
TOKENS, HEADS, WIDTH = 6, 2, 3


def exchanged(x):
    return funcol.wait_tensor(funcol.all_to_all_single(x, None, None, dist.group.WORLD))


def to_heads(x):
    """Of tokens of all heads (t, H, w), all tokens of a rank's heads (T, h, w)."""
    t, heads, width = x.shape
    parts = x.reshape(t, WORLD, heads // WORLD, width).transpose(0, 1).contiguous()
    return exchanged(parts.flatten(0, 1))


def to_tokens(x):
    """Of all tokens of a rank's heads (T, h, w), tokens of all heads (t, H, w)."""
    tokens, heads, width = x.shape
    got = exchanged(x.contiguous()).reshape(WORLD, tokens // WORLD, heads, width)
    return got.transpose(0, 1).flatten(1, 2)


class ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return to_heads(x)

    @staticmethod
    def backward(ctx, grad):
        if WRONG:
            tokens, heads, width = grad.shape
            got = exchanged(grad.contiguous())
            return got.reshape(tokens // WORLD, heads * WORLD, width)
        return to_tokens(grad)


class ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return to_tokens(x)

    @staticmethod
    def backward(ctx, grad):
        return to_heads(grad)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(HEADS * WIDTH, HEADS * WIDTH) for _ in range(3))
        self.out = nn.Linear(HEADS * WIDTH, HEADS * WIDTH)

    def to_heads(self, x):
        return x

    def to_tokens(self, x):
        return x

    def forward(self, x):
        q, k, v = (self.to_heads(one(x).unflatten(1, (HEADS, WIDTH))) for one in self.qkv)
        scores = torch.einsum("thw,shw->hts", q, k) / WIDTH**0.5
        mixed = torch.einsum("hts,shw->thw", torch.softmax(scores, -1), v)
        return self.out(self.to_tokens(mixed).flatten(1))


class ParallelAttention(Attention):
    def to_heads(self, x):
        return ToHeads.apply(x)

    def to_tokens(self, x):
        return ToTokens.apply(x)


def twin():
    torch.manual_seed(551)
    return Attention()


def model(twin):
    net = ParallelAttention()
    net.load_state_dict(twin.state_dict())
    return net


def batch():
    g = torch.Generator().manual_seed(552)
    return tuple(torch.randn(2, TOKENS, HEADS * WIDTH, generator=g))


def mine(batch, rank, world):
    return tuple(one.chunk(world)[rank] for one in batch)


def loss(output, target):
    return ((output - target) ** 2).sum() / TOKENS


def step(net, mine):
    value = loss(net(mine[0]), mine[1])
    value.backward()
    for p in net.parameters():
        p.grad = funcol.all_reduce(p.grad, "sum", dist.group.WORLD)
    return funcol.all_reduce(value.detach(), "sum", dist.group.WORLD)


FAULT = {
    "parameter": ["qkv.0.weight", "qkv.1.weight", "qkv.2.weight",
                  "qkv.0.bias", "qkv.1.bias", "qkv.2.bias"],
    "kind": "other", "factor": None, "loss": "equal",
    "accept": ["gradient of another shard"],
    "note": "the backward all-to-all leaves the ranks' blocks in the order in which they come,"
            " where heads and tokens have to be transposed",
    "place": ["ToHeads"],
    "operator": ["adjoint of ToHeads"],
    "report": None,
}  # fmt: skip
