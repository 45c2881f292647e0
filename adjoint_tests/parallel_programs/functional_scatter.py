"""An output layer that is cut by its inputs: the terms of the ranks are summed and scattered over
features by a functional collective, and each rank goes on with its features."""

import os

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn

torch.set_default_dtype(torch.float64)
WORLD = 2
WRONG = os.environ.get("CASE", "right") == "wrong"
WIDTH, HIDDEN = 4, 6


class ToFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return funcol.wait_tensor(funcol.reduce_scatter_tensor(x, "sum", 1, dist.group.WORLD))

    @staticmethod
    def backward(ctx, grad):
        if WRONG:
            parts = [torch.zeros_like(grad) for _ in range(dist.get_world_size())]
            parts[dist.get_rank()] = grad
            return torch.cat(parts, 1)
        return funcol.wait_tensor(funcol.all_gather_tensor(grad.contiguous(), 1, dist.group.WORLD))


class Net(nn.Module):
    def __init__(self, hidden=HIDDEN, width=WIDTH):
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH, bias=False)
        self.gain = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x):
        return torch.tanh(self.down(F.silu(self.up(x)))) * self.gain


class ParallelNet(Net):
    def __init__(self):
        super().__init__(HIDDEN // WORLD, WIDTH // WORLD)

    def forward(self, x):
        return torch.tanh(ToFeatures.apply(self.down(F.silu(self.up(x))))) * self.gain


def twin():
    torch.manual_seed(541)
    return Net()


def shard(name, value, rank, world):
    dim = {"up.weight": 0, "up.bias": 0, "down.weight": 1, "gain": 0}[name]
    return value.chunk(world, dim)[rank]


def model(twin):
    net = ParallelNet()
    state = {k: shard(k, v, dist.get_rank(), WORLD) for k, v in twin.state_dict().items()}
    net.load_state_dict(state)
    return net


def batch():
    return tuple(torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(542)))


def mine(batch, rank, world):
    return batch[0], batch[1].chunk(world, 1)[rank]


def loss(output, target):
    return ((output - target) ** 2).sum() / 5


def step(net, mine):
    value = loss(net(mine[0]), mine[1])
    value.backward()
    return funcol.all_reduce(value.detach(), "sum", dist.group.WORLD)


FAULT = {
    "parameter": ["up.weight", "up.bias", "down.weight"],
    "kind": "other", "factor": None, "loss": "equal",
    "note": "the backward of the reduce-scatter keeps the rank's own features, where an all-gather"
            " has to bring those of the others",
    "place": ["ToFeatures"],
    "operator": ["adjoint of ToFeatures", "all-gather"],
    "report": None,
}  # fmt: skip
