"""ZeRO by hand: each rank keeps the rows of a flat parameter, gathers all for the forward pass,
and gets its rows of the summed gradient from a reduce-scatter in the backward pass."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

torch.set_default_dtype(torch.float64)
WORLD = 4
WRONG = os.environ.get("CASE", "right") == "wrong"
WIDTH = 4


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block):
        whole = block.new_empty(WORLD * len(block), *block.shape[1:])
        dist.all_gather_into_tensor(whole, block)
        return whole

    @staticmethod
    def backward(ctx, grad):
        """The ring of sums: what leaves a rank comes to it again, complete, on the last turn."""
        rank, blocks = dist.get_rank(), list(grad.chunk(WORLD))
        first = rank if WRONG else rank - 1
        total = blocks[first % WORLD].contiguous()
        for turn in range(1, WORLD):
            arrived = torch.empty_like(total)
            ops = [
                dist.P2POp(dist.isend, total, (rank + 1) % WORLD),
                dist.P2POp(dist.irecv, arrived, (rank - 1) % WORLD),
            ]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            total = arrived + blocks[(first - turn) % WORLD]
        return total


class Net(nn.Module):
    def __init__(self, rows=2 * WIDTH):
        super().__init__()
        self.wide = nn.Parameter(torch.randn(rows, WIDTH) / 2)
        self.narrow = nn.Parameter(torch.randn(rows, WIDTH) / 2)
        self.norm = nn.LayerNorm(WIDTH)

    def whole(self, block):
        return block

    def forward(self, x):
        h = torch.tanh(F.linear(self.norm(x), self.whole(self.wide)))
        return x + h @ self.whole(self.narrow)


class ZeroNet(Net):
    def whole(self, block):
        return Gathered.apply(block)


def twin():
    torch.manual_seed(761)
    return Net()


def shard(name, value, rank, world):
    return value if "norm" in name else value.chunk(world)[rank]


def model(twin):
    net = ZeroNet(2 * WIDTH // WORLD)
    state = {k: shard(k, v, dist.get_rank(), WORLD) for k, v in twin.state_dict().items()}
    net.load_state_dict(state)
    return net


def batch():
    return tuple(torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(762)))


def mine(batch, rank, world):
    return tuple(v.chunk(world)[rank] for v in batch)


loss = F.mse_loss


def step(model, mine):
    value = loss(model(mine[0]), mine[1]) / WORLD
    value.backward()
    for p in model.norm.parameters():
        dist.all_reduce(p.grad)
    dist.all_reduce(total := value.detach().clone())
    return total


FAULT = {
    "parameter": ["wide", "narrow"],
    "kind": "gradient of another shard", "factor": None, "loss": "equal",
    "note": "the ring of the reduce-scatter starts one block too late: rank r ends with the sum "
            "of block r + 1",
    "place": ["first = rank if WRONG", "Gathered", "whole"],
    "report": None,
}  # fmt: skip
