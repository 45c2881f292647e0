"""Complaints of users of other libraries, replayed: contracts for threads and ranks, beside those
of the strategies' own tests. Each has the name of the issue."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from linop import schedules
from linop.backends.engine.base import Backend
from linop.errors import ArgumentError, PartitionError
from linop.schedules import schedule_errors
from linop.strategies import (
    ColwiseParallel,
    DataParallel,
    Mesh,
    Reversible,
    RowwiseParallel,
    full_state_dict,
    fully_shard,
    parallelize_module,
)
from support.strategies.memory.saved_memory import layer, loss, pair, storing
from support.strategies.pipelines.pipelines import Case as Pipelined
from support.strategies.pipelines.pipelines import is_one_process
from support.strategies.tensor.tensor_networks import (
    MLP,
    Case,
    LanguageModel,
    equal,
    filled,
    plan,
    values,
)
from support.strategies.tensor.tensor_parallel import same_gradients

Tensor = Any
ROWS = 2, 3
"""Of the batches of two workers of the axis dp."""


def own_rows(axis: Any) -> slice:
    start = sum(ROWS[: axis.index])
    return slice(start, start + ROWS[axis.index])


def composed_axes(backend: Backend, strategy: str, reduction: str = "sum") -> None:
    """Megatron-LM #7452, torchtitan #1733 and #2972, DeepSpeed #7773 and #966: gradients that are
    wrong by a factor where parallelisms compose. On dp × tp of 2 × 2, with batches of 2 and 3 rows
    in two micro-batches, they are one process's: exactly, on whole numbers."""
    mesh = Mesh(backend, dp=2, tp=2)
    dp, tp = mesh["dp"], mesh["tp"]
    twin = filled(MLP(4, 6, "relu"), 0, whole=True)
    net = copy.deepcopy(twin)
    styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if strategy == "tensor":
        model = DataParallel(parallelize_module(net, tp, styles), dp, reduction=reduction)
    elif strategy == "shards":  # on tp, and copies of the shards on dp
        model = DataParallel(fully_shard(net, tp), dp, init_sync=False, reduction=reduction)
    whole, target = (values(5, 4, seed=s, whole=True) for s in (1, 2))
    (twin(whole) - target).square().sum().backward()
    x, t = (one[own_rows(dp)] for one in (whole, target))
    if strategy == "shards":  # the workers of tp have rows of their own, too
        x, t = (one.tensor_split(2)[tp.index] for one in (x, t))
    first, *last = x.tensor_split(2), t.tensor_split(2)
    with model.no_sync():
        (model(first[0]) - last[0][0]).square().sum().backward()
    (model(first[1]) - last[0][1]).square().sum().backward()
    if strategy == "tensor":
        same_gradients(net, twin, 0)
        return
    unit = net._linop_units[0]
    for member, p in zip(unit.members, net.parameters(), strict=True):
        wanted = dict(twin.named_parameters())[member.name].grad[member.space.slices(tp.index)]
        equal(member.name, p.grad, wanted, 0)


def tied_embeddings(backend: Backend) -> None:
    """Megatron-LM #844: gradients of tied embeddings are added in shards that do not match. A tied
    weight is one parameter, and so one shard; in two units it is refused."""
    case = Case(tied=True)
    twin = filled(LanguageModel(case), 0)
    net = fully_shard(copy.deepcopy(twin), axis := Mesh(backend, dp=-1)["dp"])
    assert net.head.weight is net.words.weight
    text = torch.randint(11, (4, 7), generator=torch.Generator().manual_seed(0))
    mine = text.tensor_split(axis.size)[axis.index]
    (net(mine) ** 2).sum().backward()
    (twin(text) ** 2).sum().backward()
    wanted = twin.words.weight.grad
    unit = net._linop_units[0]
    (space,) = (m.space for m in unit.members if m.name == "words.weight")
    equal("tied", net.words.weight.grad, wanted[space.slices(axis.index)])
    net.zero_grad()
    assert torch.equal(full_state_dict(net)["head.weight"], twin.words.weight)
    parts = copy.deepcopy(twin)
    fully_shard(parts.words, axis)
    with pytest.raises(ArgumentError, match="shared with this one: shard both in one call"):
        fully_shard(parts, axis)
    styles = plan(case) | {"head": RowwiseParallel()}
    with pytest.raises(PartitionError, match="would be cut in different ways"):
        parallelize_module(copy.deepcopy(twin), axis, styles)


def blocked_sends(backend: Backend) -> None:
    """pytorch #172668: two neighbours both send first. The checker names the circle; the pipeline
    has the slots that it asks for, so that the same table runs."""
    case = Pipelined("1f1b", 2, 4, width=200)
    table = schedules.with_messages(case.table)
    with pytest.raises(schedule_errors.ScheduleDeadlockError, match="0SEND_F1 waits"):
        schedules.check(table, sends="rendezvous")
    is_one_process(backend, case)


def dropout_in_a_reversible_block(backend: Backend) -> None:
    """memcnn #56: dropout that is drawn anew breaks the inversion. The generator's state is
    restored where the block is computed again, and left as it was."""
    net = filled(torch.nn.Sequential(*(Reversible(layer(0.4), layer(0.4)) for _ in range(3))), 0)
    twin = copy.deepcopy(net)
    found: list[Any] = []
    for model in (net, twin):
        torch.manual_seed(5)
        x = pair()
        y = net(x) if model is net else storing(twin, x)
        torch.rand(7)  # others draw between forward and backward
        loss(y).backward()
        found.append([*(one.grad for one in x), *(p.grad for p in model.parameters())])
        found[-1].append(torch.rand(1).double())
    for a, b in zip(*found, strict=True):
        equal("gradient", a, b, 1e-11)
