"""Strategies inside each other beside one process, and faults that `linop.strategies.check` is to
name: contracts for threads. Needs torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import linop
from linop import COPIES, TensorSpace
from linop.backends.engine.base import Backend
from linop.errors import ArgumentError, BackendError, LinopError
from linop.schedules import GENERATORS
from linop.strategies import (
    ColwiseParallel,
    DataParallel,
    GradientError,
    Mesh,
    Pipeline,
    Reversible,
    RowwiseParallel,
    check,
    checkpoint,
    fully_shard,
    offload,
    parallelize_module,
)
from support.strategies.pipelines.pipelines import squares
from support.strategies.tensor.tensor_networks import MLP, filled, values

Tensor = Any
WIDTH = 4
PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class Stored(nn.Module):  # type: ignore[misc]  # torch is not typed here
    """A reversible block that keeps what autograd saves."""

    def __init__(self, f: Any, g: Any) -> None:
        super().__init__()
        self.f, self.g = f, g

    def forward(self, pair: Any) -> Any:
        y1 = pair[0] + self.f(pair[1])
        return y1, pair[1] + self.g(y1)


class Halves(nn.Module):  # type: ignore[misc]
    """A tensor as a pair."""

    def forward(self, x: Tensor) -> Any:
        return x.chunk(2, -1)


class Whole(nn.Module):  # type: ignore[misc]
    """A pair as a tensor."""

    def forward(self, pair: Any) -> Tensor:
        return torch.cat(pair, -1)


@dataclass(frozen=True)
class Composition:
    """A net of stages, and strategies of it.

    Args:
        dp, tp, pp: extents of the mesh.
        micro: micro-batches.
        data: "copies", "shards" (ZeRO 3) or "gathered" (ZeRO 2) along dp.
        pairs: blocks are reversible.
        every: `checkpoint`'s; prefetch: `offload`'s; None: not used.
        away: `offload` moves "activations", "parameters" (shards, by `fully_shard`), or both.
        order: of the two: checkpoint first, or last.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    micro: int = 1
    data: str = "copies"
    pairs: bool = False
    every: int | None = None
    prefetch: int | None = None
    away: str = "activations"
    first: bool = True
    schedule: str = "1f1b"

    @property
    def workers(self) -> int:
        return self.dp * self.tp * self.pp

    def twin(self, block: Any = Stored) -> Any:
        """The sequential net."""
        return filled(nn.Sequential(*[self._stage(block) for _ in range(self.pp)]), 0)

    def _stage(self, block: Any) -> Any:
        if not self.pairs:
            return nn.Sequential(*[MLP(2 * WIDTH, 5) for _ in range(3)])
        pairs = [block(MLP(WIDTH, 5), MLP(WIDTH, 3)) for _ in range(2)]
        return nn.Sequential(Halves(), *pairs, Whole())

    def stage(self, mesh: Mesh, k: int) -> Any:
        """A stage, with all strategies but the pipeline."""
        net = self.twin(Reversible)[k]
        start = "*.*." if self.pairs else "*."
        if self.tp > 1:
            plan = {start + name: style for name, style in PLAN.items()}
            net = parallelize_module(net, mesh["tp"], plan)
        kept = [self._checkpointed, self._offloaded]
        for keep in kept if self.first else kept[::-1]:
            net = keep(net)
        if self.data == "copies":
            return net
        for block in net:
            # Backward of a reversible block calls f and g: they are what is gathered for.
            units = [block.f, block.g] if isinstance(block, Reversible) else [block]
            for module in units:
                if [*module.parameters()]:
                    fully_shard(
                        module,
                        mesh["dp"],
                        reshard_after_forward=self.data == "shards",
                        prefetch=self.prefetch or 0,
                        offload=self._moves("parameters"),
                    )
        return net

    def _moves(self, what: str) -> bool:
        return self.prefetch is not None and what in self.away

    def _checkpointed(self, net: Any) -> Any:
        return net if self.every is None else checkpoint(net, every=self.every)

    def _offloaded(self, net: Any) -> Any:
        # A reversible block calls f and g again in backward, not itself.
        parameters = self._moves("parameters") and self.data == "copies" and not self.pairs
        if not self._moves("activations") and not parameters:
            return net
        return offload(
            net,
            prefetch=self.prefetch or 0,
            activations=self._moves("activations"),
            parameters=parameters,
        )


def accumulated(model: Any, batch: Any, micro: int) -> Tensor:
    """Loss of micro-batches, of which the last one's backward sums the gradients."""
    pairs = [*zip(*(x.tensor_split(micro) for x in batch), strict=True)]
    total = 0.0
    for k, (x, target) in enumerate(pairs):
        waits = k < micro - 1 and isinstance(model, DataParallel)
        with model.no_sync() if waits else nullcontext():
            loss = squares(model(x), target)
            loss.backward()
        total = total + loss.detach()
    return total


