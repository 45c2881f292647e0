"""Cases of layers with parameters, and of training steps, beside hand-written ones,
torch.distributed and sequential torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from mpi4py import MPI
from torch.nn import functional as F

from benchmarks.harness.measure import After
from benchmarks.harness.sides import Rival
from benchmarks.harness.task import BY_HAND, DTENSOR, SEQUENTIAL
from benchmarks.layers import by_hand, gloo
from benchmarks.layers.cases import LAYER, STEP, Side, Sides, array, case, drawn, grid_of
from linop import REPLICATED, Partition, layers

Tensor = Any
Module = Any
FLOAT = 1e-4
"""Relative difference that is allowed between sums in different orders."""


def seeded(make: Callable[[], Any]) -> Any:
    """Result of `make`, with torch's generator at seed 0, so that parameters are equal."""
    torch.manual_seed(0)
    return make()


def side(comm: MPI.Intracomm, module: Any, x: Tensor, g: Tensor, **options: Any) -> Any:
    """A side: a module, differentiated with respect to its argument and its parameters."""
    parameters = [*module.parameters()]
    forward = partial(module, x)
    return Side(forward, x, g, tolerance=FLOAT, parameters=parameters, **options).rivals(comm)


def sequential(comm: MPI.Intracomm, make: Callable[[], Any], x: Tensor, g: Tensor) -> Any:
    """A side on rank 0 alone, with the whole tensor. The other ranks wait."""
    if comm.rank == 0:
        module, x = seeded(make), x.detach().requires_grad_()
        parameters = [*module.parameters()]
        return Side(partial(module, x), x, g, tolerance=None, parameters=parameters).rivals(comm)
    idle = Rival(lambda: None, None)
    waiting = Rival(After(comm, lambda: None, id), None)
    return {"forward": idle, "backward": waiting, "both": idle}


# Linear


class Parallel(torch.nn.Module):  # type: ignore[misc]
    """Megatron's linear layers by hand: kind ``C`` column-parallel, ``R`` row-parallel."""

    def __init__(self, comm: MPI.Intracomm, kind: str, whole: Module) -> None:
        super().__init__()
        self.comm, self.kind = comm, kind
        bias = whole.bias.detach()
        if kind == "C":
            bias = bias.chunk(comm.size)[comm.rank]
        block = whole.weight.detach().chunk(comm.size, int(kind == "R"))[comm.rank]
        self.weight = torch.nn.Parameter(block.clone(memory_format=torch.contiguous_format))
        self.bias = torch.nn.Parameter(bias.clone())

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "C":
            return F.linear(by_hand.Copied.apply(x, self.comm), self.weight, self.bias)
        return by_hand.Summed.apply(F.linear(x, self.weight), self.comm) + self.bias


class Grid(torch.nn.Module):  # type: ignore[misc]
    """The paper's linear layer (section 4) by hand: x in row 0 of the grid, y in column 0."""

    def __init__(
        self, comm: MPI.Intracomm, grid: tuple[int, int], whole: Module, batch: int
    ) -> None:
        super().__init__()
        self.batch = batch
        i, j = divmod(comm.rank, grid[1])
        self.column, self.row = comm.Split(j, i), comm.Split(i, j)
        block = whole.weight.detach().chunk(grid[0])[i].chunk(grid[1], 1)[j]
        self.weight = torch.nn.Parameter(block.clone(memory_format=torch.contiguous_format))
        bias = whole.bias.detach().chunk(grid[0])[i].clone()
        self.bias = torch.nn.Parameter(bias) if j == 0 else None

    def forward(self, x: Tensor) -> Tensor:
        shape = self.batch, self.weight.shape[1]
        x = by_hand.Broadcast.apply(x, self.column, shape)
        return by_hand.SumReduce.apply(F.linear(x, self.weight, self.bias), self.row)


_BATCH, _WIDE = 128, 1024


def _linear() -> Any:
    return torch.nn.Linear(_WIDE, _WIDE)


