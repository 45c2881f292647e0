"""Sharded parameters beside copies and beside one process: contracts for threads and ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from linop.backends.engine.base import Backend
from linop.errors import ArgumentError, BackendError, LinopError, ShapeError
from linop.strategies import (
    DataParallel,
    Mesh,
    ShardedOptimizer,
    equal_batches,
    full_state_dict,
    fully_shard,
    load_full_state_dict,
)
from support.strategies.data.replicas import Case, blocks, same
from support.strategies.pipelines.pipelines import squares, values

Tensor = Any


def sharded(net: Any, axis: Any, stage: int) -> Any:
    """A module whose layers are units of their own, and which takes the rest."""
    fully_shard(net[0], axis, reshard_after_forward=stage == 3)
    return fully_shard(net, axis, reshard_after_forward=stage == 3)


def is_data_parallel(backend: Backend, case: Case, stage: int) -> None:
    """Gradients and parameters are, bit for bit, those of data parallel training; and one
    process's."""
    workers, me = backend.workers or 1, backend.worker or 0
    axis = Mesh(dp=-1)["dp"]
    twin, copies = case.model(), DataParallel(case.model(), axis)
    net = sharded(case.model(), axis, stage)
    own, whole_size = (sum(p.numel() for p in one.parameters()) for one in (net, twin))
    assert own < whole_size or workers == 1
    assert [n for n, _ in net.named_parameters()] == [n for n, _ in twin.named_parameters()]
    adam = partial(torch.optim.AdamW, lr=2.0**-6)
    made: Any = partial(torch.optim.SGD, lr=2.0**-6) if case.whole else adam
    all_ = [(one, made(one.parameters())) for one in (net, copies, twin)]
    first = DataParallel(case.model(), axis)
    all_.append((first, ShardedOptimizer(first, axis, made)))
    for step in range(case.steps):
        x, t = (case.numbers(case.rows, n, seed=10 + 2 * step + n) for n in (5, 8))
        a, b = (blocks(case, one, workers)[me] for one in (x, t))
        for one, optimizer in all_:
            optimizer.zero_grad()
            whole = one is twin
            loss = squares(one(x if whole else a), t if whole else b)
            loss.backward()
        rows = slice_of(net, axis)
        for name, p in net.named_parameters():
            for other, exact in ((copies.module, True), (twin, case.whole)):
                grad = dict(other.named_parameters())[name].grad
                mine = None if grad is None else rows(name, grad)
                same(case if not exact else Case(), p.grad, mine, f"{name}, stage {stage}")
        for _, optimizer in all_:
            optimizer.step()
    state = full_state_dict(net)
    assert state.keys() == twin.state_dict().keys()
    for key, tensor in copies.module.state_dict().items():
        assert torch.equal(state[key], tensor), key
    for key, tensor in twin.state_dict().items():
        same(case, state[key], tensor, key)
    for p, q in zip(first.parameters(), copies.parameters(), strict=True):
        assert torch.equal(p, q), "stage 1"
    load_full_state_dict(net, case.model().state_dict())
    with torch.no_grad():
        assert torch.equal(net(x), case.model()(x))


def slice_of(net: Any, axis: Any) -> Any:
    """Function of a parameter's name and whole value: this worker's rows."""
    spaces = {prefix + m.name: m.space for prefix, unit in units(net) for m in unit.members}

    def rows(name: str, whole: Tensor) -> Tensor:
        space = spaces[name]
        return whole.reshape(space.global_shape)[space.slices(axis.index)]

    return rows


def units(net: Any) -> Any:
    from linop.strategies.data.sharded.fully_shard import _units

    return _units(net)