def is_its_twin(backend: Backend, case: Composition) -> None:
    """`check` finds no difference: 1e-12 of the largest gradient."""
    mesh = Mesh(backend, dp=case.dp, tp=case.tp, pp=case.pp)
    twin = case.twin()
    rows = case.dp * (case.micro + 1) + 1  # workers of dp have different numbers of rows
    batch = tuple(values(rows, 2 * WIDTH, seed=s) for s in (1, 2))
    pp = mesh["pp"]
    stage = case.stage(mesh, pp.index)
    model: Any = stage if case.pp > 1 else nn.Sequential(stage)  # the twin's names
    if case.data == "copies":
        model = DataParallel(model, mesh["dp"])
    if case.pp == 1:
        found = check(model, twin, batch, step=partial(accumulated, micro=case.micro), mesh=mesh)
    else:
        stages: list[Any] = [None] * case.pp
        stages[pp.index] = model
        table = GENERATORS[case.schedule](case.pp, case.micro)
        model = Pipeline(stages, table, squares, backend=pp.backend)
        found = check(model, twin, batch, mesh=mesh)
    assert found <= 1e-12, found
    again = check(model, twin, batch, None if case.pp > 1 else squares, mesh=mesh)
    assert again <= 1e-12, again


# Faults


@dataclass(frozen=True)
class Fault:
    """A fault of a step, of one parameter or all.

    Args:
        kind: "mean" (no division by the number of workers), "again" (a sum that is made twice),
            "term" (no sum), or "one" (an element on one worker).
        axis: over which.
    """

    kind: str = "mean"
    axis: str = "dp"
    dp: int = 2
    tp: int = 3
    seed: int = 0


NAMES = {"dp": "0.up.weight", "tp": "1.weight"}
"""A parameter that is the same along an axis; the second, along both."""


def fault_is_named(backend: Backend, fault: Fault) -> None:
    """The error says which parameter, and which axis."""
    mesh = Mesh(backend, dp=fault.dp, tp=fault.tp)
    twin = filled(nn.Sequential(MLP(WIDTH, 7), nn.Linear(WIDTH, WIDTH)), fault.seed)
    plan = {f"0.{name}": style for name, style in PLAN.items()}
    net = parallelize_module(copy.deepcopy(twin), mesh["tp"], plan)
    model = DataParallel(net, mesh["dp"])
    rows = 2 * fault.dp
    batch = tuple(values(rows, WIDTH, seed=fault.seed + s) for s in (1, 2))
    assert check(model, twin, batch, squares) <= 1e-12
    axis, name = mesh[fault.axis], NAMES[fault.axis]
    p = dict(net.named_parameters())[name]
    own: list[Tensor] = []
    watched = p.register_hook(lambda gradient: own.append(gradient.clone()) and None)

    def step(one: Any, given: Any) -> Tensor:
        x, target = given
        loss = squares(one(x), target) / (len(x) * WIDTH if fault.kind == "mean" else 1)
        loss.backward()
        if one is not model:
            return None
        _spoil(fault, axis, p, own, backend)
        return None

    n, row = axis.size, fault.seed % 2
    if fault.axis == "dp":
        row += 7 - 7 // fault.tp if fault.tp > 1 else 0  # the last block's first
    words = {
        "mean": rf"check: all gradients are {n}\.000 × the twin's: .*summed over {fault.axis} of",
        "again": rf"all gradients of `{name}` are {n}\.000 × the twin's: .*summed over "
        rf"{fault.axis} of {n}",
        "term": rf"`{name}` are terms of the twin's, .* sum over {fault.axis} of {n}: not summed",
        "one": rf"`{name}` differ by up to .* at \({row}, 1\) on worker "
        rf"{backend.workers - 1} \(dp {fault.dp - 1}, tp {fault.tp - 1}\)",
    }
    with pytest.raises(GradientError, match=words[fault.kind]):
        check(model, twin, batch, step=step)
    watched.remove()
    assert check(model, twin, batch, squares) <= 1e-12
    backend.transport.gather_all(None)  # type: ignore[attr-defined]


def _spoil(fault: Fault, axis: Any, p: Tensor, own: list[Tensor], backend: Backend) -> None:
    if fault.kind == "again":
        X = TensorSpace(tuple(p.shape), axis.partition, axes=[COPIES])
        total = linop.all_reduce(X).compile(axis.backend)
        p.grad = torch.from_numpy(total(p.grad.numpy().copy()))
    elif fault.kind == "term":
        p.grad = own[-1] if fault.axis == "dp" else p.grad * _shares(axis)
    elif fault.kind == "one" and backend.worker == (backend.workers or 1) - 1:
        p.grad = p.grad.clone()
        p.grad[fault.seed % 2, 1] += 1


def _shares(axis: Any) -> float:
    """Different terms, whose sum is 1."""
    weights = [k + 1.0 for k in range(axis.size)]
    return weights[axis.index] / sum(weights)


