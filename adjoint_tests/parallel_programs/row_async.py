"""Row parallel linear with sequence parallel output and overlapped communication, beside a
column parallel one: outputs are reduced and scattered, gradients gathered while the weights
multiply."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

torch.set_default_dtype(torch.float64)
WORLD = 2
WRONG = os.environ.get("CASE", "right") == "wrong"
WIDTH, HIDDEN, TOKENS = 4, 6, 8


class ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        whole = x.new_empty(WORLD * len(x), x.shape[1])
        dist.all_gather_into_tensor(whole, x)
        ctx.save_for_backward(whole, weight)
        return F.linear(whole, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        whole, weight = ctx.saved_tensors
        dx = grad @ weight
        work = dist.all_reduce(dx, async_op=True)
        dw, db = grad.T @ whole, grad.sum(0)
        work.wait()
        return dx.chunk(WORLD)[dist.get_rank()].contiguous(), dw, db


class RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, weight):
        ctx.save_for_backward(h, weight)
        dist.all_reduce(y := h @ weight.T)
        return y.chunk(WORLD)[dist.get_rank()].contiguous()

    @staticmethod
    def backward(ctx, grad):
        h, weight = ctx.saved_tensors
        grad = grad.contiguous()
        whole = grad.new_empty(WORLD * len(grad), grad.shape[1])
        work = dist.all_gather_into_tensor(whole, grad, async_op=True)
        own = grad @ weight
        work.wait()
        if WRONG:
            parts = [torch.empty_like(own) for _ in range(WORLD)]
            dist.all_gather(parts, own)
        else:
            parts = [g @ weight for g in whole.chunk(WORLD)]
            parts[dist.get_rank()] = own
        return torch.cat(parts), whole.T @ h


class Mlp(nn.Module):
    def __init__(self, hidden=HIDDEN):
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class ParallelMlp(Mlp):
    def forward(self, x):
        h = torch.tanh(ColumnLinear.apply(x, self.up.weight, self.up.bias))
        return RowLinear.apply(h, self.down.weight)


def twin():
    torch.manual_seed(671)
    return Mlp()


def shard(name, value, rank, world):
    return value.chunk(world, 1 if name == "down.weight" else 0)[rank]


def model(twin):
    net = ParallelMlp(HIDDEN // WORLD)
    rank, values = dist.get_rank(), twin.state_dict()
    net.load_state_dict({k: shard(k, v, rank, WORLD) for k, v in values.items()})
    return net


def batch():
    return tuple(torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(672)))


def mine(batch, rank, world):
    return tuple(v.chunk(world)[rank].contiguous() for v in batch)


loss = F.mse_loss


def step(model, mine):
    value = loss(model(mine[0]), mine[1]) / WORLD
    value.backward()
    dist.all_reduce(total := value.detach().clone())
    return total


FAULT = {
    "parameter": ["up.weight", "up.bias"],
    "kind": "other", "factor": None, "loss": "equal",
    "note": "the input gradient of the other ranks' tokens is taken from those ranks, which have "
            "other columns of the weight",
    "place": ["down", "dist.all_gather(parts, own)", "RowLinear"],
    "report": "huggingface/nanotron#46",
}  # fmt: skip
