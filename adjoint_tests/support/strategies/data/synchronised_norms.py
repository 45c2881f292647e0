"""Norms over the rows of all workers, in stages of pipelines, in evaluation, and in copies that
torch alone calls: contracts for threads."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from linop import schedules
from linop.backends.engine.base import Backend
from linop.strategies import (
    DataParallel,
    Mesh,
    Pipeline,
    full_module,
    fully_shard,
    sync_batch_norm,
)
from support.strategies.pipelines.pipelines import squares, values
from support.strategies.tensor.tensor_networks import filled

Tensor = Any
STEPS = (8, 8), (8, 6), (2, 4), (8, 6)
"""Rows of the two replicas: one of them alone meets new shapes, and one has a row for each of two
micro-batches."""


def _stages() -> list[Any]:
    first = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    return [filled(first, 1), filled(nn.Linear(4, 2), 2)]


def are_in_stages(backend: Backend, name: str) -> None:
    """Replicas of a pipeline with batches of other sizes: pairs of micro-batches are normalised
    together, and trained, as by one process. Four workers."""
    mesh = Mesh(backend, dp=2, pp=2)
    here = mesh["pp"].index
    x, t = values(16, 4, seed=1), values(16, 2, seed=2)
    mine = sync_batch_norm(_stages()[here], mesh["dp"])
    net = DataParallel(mine, mesh["dp"], reduction="sum")
    stages = [net if s == here else None for s in range(2)]
    table = schedules.GENERATORS[name](2, 2)
    pipe = Pipeline(stages, table, squares, backend=mesh["pp"].backend)
    twin = nn.Sequential(*_stages())
    for rows in STEPS:
        net.zero_grad()
        twin.zero_grad()
        ends = rows[0], sum(rows)
        own = slice(0, ends[0]) if mesh["dp"].index == 0 else slice(*ends)
        pipe.step(x[own], t[own])
        parts = [x[: ends[0]].chunk(2), x[slice(*ends)].chunk(2)]
        targets = [t[: ends[0]].chunk(2), t[slice(*ends)].chunk(2)]
        for pair, wanted in zip(zip(*parts, strict=True), zip(*targets, strict=True), strict=True):
            squares(twin(torch.cat(pair)), torch.cat(wanted)).backward()
        for p, q in zip(mine.parameters(), twin[here].parameters(), strict=True):
            assert torch.allclose(p.grad, q.grad, rtol=1e-9, atol=1e-9)
    for key, value in twin[here].state_dict().items():
        assert torch.allclose(mine.state_dict()[key], value, rtol=1e-12), key


def have_buffers_in_stages(backend: Backend) -> None:
    """Replicas with norms of their own rows, whose buffers are broadcast. Four workers."""
    mesh = Mesh(backend, dp=2, pp=2)
    here = mesh["pp"].index
    x, t = values(16, 4, seed=1), values(16, 2, seed=2)
    net = DataParallel(_stages()[here], mesh["dp"], reduction="sum")
    stages = [net if s == here else None for s in range(2)]
    pipe = Pipeline(stages, schedules.gpipe(2, 2), squares, backend=mesh["pp"].backend)
    for rows in (8, 8), (8, 6), (6, 6):
        mine = rows[mesh["dp"].index]
        pipe.step(x[:mine], t[:mine])
    assert here or int(net.module[1].num_batches_tracked) == 6


def are_alone_in_evaluation(backend: Backend) -> None:
    """A norm without tracked statistics takes, in evaluation, those of a worker's own rows."""
    axis = Mesh(backend, dp=-1)["dp"]
    norm = sync_batch_norm(nn.BatchNorm1d(1, track_running_stats=False), axis).eval()
    if axis.index == 0:
        y = norm(torch.tensor([[0.0], [2.0]]))
        assert torch.allclose(y, torch.tensor([[-1.0], [1.0]]), atol=1e-4)


def are_torchs_in_copies(backend: Backend) -> None:
    """full_module has torch's norms, that one worker calls; nothing is left of removed hooks, whose
    numbers another program gives to its own."""
    axis = Mesh(backend, dp=-1)["dp"]
    net = sync_batch_norm(_stages()[0], axis)
    net.table = dict.fromkeys(range(10_000), "the user's")
    fully_shard(net[0], axis, reduction="sum", param_dtype=torch.float64)
    fully_shard(net, axis, reduction="sum")
    calls: list[Any] = []
    net.register_forward_pre_hook(
        lambda module, inputs, named: calls.append(named), with_kwargs=True
    )
    plain = full_module(net)
    assert type(plain[1]) is nn.SyncBatchNorm
    assert len(plain.table) == 10_000
    assert not [name for name, v in vars(plain[0]).items() if "_hooks" in name and v]
    net(values(4, 4, seed=1))
    before = len(calls)
    if axis.index == 0:
        assert plain(values(4, 4, seed=1)).shape == (4, 4)
        assert calls[before:] == [{}]


def train_alone(backend: Backend) -> None:
    """A norm of an axis of one worker, while torch.distributed has processes: that of torch."""
    x = values(4, 3, seed=1).float()
    net = DataParallel(nn.SyncBatchNorm(3), reduction="sum")
    assert torch.equal(net(x), nn.BatchNorm1d(3)(x))
