"""LeNet-5 on 2 and 4 ranks, with images on rank 0, beside sequential torch; on 4 ranks also beside
the same written by hand."""

from __future__ import annotations

import importlib.util
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI
from torch import nn
from torch.nn import functional as F

from benchmarks.harness.task import BY_HAND, SEQUENTIAL
from benchmarks.layers import by_hand
from benchmarks.layers.cases import STEP, Sides, case, drawn
from benchmarks.layers.training import Grid, seeded, step, step_alone
from linop import Partition, layers

Tensor = Any
EXAMPLE = Path(__file__).resolve().parents[2] / "examples/lenet5.py"
_BATCH = 256
BATCHES, ROWS = Partition((2, 1, 1, 1)), Partition((1, 1, 2, 1))
"""Images on 2 ranks: halves of the batch, or of each image."""


def example() -> Any:
    """The module of the example."""
    spec = importlib.util.spec_from_file_location("lenet5", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def on_two(image: Partition) -> nn.Module:
    """LeNet-5 on two workers, whose images are cut in halves, the batch or each image; the first
    linear layer, which is the largest, by its columns; the small ones, and the scores, on worker
    1, which does not scatter images.

    Args:
        image: the partition of images. By the batch both workers compute as much; by rows, worker
            1 has two rows of five after the last pool.
    """
    one = Partition((1, 1), [1])
    modules: dict[str, nn.Module] = {
        "scatter": layers.Repartition(Partition((1, 1, 1, 1)), image),
        "C1": layers.Conv2d(image, 1, 6, 5, padding=2),
        "C1_relu": nn.ReLU(),
        "S2": layers.MaxPool2d(image, 2),
        "C3": layers.Conv2d(image, 6, 16, 5),
        "C3_relu": nn.ReLU(),
        "S4": layers.MaxPool2d(image, 2),
        "transpose": layers.Repartition(image, Partition((1, 2, 1, 1))),
        "flatten": nn.Flatten(),
        "C5": layers.Linear(Partition((1, 2)), 400, 120, P_y=one, P_W=Partition((1, 2))),
        "C5_relu": nn.ReLU(),
        "F6": layers.Linear(one, 120, 84),
        "F6_relu": nn.ReLU(),
        "Output": layers.Linear(one, 84, 10),
    }
    return nn.Sequential(OrderedDict(modules))


# By hand, on a 2×2 grid of ranks


class Scatter(torch.autograd.Function):  # type: ignore[misc]
    """Quarters of the images of rank 0, which need no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: MPI.Intracomm) -> Tensor:
        y = torch.empty(_BATCH, 1, 14, 14)
        if comm.rank:
            comm.Recv(y.numpy(), 0)
            return y
        quarters = [q.contiguous() for half in x.chunk(2, 2) for q in half.chunk(2, 3)]
        MPI.Request.Waitall([comm.Isend(q.numpy(), k) for k, q in enumerate(quarters) if k])
        return quarters[0]


class Balanced(torch.autograd.Function):  # type: ignore[misc]
    """Blocks of 5 and 5 along a dimension become blocks of 6 and 4."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: MPI.Intracomm, dim: int, here: int, peer: int) -> Tensor:
        ctx.given = comm, dim, here, peer
        edge = x.narrow(dim, 0, 1)
        if here:
            comm.Send(edge.contiguous().numpy(), peer)
            return x.narrow(dim, 1, x.shape[dim] - 1).contiguous()
        received = torch.empty(edge.shape)
        comm.Recv(received.numpy(), peer)
        return torch.cat([x, received], dim)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        comm, dim, here, peer = ctx.given
        edge = g.narrow(dim, g.shape[dim] - 1, 1).contiguous()
        if here:
            comm.Recv(edge.numpy(), peer)
            g = torch.cat([edge, g], dim)
        else:
            comm.Send(edge.numpy(), peer)
            g = g.narrow(dim, 0, g.shape[dim] - 1).contiguous()
        return g, None, None, None, None


_HALVES = slice(0, 3), slice(3, 5)
_BOXES = [(rows, columns) for rows in _HALVES for columns in _HALVES]
"""The quarter of an image of each rank, after the last pool."""


def _exchanged(
    comm: MPI.Intracomm, sent: list[tuple[int, Tensor]], received: list[tuple[int, Tensor]]
) -> None:
    requests = [comm.Irecv(x.numpy(), k) for k, x in received]
    requests += [comm.Isend(x.numpy(), k) for k, x in sent]
    MPI.Request.Waitall(requests)


class ToChannels(torch.autograd.Function):  # type: ignore[misc]
    """Quarters of images on four ranks become halves of the channels on ranks 0 and 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: MPI.Intracomm) -> Tensor:
        ctx.comm, ctx.shape = comm, x.shape
        parts = [(k, half.contiguous()) for k, half in enumerate(x.chunk(2, 1))]
        if comm.rank > 1:
            _exchanged(comm, parts, [])
            return x.new_empty((_BATCH, 0))
        y = x.new_empty((_BATCH, 8, 5, 5))
        pieces = [(k, y[:, :, a, b].contiguous()) for k, (a, b) in enumerate(_BOXES)]
        _exchanged(comm, parts, pieces)
        for (_, piece), (a, b) in zip(pieces, _BOXES, strict=True):
            y[:, :, a, b] = piece
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        comm = ctx.comm
        shape = (_BATCH, 8, *ctx.shape[2:])
        received = [(k, g.new_empty(shape)) for k in range(2)]
        sent = []
        if comm.rank < 2:
            sent = [(k, g[:, :, a, b].contiguous()) for k, (a, b) in enumerate(_BOXES)]
        _exchanged(comm, sent, received)
        return torch.cat([x for _, x in received], 1), None


class Moved(torch.autograd.Function):  # type: ignore[misc]
    """The block of rank 2, of a given width, on another rank; blocks of rank 0 stay there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: MPI.Intracomm, target: int, width: int) -> Tensor:
        ctx.given = comm, target, x.shape
        if comm.rank == 2:
            comm.Send(x.contiguous().numpy(), target)
        if comm.rank != target:
            return x.clone() if comm.rank == 0 else x.new_empty((_BATCH, 0))
        y = x.new_empty((_BATCH, width))
        comm.Recv(y.numpy(), 2)
        return torch.cat([x, y], 1) if target == 0 else y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        comm, target, shape = ctx.given
        mine = g if comm.rank == 0 else g.new_zeros(shape)
        if comm.rank == target:
            mine, theirs = (g[:, : shape[1]], g[:, shape[1] :]) if target == 0 else (mine, g)
            comm.Send(theirs.contiguous().numpy(), 2)
        if comm.rank == 2:
            mine = g.new_empty(shape)
            comm.Recv(mine.numpy(), target)
        return mine, None, None, None