def gives_memory_up(backend: Backend) -> None:
    """Whole parameters live while their module computes; at stage 2, until backward."""
    axis = Mesh(dp=-1)["dp"]
    for stage in (2, 3):
        net: Any = torch.nn.Sequential(*(torch.nn.Linear(8, 8).double() for _ in range(3)))
        for k, p in enumerate(net.parameters()):
            p.data = values(*p.shape, seed=k)
        seen: list[Any] = []
        for layer in net:
            fully_shard(layer, axis, reshard_after_forward=stage == 3)
            layer.register_forward_pre_hook(lambda m, _, to=seen: to.append(weak(m.weight)))
        y = net(values(4, 8, seed=1))
        alive = [pointer() for pointer in seen]
        # The input of the first layer has no gradient: its weight is not needed in backward.
        assert alive == [False, stage == 2, stage == 2], (stage, alive)
        assert all(layer.weight.shape[0] < 8 for layer in net) or axis.size == 1
        calls = [unit._bridge.plan.counters.calls for _, unit in units(net)]
        squares(y, 0).backward()
        more = [unit._bridge.plan.counters.calls for _, unit in units(net)]
        gathered = [b - a for a, b in zip(calls, more, strict=True)]
        assert gathered == ([0, 1, 1] if stage == 3 else [0, 0, 0]), gathered
        reduced = [unit._bridge.plan.H.counters.calls for _, unit in units(net)]
        assert reduced == [1, 1, 1], reduced


def weak(tensor: Tensor) -> Any:
    """Function that says if the memory of a tensor is alive."""
    from torch.multiprocessing.reductions import StorageWeakRef

    pointer = StorageWeakRef(tensor.untyped_storage())
    return lambda: not pointer.expired()


