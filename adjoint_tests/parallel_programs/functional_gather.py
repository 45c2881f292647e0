"""A feed-forward block between sequence parallel norms: tokens are gathered by a functional
collective, the hidden units are cut over the ranks, and the sums are scattered to tokens again."""

import os

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn

torch.set_default_dtype(torch.float64)
WORLD = 2
WRONG = os.environ.get("CASE", "right") == "wrong"
WIDTH, HIDDEN, TOKENS = 4, 6, 8


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return funcol.wait_tensor(funcol.all_gather_tensor(x, 0, dist.group.WORLD))

    @staticmethod
    def backward(ctx, grad):
        if WRONG:
            return grad.chunk(dist.get_world_size(), 0)[dist.get_rank()]
        return funcol.wait_tensor(funcol.reduce_scatter_tensor(grad, "sum", 0, dist.group.WORLD))


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return funcol.wait_tensor(funcol.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD))

    @staticmethod
    def backward(ctx, grad):
        return funcol.wait_tensor(funcol.all_gather_tensor(grad, 0, dist.group.WORLD))


class Block(nn.Module):
    def __init__(self, hidden=HIDDEN):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, hidden, bias=False)
        self.down = nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class ParallelBlock(Block):
    def __init__(self):
        super().__init__(HIDDEN // WORLD)

    def forward(self, x):
        h = Gather.apply(self.norm(x))
        return x + Scatter.apply(self.down(F.gelu(self.up(h))))


def twin():
    torch.manual_seed(501)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Block())


def shard(name, value, rank, world):
    dim = {"1.up.weight": 0, "1.down.weight": 1}.get(name)
    return value if dim is None else value.chunk(world, dim)[rank]


def model(twin):
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), ParallelBlock())
    state = {k: shard(k, v, dist.get_rank(), WORLD) for k, v in twin.state_dict().items()}
    net.load_state_dict(state)
    return net


def batch():
    return tuple(torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(502)))


def mine(batch, rank, world):
    return tuple(one.chunk(world, 0)[rank] for one in batch)


def loss(output, target):
    return ((output - target) ** 2).sum() / (TOKENS * WIDTH)


def step(net, mine):
    value = loss(net(mine[0]), mine[1])
    value.backward()
    for name, p in net.named_parameters():
        if not name.startswith(("1.up", "1.down")):  # each rank has the terms of its tokens
            dist.all_reduce(p.grad)
    dist.all_reduce(value := value.detach().clone())
    return value


FAULT = {
    "parameter": ["0.weight", "0.bias", "1.norm.weight", "1.norm.bias"],
    "kind": "other", "factor": None, "loss": "equal",
    "note": "the gathered tokens meet other hidden units on each rank, so the gradient is a"
            " reduce-scatter; each rank keeps its own term of its tokens",
    "place": ["Gather"],
    "operator": ["reduce-scatter"],
    "report": None,
}  # fmt: skip
