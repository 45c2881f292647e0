"""Parts of parallel torch programs over mpi4py, right ones: a model, its twin, and how gradients
are summed. `steps` and `exchanges` have the programs, which import this file by its bare name."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import numpy as np
import torch
from mpi4py import MPI
from torch import nn

WRONG = os.environ.get("CASE", "right") == "wrong"

comm = MPI.COMM_WORLD

Function: Any = torch.autograd.Function


def summed(tensor: torch.Tensor, over: Any = comm) -> torch.Tensor:
    """The sum of the ranks' tensors."""
    mine = np.ascontiguousarray(tensor.detach().numpy())
    total = np.empty_like(mine)
    over.Allreduce(mine, total, op=MPI.SUM)
    return torch.from_numpy(total)


class Copy(Function):
    """A replicated tensor, used by each rank for a part of the model."""

    @staticmethod
    def forward(ctx: Any, x: Any, over: Any) -> Any:
        ctx.over = over
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return summed(grad, ctx.over), None


class Sum(Function):
    """The sum of terms, replicated."""

    @staticmethod
    def forward(ctx: Any, x: Any, over: Any) -> Any:
        return summed(x, over)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad, None


class Net(nn.Module):
    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.inp = nn.Linear(5, 6)
        self.fc1 = nn.Linear(6, hidden)
        self.fc2 = nn.Linear(hidden, 6, bias=False)
        self.out = nn.Linear(6, 3)

    def forward(self, x: Any) -> Any:
        return self.out(self.fc2(torch.relu(self.fc1(torch.tanh(self.inp(x))))))


class Family:
    """The parts that most programs share: a model of two ranks, cut as `CUT` says."""

    CUT: ClassVar[dict[str, int]] = {}
    net: Any = Net

    def twin(self) -> Any:
        torch.manual_seed(1)
        return Net()

    def parallel(self) -> Any:
        return self.net(8 // comm.size if self.CUT else 8)

    def model(self, twin: Any) -> Any:
        net = self.parallel()
        parts = {
            name: self.shard(name, value, comm.rank, comm.size).clone()
            for name, value in twin.state_dict().items()
        }
        net.load_state_dict(parts)
        return net

    def shard(self, name: str, value: Any, rank: int, world: int) -> Any:
        dim = self.CUT.get(name)
        return value if dim is None else value.chunk(world, dim)[rank]

    def batch(self) -> Any:
        g = torch.Generator().manual_seed(2)
        return torch.randn(4, 5, generator=g), torch.randn(4, 3, generator=g)

    def loss(self, output: Any, target: Any) -> Any:
        return ((output - target) ** 2).sum() / 12


TENSOR = {"fc1.weight": 0, "fc1.bias": 0, "fc2.weight": 1}


class DataParallel(Family):
    """Each rank has a part of the batch; gradients are summed after the pass."""

    net: Any = Net
    summed_before: tuple[str, ...] = ()

    def mine(self, batch: Any, rank: int, world: int) -> Any:
        return tuple(one.chunk(world)[rank] for one in batch)

    def step(self, net: Any, mine: Any) -> Any:
        x, t = mine
        value = self.loss(net(x), t)
        value.backward()
        for name, one in net.named_parameters():
            if name not in self.summed_before:
                comm.Allreduce(MPI.IN_PLACE, one.grad.numpy(), op=MPI.SUM)
        total = np.zeros(1)
        comm.Allreduce(np.array([value.item()]), total)
        return torch.tensor(total[0])
