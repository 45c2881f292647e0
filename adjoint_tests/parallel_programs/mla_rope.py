"""Multi-head latent attention with heads cut over the ranks. Keys have a part for each head and
a position part that all heads share; the latent layer before both is replicated."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

torch.set_default_dtype(torch.float64)
WORLD = 2
WRONG = os.environ.get("CASE", "right") == "wrong"
WIDTH, HEADS, SIZE, PLACE, LATENT = 6, 4, 3, 2, 4


class F_(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        dist.all_reduce(grad := grad.clone())
        return grad


class G_(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        dist.all_reduce(x := x.clone())
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class LatentAttention(nn.Module):
    def __init__(self, heads=HEADS):
        super().__init__()
        self.heads = heads
        self.wq = nn.Linear(WIDTH, heads * (SIZE + PLACE), bias=False)
        self.wkv_a = nn.Linear(WIDTH, LATENT + PLACE, bias=False)
        self.kv_norm = nn.RMSNorm(LATENT)
        self.wkv_b = nn.Linear(LATENT, heads * 2 * SIZE, bias=False)
        self.wo = nn.Linear(heads * SIZE, WIDTH, bias=False)

    def enter(self, *parts):
        return parts

    def leave(self, y):
        return y

    def forward(self, x):
        latent, k_pe = self.wkv_a(x).split([LATENT, PLACE], -1)
        h, latent, k_pe = self.enter(x, self.kv_norm(latent), k_pe.sin())
        q = self.wq(h).unflatten(-1, (self.heads, SIZE + PLACE)).transpose(1, 2)
        kv = self.wkv_b(latent).unflatten(-1, (self.heads, 2 * SIZE)).transpose(1, 2)
        k, v = kv.chunk(2, -1)
        k_pe = k_pe.unsqueeze(1).expand(-1, self.heads, -1, -1)
        y = F.scaled_dot_product_attention(q, torch.cat([k, k_pe], -1), v)
        return self.leave(self.wo(y.transpose(1, 2).flatten(2)))


class ParallelLatentAttention(LatentAttention):
    def enter(self, x, latent, k_pe):
        return F_.apply(x), F_.apply(latent), k_pe if WRONG else F_.apply(k_pe)

    def leave(self, y):
        return G_.apply(y)


def twin():
    torch.manual_seed(661)
    return LatentAttention()


def shard(name, value, rank, world):
    dim = {"wq": 0, "wkv_b": 0, "wo": 1}.get(name.split(".")[0])
    return value if dim is None else value.chunk(world, dim)[rank]


def model(twin):
    net = ParallelLatentAttention(HEADS // WORLD)
    state = {k: shard(k, v, dist.get_rank(), WORLD) for k, v in twin.state_dict().items()}
    net.load_state_dict(state)
    return net


def batch():
    g = torch.Generator().manual_seed(662)
    return torch.randn(2, 4, WIDTH, generator=g), torch.randn(2, 4, WIDTH, generator=g)


loss = F.mse_loss


FAULT = {
    "parameter": ["wkv_a.weight"],
    "kind": "other", "factor": None, "loss": "equal", "accept": ["missing sum over 2 ranks"],
    "note": "the shared position part is expanded to the rank's heads, and its gradient is not "
            "summed over tp; the rows of wkv_a that make the latent part are right",
    "place": ["wkv_a", "k_pe if WRONG", "k_pe", "enter"],
    "report": "pytorch/torchtitan#1373",
}  # fmt: skip
