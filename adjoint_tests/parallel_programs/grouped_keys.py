"""Grouped query attention on more ranks than key-value heads: queries are cut by heads, the one
key-value head is held by both ranks, and each uses its copy for its own queries."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

torch.set_default_dtype(torch.float64)
WORLD = 2
WRONG = os.environ.get("CASE", "right") == "wrong"
WIDTH, HEADS, SIZE = 6, 4, 3


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        dist.all_reduce(grad := grad.clone())
        return grad


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        dist.all_reduce(x := x.clone())
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Attention(nn.Module):
    def __init__(self, heads=HEADS):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(WIDTH)
        self.q_proj = nn.Linear(WIDTH, heads * SIZE, bias=False)
        self.k_proj = nn.Linear(WIDTH, SIZE, bias=False)
        self.v_proj = nn.Linear(WIDTH, SIZE, bias=False)
        self.o_proj = nn.Linear(heads * SIZE, WIDTH, bias=False)

    def attend(self, h):
        q = self.q_proj(h).unflatten(-1, (self.heads, SIZE)).transpose(-2, -3)
        k, v = self.k_proj(h).unsqueeze(-3), self.v_proj(h).unsqueeze(-3)
        p = torch.softmax(q @ k.transpose(-1, -2) / SIZE**0.5, -1)
        return self.o_proj((p @ v).transpose(-2, -3).flatten(-2))

    def forward(self, x):
        return x + self.attend(self.norm(x))


class ParallelAttention(Attention):
    def forward(self, x):
        return x + Leave.apply(self.attend(Enter.apply(self.norm(x))))


def twin():
    torch.manual_seed(651)
    return Attention()


def shard(name, value, rank, world):
    dim = {"q_proj.weight": 0, "o_proj.weight": 1}.get(name)
    return value if dim is None else value.chunk(world, dim)[rank]


def model(twin):
    net = ParallelAttention(HEADS // WORLD)
    state = {k: shard(k, v, dist.get_rank(), WORLD) for k, v in twin.state_dict().items()}
    net.load_state_dict(state)
    if not WRONG:
        for p in (net.k_proj.weight, net.v_proj.weight):
            p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
    return net


def batch():
    g = torch.Generator().manual_seed(652)
    return torch.randn(2, 5, WIDTH, generator=g), torch.randn(2, 5, WIDTH, generator=g)


loss = F.mse_loss


FAULT = {
    "parameter": ["k_proj.weight", "v_proj.weight"],
    "kind": "missing sum over 2 ranks", "factor": None, "loss": "equal",
    "note": "the copies of the key-value head serve different queries, and their gradients are "
            "not summed over the 2 ranks that hold it",
    "place": ["k_proj", "v_proj", "register_post_accumulate_grad_hook"],
    "report": "huggingface/transformers#47811",
}  # fmt: skip
