"""States of sharded models and of their optimizers, as those of one process, and on disk."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

import linop.layers
from linop.backends.engine.base import Backend
from linop.strategies import (
    DataParallel,
    Mesh,
    ShardedOptimizer,
    full_state_dict,
    fully_shard,
    load_full_state_dict,
)
from support.strategies.data.replicas import Case, blocks, same
from support.strategies.pipelines.pipelines import squares, values

CASE = Case(whole=False)
ADAM = partial(torch.optim.AdamW, lr=2.0**-5)
STAGES = 1, 2, 3


class Trained:
    """A model under a stage of ZeRO, or whole (stage 0), with its optimizer.

    Args:
        seed: of its parameters.
    """

    def __init__(self, stage: int, seed: int) -> None:
        self.axis = Mesh(dp=-1)["dp"]
        self.net: Any = CASE.model(seed)
        self.called = self.net
        if stage == 1:
            self.called = DataParallel(self.net, self.axis)
            self.optimizer: Any = ShardedOptimizer(self.called, self.axis, ADAM)
            return
        if stage:
            fully_shard(self.net[0], self.axis, reshard_after_forward=stage == 3)
            fully_shard(self.net, self.axis, reshard_after_forward=stage == 3)
        self.optimizer = ADAM(self.net.parameters())
        self.whole = not stage

    def step(self, seed: int) -> None:
        x, t = (CASE.numbers(CASE.rows, n, seed=seed + n) for n in (5, 8))
        if self.called is self.net and self.whole:
            a, b = x, t
        else:
            a, b = (blocks(CASE, one, self.axis.size)[self.axis.index] for one in (x, t))
        self.optimizer.zero_grad()
        squares(self.called(a), b).backward()
        self.optimizer.step()


def is_like(mine: Any, whole: Any, of: list[str]) -> None:
    """States of optimizers are equal but for rounding.

    Args:
        of: names of the parameters, in order.
    """
    assert mine["param_groups"][0]["lr"] == whole["param_groups"][0]["lr"]
    assert mine["param_groups"][0]["params"] == [*range(len(of))]
    for k, name in enumerate(of):
        one, other = mine["state"].get(k, {}), whole["state"].get(k, {})
        assert one.keys() == other.keys(), name
        for what, value in one.items():
            assert value.shape == other[what].shape, (name, what)
            same(CASE, value, other[what], f"{what} of {name}")


def gives_plain_states(backend: Backend) -> None:
    """Optimizers' states are gathered as one process's, and loaded from it: training goes on."""
    twin = Trained(0, 0)
    twin.step(1)
    names = [name for name, p in twin.net.named_parameters() if p.requires_grad]
    for stage in STAGES:
        mine, next_ = Trained(stage, 0), Trained(stage, 1)
        mine.step(1)
        if stage == 1:
            state = mine.optimizer.state_dict()
        else:
            # The frozen parameter has a number, and no state.
            state = linop.layers.gather_optimizer_state(mine.net, mine.optimizer)
        every = names if stage == 1 else [name for name, _ in twin.net.named_parameters()]
        wanted = twin.optimizer.state_dict()
        if stage == 1:
            wanted = only_trained(twin, wanted)
        is_like(state, wanted, every)
        root = backend.worker == 0
        if stage == 1:
            next_.optimizer.load_state_dict(state if root else None)
            next_.net.load_state_dict(mine.net.state_dict())
        else:
            whole = full_state_dict(mine.net)
            load_full_state_dict(next_.net, whole if root else None)
            given = state if root else None
            linop.layers.scatter_optimizer_state(next_.net, next_.optimizer, given)
        for one in (mine, next_):
            one.step(7)
        for p, q in zip(mine.net.parameters(), next_.net.parameters(), strict=True):
            assert p.tolist() == q.tolist(), stage


def only_trained(twin: Trained, state: Any) -> Any:
    """An optimizer's state without frozen parameters, numbered again."""
    kept = [k for k, p in enumerate(twin.net.parameters()) if p.requires_grad]
    group = {**state["param_groups"][0], "params": [*range(len(kept))]}
    found = {n: state["state"][k] for n, k in enumerate(kept) if k in state["state"]}
    return {"state": found, "param_groups": [group]}


def saves(backend: Backend, folder: str, stages: Sequence[int] = STAGES) -> None:
    """Write a folder for each stage, and the state of one process after the same step."""
    twin = Trained(0, 0)
    twin.step(1)
    if backend.worker == 0:
        torch.save(twin.net.state_dict(), f"{folder}/twin")
    for stage in stages:
        mine = Trained(stage, 0)
        mine.step(1)
        linop.layers.save(mine.net, f"{folder}/{stage}", mine.optimizer, sharded=True)
    plain = Trained(3, 0)
    plain.step(1)
    linop.layers.save(plain.net, f"{folder}/plain", sharded=True)