class Tied(torch.nn.Module):
    """An embedding whose weight is that of the last layer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(7, 4, dtype=torch.float64)
        self.head = torch.nn.Linear(4, 7, bias=False, dtype=torch.float64)
        self.head.weight = self.embedding.weight
        with torch.no_grad():
            self.head.weight.copy_(values(7, 4, seed=5))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x))


def ties_weights(backend: Backend) -> None:
    """A shared parameter is one shard, whose gradient is the sum of both uses."""
    axis = Mesh(dp=-1)["dp"]
    net, twin = fully_shard(Tied(), axis), Tied()
    assert net.head.weight is net.embedding.weight
    assert len([*net.parameters()]) == 1
    x = torch.arange(6).reshape(3, 2)
    for one in (net, twin):
        (one(x).square().sum() / (axis.size if one is net else 1)).backward()
    rows = slice_of(net, axis)("embedding.weight", twin.head.weight.grad)
    same(Case(whole=False), net.head.weight.grad, rows, "tied")
    alone = Tied()
    fully_shard(alone.embedding, axis)
    with pytest.raises(ArgumentError, match=r"'head\.weight' is in a module that is already shard"):
        fully_shard(alone, axis)


def is_built_on_meta(backend: Backend) -> None:
    """A model without memory is sharded, and gets its rows of a state."""
    axis = Mesh(dp=-1)["dp"]
    with torch.device("meta"):
        net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    for layer in net:
        fully_shard(layer, axis)
    assert all(
        p.device.type == "cpu" and torch.tensor(p.tolist()).isnan().all() for p in net.parameters()
    )
    twin = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    for k, p in enumerate(twin.parameters()):
        p.data = values(*p.shape, seed=k, dtype=torch.float32)
    load_full_state_dict(net, twin.state_dict())
    x = values(2, 5, seed=9, dtype=torch.float32)
    assert torch.equal(net(x), twin(x))


def says_what_is_wrong(backend: Backend) -> None:
    """Errors on every worker, which go on."""
    me, axis = backend.worker or 0, Mesh(dp=-1)["dp"]

    def refused(match: str, make: Any, kind: type[LinopError] = ArgumentError) -> None:
        with pytest.raises(kind, match=match):
            make()

    def linear(n: int = 3) -> Any:
        net = torch.nn.Linear(2, n, dtype=torch.float64)
        for k, p in enumerate(net.parameters()):
            p.data = values(*p.shape, seed=k)
        return net

    refused("axis: one of a linop.strategies.Mesh", lambda: fully_shard(linear(), "dp"))  # type: ignore[arg-type]
    refused("on worker 1: a torch", lambda: fully_shard(3 if me == 1 else linear(), axis))
    what = r"worker 1 has 'weight' of torch.float64 and shape \(4, 2\), worker 0"
    refused(what, lambda: fully_shard(linear(3 + (me == 1)), axis), BackendError)
    other = linear()
    other.weight.data += me
    refused("'weight' differ between", lambda: fully_shard(other, axis), BackendError)
    net = fully_shard(linear(), axis)
    refused("the module is sharded already", lambda: fully_shard(net, axis))
    refused("already shard", lambda: DataParallel(net, axis))
    copies = DataParallel(linear(), axis)
    refused("already data parallel", lambda: fully_shard(copies, axis))
    for kept in (net, DataParallel(linear(), axis, server=0)):
        refused("parameters expected whole", lambda: ShardedOptimizer(kept, axis, torch.optim.Adam))  # noqa: B023
    for made, words in ((None, "optimizer: a function"), (torch.optim.Adam, "axis: expected")):
        given = axis if made is None else "dp"
        refused(words, lambda: ShardedOptimizer(linear(), given, made))  # type: ignore[arg-type]  # noqa: B023
    refused("module: expected", lambda: ShardedOptimizer(5, axis, torch.optim.Adam))
    refused("offload: expected a bool", lambda: fully_shard(linear(), axis, offload="cpu"))  # type: ignore[arg-type]
    refused("expected a Module, given None", lambda: full_state_dict(None))
    refused("no sharded parameters", lambda: full_state_dict(linear()))
    state = linear(4).state_dict()
    what = r"'weight' has shape \(4, 2\) in the state; \(3, 2\) expected"
    refused(what, lambda: load_full_state_dict(net, state), ShapeError)
    refused("missing \\[.weight", lambda: load_full_state_dict(net, {}))
    first, second = linear(), linear(2)
    both: Any = torch.nn.Sequential(second, first)
    for layer in both:
        fully_shard(layer, axis)
    x = torch.ones(1, 2, dtype=torch.float64)
    loss = both(x).sum()
    with torch.no_grad():
        first.weight.add_(1)
    refused("changed between forward and backward", loss.backward)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        net(torch.ones(1, 9, dtype=torch.float64))
    assert net.weight.numel() < 6 or axis.size == 1  # the shard again


def counts_batches(backend: Backend) -> None:
    """Unequal numbers of batches are an error on all workers before the step, or end for all."""
    axis, me = Mesh(dp=-1)["dp"], backend.worker or 0
    made = [values(2, 3, seed=k) for k in range(2 + (me == 0))]
    seen = []
    with pytest.raises(BackendError, match=r"workers \[1.*\] of 'dp' have 2 batches, others more"):
        for batch in equal_batches(made, axis):
            seen.append(batch)
    assert len(seen) == 2
    assert len([*equal_batches(made, axis, drop_last=True)]) == 2
    assert [*equal_batches(iter(made[:2]), axis)] == made[:2]
    with pytest.raises(BackendError, match="worker 1 has drop_last=False, worker 0 drop_last=True"):
        [*equal_batches(made, axis, drop_last=me == 0)]
    with pytest.raises(
        ArgumentError, match="on worker 1: an iterable of batches expected, given 5"
    ):
        [*equal_batches(5 if me == 1 else made, axis)]  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="equal_batches: axis"):
        [*equal_batches(made, "dp")]  # type: ignore[arg-type]


def composes_on_a_mesh(backend: Backend) -> None:
    """Sharded over one axis in each group of another, whose gradients are then added: hybrid
    shards. Each may be over one worker."""
    workers = backend.workers or 1
    mesh = Mesh(replicas=2 if workers == 4 else 1, shards=-1)
    case = Case()
    x, t = case.numbers(case.rows, 5, seed=3), case.numbers(case.rows, 8, seed=4)
    a, b = (blocks(case, one, workers)[backend.worker or 0] for one in (x, t))
    net, twin = sharded(case.model(), mesh["shards"], 3), case.model()
    copies = DataParallel(net, mesh["replicas"], init_sync=False)
    squares(copies(a), b).backward()
    squares(twin(x), t).backward()
    rows = slice_of(net, mesh["shards"])
    for (name, p), q in zip(net.named_parameters(), twin.parameters(), strict=True):
        same(case, p.grad, None if q.grad is None else rows(name, q.grad), name)