def says_what_is_wrong(backend: Backend) -> None:
    """Bad input: the same error on every worker, which go on."""
    me = backend.worker
    mesh = Mesh(backend, dp=2)
    twin = filled(nn.Linear(3, 2), 0)
    model = DataParallel(copy.deepcopy(twin), mesh["dp"])
    x, t = values(4, 3, seed=1), values(4, 2, seed=2)

    def refused(
        match: str, work: Callable[[], Any], kind: type[LinopError] = ArgumentError
    ) -> None:
        with pytest.raises(kind, match=match):
            work()

    def given(one: Any, net: Any = twin, batch: Any = (x, t), **options: Any) -> Any:
        return lambda: check(one, net, batch, squares, **options)

    refused("on worker 1: a module or a Pipeline expected, given 3", given(3 if me else model))
    refused("twin: a torch.nn.Module expected, given None", given(model, None))
    refused("batch: a tensor, or several, expected; given 7", given(model, batch=7))
    refused("at least 2 rows expected, given shapes", given(model, batch=(x[:1], t[:1])))
    refused(r"data=\['tp'\]: some of the axes \['dp'\]", given(model, data=["tp"]))
    refused("mesh: a linop.strategies.Mesh expected, given 5", given(model, mesh=5))
    refused("workers 0 and 1 have different batches", given(model, batch=(x + float(me or 0), t)))
    refused("on worker 1: a module or", given(3 if me else model, mesh=mesh))
    refused(
        r"worker 1 gives \[\], worker 0 \['loss'\]; the same of loss=, step= and mesh=",
        lambda: check(model, twin, (x, t), None if me else squares),
    )
    refused("a loss with one element expected", lambda: check(model, twin, (x, t)[:1]))
    other = nn.Sequential(filled(nn.Linear(3, 2), 0))
    refused("the twin has no parameter 'weight', as the model has on worker 0", given(model, other))
    more = filled(nn.Linear(3, 2), 0)
    more.scale = nn.Parameter(torch.ones(1))
    refused("the model has no parameter 'scale', as the twin has, on any", given(model, more))
    refused(
        r"parameter 'weight': shape \(2, 3\); \(2, 4\) expected",
        given(model, filled(nn.Linear(4, 2), 0)),
    )
    refused("parameter 'weight' has other values than", given(model, filled(nn.Linear(3, 2), 1)))
    with torch.no_grad():
        model.module.weight[0, 0] += int(me == 1)
    refused("on worker 1: parameter 'weight' has other values", given(model))
    with torch.no_grad():
        model.module.weight.copy_(twin.weight)

    def diverges(one: Any, batch: Any) -> None:
        squares(one(batch[0]), batch[1]).backward()
        if one is model and me == 1:
            model.module.bias.grad[1] = float("nan")

    where = r"all gradients of `bias` are not finite on worker 1 \(dp 1\)"
    refused(where, lambda: check(model, twin, (x, t), step=diverges), GradientError)

    def forgets(one: Any, batch: Any) -> None:
        squares(one(batch[0]), batch[1]).backward()
        if one is model:
            model.module.bias.grad = None

    where = "all gradients of `bias` are absent, and the twin's are not zero"
    refused(where, lambda: check(model, twin, (x, t), step=forgets), GradientError)
    assert check(model, twin, (x, t), squares) <= 1e-12


def unlike_side_by_side(backend: Backend) -> None:
    """Pipelines whose stages are sharded across them: unequal rows are no matter; other schedules,
    unequal numbers of micro-batches, and errors of one, are said on all workers."""
    mesh = Mesh(backend, dp=2, pp=2)
    d, k = mesh["dp"].index, mesh["pp"].index

    def made(schedule: str, micro: int) -> Any:
        stages: list[Any] = [None, None]
        # The second stage is not sharded: its worker hears of it, too.
        stages[k] = filled(MLP(WIDTH, 5), k)
        if k == 0:
            fully_shard(stages[k], mesh["dp"])
        return Pipeline(stages, GENERATORS[schedule](2, micro), squares, backend=mesh["pp"].backend)

    # Micro-batches of one size, and of two: other numbers of probes.
    x, t = values(3 + d, WIDTH, seed=1), values(3 + d, WIDTH, seed=2)
    one = made("gpipe", 3)
    one.step(x, t)
    for other in (("gpipe", 3 + d), (["gpipe", "1f1b"][d], 3)):
        with pytest.raises(BackendError, match=r"parallel along 'dp', where 0 has .* one schedule"):
            made(*other)
    with pytest.raises(BackendError, match="1 has an evaluation of 2 micro-batches"):
        one(x[: 3 - d])
    with pytest.raises(LinopError, match="a batch of 2 rows cannot be split"):
        one.step(x if d else x[:2], t if d else t[:2])
    one.step(x, t)


def block_is_sharded(backend: Backend) -> None:
    """A reversible block whose parameters are gathered for its forward alone is refused."""
    block = Reversible(MLP(WIDTH, 5), MLP(WIDTH, 3))
    net = filled(nn.Sequential(Halves(), block, Whole()), 0)
    fully_shard(net[1], Mesh(backend, dp=-1)["dp"])
    loss = net(values(3, 2 * WIDTH, seed=1)).sum()
    with pytest.raises(BackendError, match="call fully_shard for f and g, which are called again"):
        loss.backward()