def loads(backend: Backend, folder: str, stages: Sequence[int] = STAGES) -> None:
    """Load them on another number of workers; a further step is that of one process."""
    twin = Trained(0, 0)
    for seed in (1, 7):
        twin.step(seed)
    for stage in stages:
        mine = Trained(stage, 5)
        linop.layers.load(mine.net, f"{folder}/{stage}", mine.optimizer)
        mine.step(7)
        state = mine.net.state_dict() if stage == 1 else full_state_dict(mine.net)
        for key, tensor in twin.net.state_dict().items():
            same(CASE, state[key], tensor, f"{key}, stage {stage}")


def reads_as_torch(folder: str) -> None:
    """torch reads the folder of a sharded model into a plain state of one process."""
    import torch.distributed.checkpoint as dcp

    twin = torch.load(f"{folder}/twin")
    empty = {key: torch.zeros_like(tensor) for key, tensor in twin.items()}
    dcp.load(empty, checkpoint_id=f"{folder}/plain", no_dist=True)
    for key, tensor in twin.items():
        assert empty[key].shape == tensor.shape, key
        same(CASE, empty[key], tensor, key)


def clips_as_one(backend: Backend) -> None:
    """The norm of shards' gradients is that of all; torch's own, which is not, refuses. On a mesh
    of replicas it is counted once."""
    workers = backend.workers or 1
    mesh = Mesh(replicas=2, shards=-1) if workers % 2 == 0 else Mesh(replicas=1, shards=-1)
    axis, copies = mesh["shards"], mesh["replicas"]
    net, twin = CASE.model(), CASE.model()
    fully_shard(net, axis)
    hybrid = DataParallel(net, copies, init_sync=False)
    x, t = (CASE.numbers(CASE.rows, n, seed=n) for n in (5, 8))
    a, b = (blocks(CASE, one, workers)[backend.worker or 0] for one in (x, t))
    squares(hybrid(a), b).backward()
    squares(twin(x), t).backward()
    wanted = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
    same(CASE, linop.layers.clip_grad_norm_(net, 0.5), wanted, "norm")
    state = {name: p.grad for name, p in twin.named_parameters()}
    for name, p in net.named_parameters():
        if p.grad is not None and not p.ndim:
            same(CASE, p.grad, state[name], name)


def scales_as_one(backend: Backend) -> None:
    """A ShardedOptimizer takes what torch's does: a scaler, zeros for gradients, a closure."""
    mine, twin = Trained(1, 0), Trained(0, 0)
    scalers = [linop.layers.GradScaler(init_scale=8.0), torch.amp.GradScaler("cpu", init_scale=8.0)]
    x, t = (CASE.numbers(CASE.rows, n, seed=n) for n in (5, 8))
    a, b = (blocks(CASE, one, mine.axis.size)[mine.axis.index] for one in (x, t))
    clips = linop.layers.clip_grad_norm_, torch.nn.utils.clip_grad_norm_
    given = (mine, a, b), (twin, x, t)
    for (one, rows, targets), scaler, clip in zip(given, scalers, clips, strict=True):
        for _ in range(2):
            one.optimizer.zero_grad(set_to_none=False)
            scaler.scale(squares(one.called(rows), targets)).backward()
            scaler.unscale_(one.optimizer)
            clip(one.net.parameters() if one is twin else one.net, 0.5)
            scaler.step(one.optimizer)
            scaler.update()
        assert one.optimizer.step(partial(_gradients, one, rows, targets)).requires_grad
    for (name, p), q in zip(mine.net.named_parameters(), twin.net.parameters(), strict=True):
        same(CASE, p, q, name)


def _gradients(one: Trained, rows: Any, targets: Any) -> Any:
    one.optimizer.zero_grad()
    loss = squares(one.called(rows), targets)
    loss.backward()
    return loss


def fills_buffers_on_meta(backend: Backend) -> None:
    """Buffers of a model on the meta device get memory with the state."""
    axis = Mesh(dp=-1)["dp"]
    with torch.device("meta"):
        net = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.BatchNorm1d(6))
    fully_shard(net, axis)
    twin = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.BatchNorm1d(6))
    with torch.no_grad():
        for k, tensor in enumerate([*twin.parameters(), twin[1].running_mean]):
            tensor.copy_(values(*tensor.shape, seed=k))
    load_full_state_dict(net, twin.state_dict())
    x = values(4, 5, seed=9, dtype=torch.float32)
    assert torch.equal(net.eval()(x), twin.eval()(x))
