"""Data movement and layers in torch.distributed over gloo: those of its functions whose gradients
are right (`layers/run.py` lists the others)."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as nnf
from mpi4py import MPI
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from benchmarks.harness.measure import After
from benchmarks.harness.sides import Rival

Tensor = Any
PLACEMENTS = {"S0": Shard(0), "S1": Shard(1), "R": Replicate(), "P": Partial()}


@cache
def mesh() -> Any:
    """All ranks in a line."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


def broadcast(x: Tensor) -> Tensor:
    return nnf.broadcast(x, 0)


def reduce(x: Tensor) -> Tensor:
    return nnf.reduce(x, 0)


def all_reduce(x: Tensor) -> Tensor:
    return nnf.all_reduce(x)


def all_gather(x: Tensor) -> Tensor:
    return functional.all_gather_single(x, 0, dist.group.WORLD)


def reduce_scatter(x: Tensor) -> Tensor:
    return functional.reduce_scatter_single(x, "sum", 0, dist.group.WORLD)


def rows_to_columns(x: Tensor, ranks: int) -> Tensor:
    """Repartition of a matrix from blocks of rows to blocks of columns, packed by rank."""
    rows, columns = x.shape
    packed = x.view(rows, ranks, columns // ranks).transpose(0, 1).reshape(rows * ranks, -1)
    return functional.all_to_all_single_autograd(packed, None, None, dist.group.WORLD)


def waited(x: Tensor) -> Tensor:
    """A functional collective's result, once it is there."""
    if isinstance(x, functional.AsyncCollectiveTensor):
        x.wait()  # the returned tensor is not in the graph
    return x


def array(x: Tensor) -> Any:
    """The memory of a tensor, which may be a functional collective's result."""
    if isinstance(x, functional.AsyncCollectiveTensor):
        x = x.wait()
    return x.detach().numpy()


def redistributed(
    comm: MPI.Intracomm, x: Tensor, gradient: Tensor, source: str, target: str
) -> dict[str, Rival]:
    """Redistribution of a DTensor, from and to local blocks as in all other sides, by direction."""
    before, after = [PLACEMENTS[source]], [PLACEMENTS[target]]
    given = DTensor.from_local(x.detach().clone(), mesh(), before, run_check=False)
    given.requires_grad_()
    slope = DTensor.from_local(gradient, mesh(), after, run_check=False)

    def forward() -> Tensor:
        return _ready(given.redistribute(mesh(), after))

    def backward(y: Tensor) -> Tensor:
        return _ready(torch.autograd.grad(y, given, slope)[0])

    def value(y: Tensor) -> Any:
        return array(y.to_local())

    return {
        "forward": Rival(forward, value=value),
        "backward": Rival(After(comm, forward, backward), value=value),
        "both": Rival(lambda: backward(forward()), value=value),
    }


def _ready(y: Tensor) -> Tensor:
    waited(y._local_tensor)
    return y


def parallel(module: Any, plan: Any) -> Any:
    """A module made tensor-parallel: ``C`` by columns, ``R`` by rows; or submodules, by name."""
    styles = {"C": ColwiseParallel, "R": RowwiseParallel}
    if isinstance(plan, str):
        return parallelize_module(module, mesh(), styles[plan]())
    return parallelize_module(module, mesh(), {n: styles[s]() for n, s in plan.items()})