def linear(comm: MPI.Intracomm, kind: str, **options: Any) -> Any:
    """linop's tensor-parallel linear layer: ``C`` from a replicated tensor to blocks of features,
    ``R`` the reverse."""
    P = Partition((comm.size,))
    grid = (comm.size, 1) if kind == "C" else (1, comm.size)
    x_axes, y_axes = ([REPLICATED], [1]) if kind == "C" else ([1], [REPLICATED])
    return layers.Linear(P, P_W=Partition(grid), x_axes=x_axes, y_axes=y_axes, **options)


def _megatron(comm: MPI.Intracomm, kind: str, peers: bool) -> Sides:
    x, g = drawn((_BATCH, _WIDE), 1), drawn((_BATCH, _WIDE), 2)
    whole = x, g
    if kind == "C":
        g = g.chunk(comm.size, 1)[comm.rank].contiguous()
    else:
        x = x.chunk(comm.size, 1)[comm.rank].contiguous()
    x.requires_grad_()
    ours = seeded(lambda: linear(comm, kind, in_features=_WIDE, out_features=_WIDE))
    sides = {
        "linop": side(comm, ours, x, g),
        BY_HAND: side(comm, Parallel(comm, kind, seeded(_linear)), x, g),
        SEQUENTIAL: sequential(comm, _linear, *whole),
    }
    if peers:
        theirs = gloo.parallel(seeded(_linear), kind)
        sides[DTENSOR] = side(comm, theirs, x, g, finish=gloo.waited, value=gloo.array)
    return sides


@case("Linear 1024→1024, by columns", LAYER, (_BATCH * _WIDE * 4,))
def columns(comm: MPI.Intracomm, size: int, peers: bool) -> Sides:
    return _megatron(comm, "C", peers)


@case("Linear 1024→1024, by rows", LAYER, (_BATCH * _WIDE * 4,))
def rows(comm: MPI.Intracomm, size: int, peers: bool) -> Sides:
    return _megatron(comm, "R", peers)


@case("Linear 1024→1024 on a 2×2 grid", LAYER, (_BATCH * _WIDE * 4,), ranks=(4,))
def square_grid(comm: MPI.Intracomm, size: int, peers: bool) -> Sides:
    grid = 2, 2
    i, j = divmod(comm.rank, grid[1])
    x, g = drawn((_BATCH, _WIDE), 1), drawn((_BATCH, _WIDE), 2)
    mine = x.chunk(2, 1)[j].contiguous() if i == 0 else torch.zeros(_BATCH, 0)
    given = g.chunk(2, 1)[i].contiguous() if j == 0 else torch.zeros(_BATCH, 0)
    mine.requires_grad_()
    P_x, P_y = Partition((1, 2), [0, 1]), Partition((1, 2), [0, 2])
    ours = seeded(lambda: layers.Linear(P_x, _WIDE, _WIDE, P_y=P_y, P_W=Partition(grid)))
    return {
        "linop": side(comm, ours, mine, given),
        BY_HAND: side(comm, Grid(comm, grid, seeded(_linear), _BATCH), mine, given),
        SEQUENTIAL: sequential(comm, _linear, x, g),
    }


# Steps of training


def step(model: Module, x: Tensor, labels: Tensor, adam: bool = False) -> dict[str, Rival]:
    """A side: forward, backward and SGD, or Adam. Its result is the loss; 0 on workers without
    output."""
    kind: Any = torch.optim.Adam if adam else torch.optim.SGD
    # A worker may have no parameters.
    optimizer = kind([{"params": model.parameters()}], lr=0.001 if adam else 0.01)

    def run() -> Tensor:
        optimizer.zero_grad()
        y = model(x)
        result = F.cross_entropy(y, labels) if y.numel() else y.sum()
        result.backward()
        optimizer.step()
        return result

    return {"step": Rival(run, FLOAT, array)}


def step_alone(
    comm: MPI.Intracomm,
    make: Callable[[], Any],
    x: Tensor,
    labels: Tensor,
    adam: bool = False,
    rank: int = 0,
) -> dict[str, Rival]:
    """A side: a sequential step on one rank. The others wait."""
    if comm.rank != rank:
        return {"step": Rival(lambda: None, None)}
    return step(seeded(make), x, labels, adam)