class Conv(nn.Module):  # type: ignore[misc]
    """Convolution of quarters with halos of two; parameters are on all ranks."""

    def __init__(self, comm: MPI.Intracomm, channels: int, side: int, whole: nn.Module) -> None:
        super().__init__()
        self.comm, self.whole, self.first = comm, whole, whole.padding[0] > 0
        shape = _BATCH, channels, side, side
        self.near = by_hand.Neighbours(comm, (2, 2), shape, (2, 2), zeros=self.first)

    def forward(self, x: Tensor) -> Tensor:
        weight = by_hand.Copied.apply(self.whole.weight, self.comm)
        bias = by_hand.Copied.apply(self.whole.bias, self.comm)
        return F.conv2d(by_hand.Halo.apply(x, self.near), weight, bias)


class ByHand(nn.Module):  # type: ignore[misc]
    """LeNet-5 as the example's on four workers."""

    def __init__(self, comm: MPI.Intracomm, whole: nn.Module) -> None:
        super().__init__()
        self.comm = comm
        self.C1, self.C3 = Conv(comm, 1, 14, whole.C1), Conv(comm, 6, 7, whole.C3)
        self.linear = nn.ModuleList(
            Grid(comm, (2, 2), one, _BATCH) for one in (whole.C5, whole.F6, whole.Output)
        )

    def forward(self, x: Tensor) -> Tensor:
        comm, (i, j) = self.comm, divmod(self.comm.rank, 2)
        x = F.max_pool2d(F.relu(self.C1(Scatter.apply(x, comm))), 2)
        x = F.relu(self.C3(x))
        for dim, here, peer in ((2, i, comm.rank ^ 2), (3, j, comm.rank ^ 1)):
            x = Balanced.apply(x, comm, dim, here, peer)
        x = ToChannels.apply(F.max_pool2d(x, 2), comm).flatten(1)
        x = F.relu(self.linear[0](x))
        x = F.relu(self.linear[1](Moved.apply(x, comm, 1, 60)))
        x = self.linear[2](Moved.apply(x, comm, 1, 42))
        return Moved.apply(x, comm, 0, 5)


def lenet(comm: MPI.Intracomm, size: int, peers: bool, halves: Partition = BATCHES) -> Sides:
    """A step with Adam.

    Args:
        halves: the partition of images on 2 ranks.
    """
    made = example()
    x, labels = drawn((_BATCH, 1, 28, 28), 1) / 9, torch.arange(_BATCH) % 10
    mine = x if comm.rank == 0 else x.flatten(1)[:, :0]
    ours = partial(on_two, halves) if comm.size == 2 else made.distributed
    sides = {"linop": step(seeded(ours), mine, labels, adam=True)}
    if comm.size == 4:
        hand = ByHand(comm, seeded(made.sequential))
        sides[BY_HAND] = step(hand, mine, labels, adam=True)
    scores = 1 if comm.size == 2 else 0  # the rank that has linop's, with which they are compared
    alone = step_alone(comm, made.sequential, x, labels, adam=True, rank=scores)
    sides[SEQUENTIAL] = alone
    return sides


if EXAMPLE.exists():
    _SIZES = (_BATCH * 28 * 28 * 4,)
    case(f"LeNet-5, batch {_BATCH}, Adam", STEP, _SIZES)(lenet)
    case(f"LeNet-5 by rows, batch {_BATCH}, Adam", STEP, _SIZES, (2,))(partial(lenet, halves=ROWS))