def _mlp(comm: MPI.Intracomm, size: int, peers: bool, hidden: int) -> Sides:
    x, labels = drawn((_BATCH, 784), 1) / 9, torch.arange(_BATCH) % 10

    def sizes() -> tuple[Any, Any]:
        return torch.nn.Linear(784, hidden), torch.nn.Linear(hidden, 10)

    def make() -> Any:
        first, second = sizes()
        return torch.nn.Sequential(first, torch.nn.ReLU(), second)

    def ours() -> Any:
        first = linear(comm, "C", in_features=784, out_features=hidden)
        return torch.nn.Sequential(
            first, torch.nn.ReLU(), linear(comm, "R", in_features=hidden, out_features=10)
        )

    def hand() -> Any:
        first, second = sizes()
        return torch.nn.Sequential(
            Parallel(comm, "C", first), torch.nn.ReLU(), Parallel(comm, "R", second)
        )

    sides = {
        "linop": step(seeded(ours), x, labels),
        BY_HAND: step(seeded(hand), x, labels),
        SEQUENTIAL: step_alone(comm, make, x, labels),
    }
    if peers:
        theirs = gloo.parallel(seeded(make), {"0": "C", "2": "R"})
        sides[DTENSOR] = step(theirs, x, labels)
    return sides


for _hidden in (128, 512, 4096):
    case(f"MLP 784-{_hidden}-10, batch {_BATCH}, SGD", STEP, (_BATCH * 784 * 4,))(
        partial(_mlp, hidden=_hidden)
    )


# Convolutions, split over space


class HandConv(torch.nn.Module):  # type: ignore[misc]
    """Convolution of a block with its halos by hand; parameters are replicated on all ranks."""

    def __init__(self, comm: MPI.Intracomm, near: by_hand.Neighbours, whole: Module) -> None:
        super().__init__()
        self.comm, self.near, self.whole = comm, near, whole
        pads = whole.padding
        grid = grid_of(comm.size)
        self.padding = tuple(0 if n > 1 else pad for n, pad in zip(grid, pads, strict=True))

    def forward(self, x: Tensor) -> Tensor:
        weight = by_hand.Copied.apply(self.whole.weight, self.comm)
        bias = by_hand.Copied.apply(self.whole.bias, self.comm)
        return F.conv2d(by_hand.Halo.apply(x, self.near), weight, bias, padding=self.padding)


def _conv(comm: MPI.Intracomm, shape: tuple[int, ...], out: int, k: int) -> Sides:
    n, channels, height, width = shape
    rows, cols = grid_of(comm.size)
    i, j = divmod(comm.rank, cols)
    x, g = drawn(shape, 1), drawn((n, out, height, width), 2)
    block = (slice(None), slice(None), _part(height, rows, i), _part(width, cols, j))
    mine, given = x[block].contiguous().requires_grad_(), g[block].contiguous()
    P = Partition((1, 1, rows, cols))
    make = partial(torch.nn.Conv2d, channels, out, k, padding=k // 2)
    ours = seeded(lambda: layers.Conv2d(P, channels, out, k, padding=k // 2))
    near = by_hand.Neighbours(comm, (rows, cols), mine.shape, (k // 2, k // 2), zeros=True)
    return {
        "linop": side(comm, ours, mine, given),
        BY_HAND: side(comm, HandConv(comm, near, seeded(make)), mine, given),
        SEQUENTIAL: sequential(comm, make, x, g),
    }


def _part(n: int, parts: int, k: int) -> slice:
    return slice(k * n // parts, (k + 1) * n // parts)


@case("Conv2d (8, 16, 128, 128), 3×3", LAYER, (8 * 16 * 128 * 128 * 4,))
def conv(comm: MPI.Intracomm, size: int, peers: bool) -> Sides:
    return _conv(comm, (8, 16, 128, 128), 16, 3)


@case("Conv2d (8, 3→64, 224, 224), 7×7", LAYER, (8 * 3 * 224 * 224 * 4,))
def conv_wide(comm: MPI.Intracomm, size: int, peers: bool) -> Sides:
    return _conv(comm, (8, 3, 224, 224), 64, 7)
