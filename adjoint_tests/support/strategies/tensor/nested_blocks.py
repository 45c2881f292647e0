"""Modules that are tensor parallel over one axis of a mesh, and sharded or copied over another:
states and norms beside the twin's. Contracts for threads and ranks."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

import linop
import linop.layers
from linop import REPLICATED
from linop.backends.engine.base import Backend
from linop.errors import ArgumentError, BackendError, PartitionError
from linop.schedules import gpipe
from linop.strategies import (
    ColwiseParallel,
    DataParallel,
    Mesh,
    Pipeline,
    RowwiseParallel,
    ShardedOptimizer,
    full_state_dict,
    fully_shard,
    load_full_state_dict,
    parallelize_module,
)
from support.strategies.pipelines.pipelines import squares
from support.strategies.tensor.tensor_networks import (
    Case,
    LanguageModel,
    filled,
    layout_or_whole,
    plan,
    values,
)

Tensor = Any
ADAM = partial(torch.optim.AdamW, lr=2.0**-5)
SMALL = Case(width=4, blocks=1)


@dataclass(frozen=True)
class Nested:
    """A language model over ``Mesh(dp, tp)``.

    Args:
        stage: of ZeRO: 0, copies; 1, a sharded optimizer of copies; 2 and 3, shards.
    """

    dp: int = 2
    tp: int = 2
    stage: int = 3
    case: Case = SMALL

    def twin(self, seed: int = 0) -> Any:
        return filled(LanguageModel(self.case), seed)


class Trained:
    """The model and its optimizer, on a mesh."""

    def __init__(self, nested: Nested, mesh: Mesh, seed: int = 0) -> None:
        self.axis = mesh["dp"]
        net: Any = nested.twin(seed)
        tied = nested.case.tied
        styles = plan(nested.case, nested.tp)
        styles["head"] = ColwiseParallel(
            layout_or_whole(1 if nested.case.sequence else None), REPLICATED
        )
        self.net = parallelize_module(net, mesh["tp"], styles)
        self.called = self.net
        if nested.stage < 2:
            self.called = DataParallel(self.net, self.axis)
            made: Any = partial(ShardedOptimizer, self.called, self.axis)
            self.optimizer = made(ADAM) if nested.stage else ADAM(self.net.parameters())
            return
        for block in self.net.blocks:
            fully_shard(block, self.axis, reshard_after_forward=nested.stage == 3)
        fully_shard(self.net, self.axis, reshard_after_forward=nested.stage == 3)
        assert (self.net.head.weight is self.net.words.weight) == tied
        self.optimizer = ADAM(self.net.parameters())

    def backward(self, seed: int) -> Tensor:
        """Gradients of the loss of all rows."""
        x, target = batch(self.axis.size, seed)
        rows = slice(2 * self.axis.index, 2 * self.axis.index + 2)
        self.optimizer.zero_grad()
        squares(self.called(x[rows]), target[rows]).backward()

    def state(self, sharded: bool) -> Any:
        return full_state_dict(self.net) if sharded else linop.layers.gather_state(self.net)


def batch(copies: int, seed: int) -> tuple[Tensor, Tensor]:
    x = torch.arange(2 * copies * 5).mul(seed + 3).remainder(11).reshape(2 * copies, 5)
    return x, values(2 * copies, 5, 11, seed=seed)


def is_its_twin(backend: Backend, nested: Nested) -> None:
    """States of the model are the twin's bit for bit, norms and optimizers' states to rounding;
    they go to another model of the mesh, from one worker or all, and training goes on."""
    mesh = Mesh(backend, dp=nested.dp, tp=nested.tp)
    twin, mine = nested.twin(), Trained(nested, mesh)
    optimizer = ADAM(twin.parameters())
    sharded = nested.stage > 1
    whole = mine.state(sharded)
    assert [*whole] == [*twin.state_dict()]
    for key, tensor in twin.state_dict().items():
        assert torch.equal(whole[key], tensor), key
    x, target = batch(nested.dp, 1)
    squares(twin(x), target).backward()
    mine.backward(1)
    grads = [p.grad for p in twin.parameters()]
    for given in (mine.net, [*mine.net.parameters()]):
        for kind in (1.0, float("inf")):
            norm = linop.layers.clip_grad_norm_(given, float("inf"), kind)
            assert abs(norm / torch.nn.utils.get_total_norm(grads, kind) - 1) < 1e-12, kind
    wanted = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
    found = linop.layers.clip_grad_norm_(mine.net, 0.5)
    assert abs(found / wanted - 1) < 1e-12, (found, wanted)
    for one in (optimizer, mine.optimizer):
        one.step()
    goes_on(nested, mesh, mine, twin, optimizer)


class Normed(torch.nn.Module):
    """Parameters that all workers hold after a bias that one of them has."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(3, 5), torch.nn.Linear(5, 3)
        self.norm = torch.nn.LayerNorm(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.down(torch.relu(self.up(x))))


def one_unit(backend: Backend) -> None:
    """The state of tensor-parallel and other modules that one call has sharded is the twin's."""
    mesh, twin = Mesh(backend, dp=2, tp=2), filled(Normed(), 0)
    styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    net = parallelize_module(copy.deepcopy(twin), mesh["tp"], styles)
    whole = full_state_dict(fully_shard(net, mesh["dp"]))
    for key, tensor in twin.state_dict().items():
        assert torch.equal(whole[key], tensor), key


def goes_on(nested: Nested, mesh: Mesh, mine: Trained, twin: Any, optimizer: Any) -> None:
    """States after a step go to another model, which trains as the twin does."""
    sharded, backend = nested.stage > 1, mesh.backend
    for last in (True, False):
        state, other = mine.state(sharded), Trained(nested, mesh, 1)
        own = linop.layers.gather_optimizer_state(mine.net, mine.optimizer)
        load = load_full_state_dict if sharded else linop.layers.scatter_state
        # Copies are loaded by the tensor-parallel workers of each.
        group = backend if sharded else mesh["tp"].backend
        first = group.worker == (group.workers or 1) - 1
        load(other.net, state if not last or first else None)
        group = backend if nested.stage else group
        there = not last or group.worker == (group.workers or 1) - 1
        given = own if there else None
        linop.layers.scatter_optimizer_state(other.net, other.optimizer, given)
        for p, q in zip(mine.net.parameters(), other.net.parameters(), strict=True):
            assert torch.equal(p, q), last
    wanted = optimizer.state_dict()
    assert own["param_groups"][0]["params"] == wanted["param_groups"][0]["params"]
    for k, kept in wanted["state"].items():
        for name, value in kept.items():
            close(own["state"][k][name], value, f"{name} of {k}")
    for key, tensor in twin.state_dict().items():
        close(state[key], tensor, key)
    for one in (mine, other):
        one.backward(2)
        one.optimizer.step()
    for p, q in zip(mine.net.parameters(), other.net.parameters(), strict=True):
        assert torch.equal(p, q)


def close(one: Tensor, other: Tensor, about: str) -> None:
    assert one.shape == other.shape, about
    assert torch.allclose(one, other, rtol=1e-6, atol=1e-9), about


def saves(backend: Backend, folder: str, nested: Nested) -> None:
    """Write a file, a folder, and the state of the twin."""
    mesh = Mesh(backend, dp=nested.dp, tp=nested.tp)
    mine = Trained(nested, mesh)
    mine.backward(1)
    mine.optimizer.step()
    for sharded in (False, True):
        path = f"{folder}/{'folder' if sharded else 'file'}"
        linop.layers.save(mine.net, path, mine.optimizer, sharded=sharded)
    whole = mine.state(nested.stage > 1)
    if backend.worker == 0:
        torch.save(whole, f"{folder}/whole")


def loads(backend: Backend, folder: str, nested: Nested) -> None:
    """Load them on another mesh; then in one process."""
    mesh = Mesh(backend, dp=nested.dp, tp=nested.tp)
    whole = torch.load(f"{folder}/whole")
    states = []
    for name in ("file", "folder"):
        mine = Trained(nested, mesh, 1)
        linop.layers.load(mine.net, f"{folder}/{name}", mine.optimizer)
        for key, tensor in mine.state(nested.stage > 1).items():
            assert torch.equal(tensor, whole[key]), (name, key)
        states.append(linop.layers.gather_optimizer_state(mine.net, mine.optimizer))
    for k, kept in states[0]["state"].items():
        for name, value in kept.items():
            assert torch.equal(value, states[1]["state"][k][name]), name


def differs(backend: Backend) -> None:
    """A norm's shard, equal on all tensor-parallel workers, that is not: said on every worker."""
    nested = Nested()
    mine = Trained(nested, Mesh(backend, dp=2, tp=2))
    mine.backward(1)
    if backend.worker == 3:
        with torch.no_grad():
            mine.net.norm.weight.add_(1)
            mine.net.norm.weight.grad.add_(1)
    with pytest.raises(BackendError, match=r"'norm\.weight', .* differs between workers \d and \d"):
        linop.layers.gather_state(mine.net)
    with pytest.raises(BackendError, match=r"parameter 'norm\.weight', .* has norm"):
        linop.layers.clip_grad_norm_(mine.net, 1.0)
    if backend.worker == 2:
        mine.net.extra = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(BackendError, match="gather_state: worker"):
        linop.layers.gather_state(mine.net)


def pipelines_side_by_side(backend: Backend) -> None:
    """Two pipelines, whose stages are tensor parallel across them and sharded across others."""
    mesh = Mesh(backend, dp=2, tp=2, pp=2)
    case = Case(width=4, blocks=1)
    twin = torch.nn.Sequential(*(filled(LanguageModel(case).blocks[0], k) for k in range(2)))
    half = copy.deepcopy(twin[mesh["pp"].index])
    every = {
        name.removeprefix("blocks.*."): style
        for name, style in plan(case, 2).items()
        if name.startswith("blocks.*.")
    }
    stage = fully_shard(parallelize_module(half, mesh["tp"], every), mesh["dp"])
    stages: list[Any] = [None, None]
    stages[mesh["pp"].index] = stage
    model = Pipeline(stages, gpipe(2, 2), squares, backend=mesh["pp"].backend)
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, twin.state_dict()[key]), key
    x, target = values(8, 5, 4, seed=1), values(8, 5, 4, seed=2)
    rows = slice(4 * mesh["dp"].index, 4 * mesh["dp"].index + 4)
    model.step(x[rows], target[rows])
    squares(twin(x), target).backward()
    found = model.clip_grad_norm_(0.5)
    wanted = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
    assert abs(found / wanted - 1) < 1e-12
    other = {key: tensor + 1 for key, tensor in twin.state_dict().items()}
    model.load_state_dict(other)
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, other[key]), key


class Words(torch.nn.Module):
    """A vocabulary whose embedding is the projection, too, without a module for it."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner = torch.nn.Embedding(10, 6), torch.nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.words(x)) @ self.words.weight.T


def uses_a_cut_weight(backend: Backend) -> None:
    """A function of a cut weight is an error where that is sharded, or data parallel, as it is
    without."""
    mesh = Mesh(backend, dp=2, tp=2)
    for outer in (lambda net, _: net), DataParallel, fully_shard:
        with linop.layers.seeded(0):
            net = Words()
        net = parallelize_module(net, mesh["tp"], {"words": RowwiseParallel()})
        net = outer(net, mesh["dp"])
        with pytest.raises(PartitionError, match=r"whole on all workers .* and split along"):
            net(torch.arange(4))


class Renamed(torch.nn.Linear):
    """A linear layer by other words, as that of timm."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight, self.bias)


class Doubled(torch.nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Scaled(torch.nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.scale = torch.nn.Parameter(torch.ones(()))


def takes_subclasses(backend: Backend) -> None:
    """Subclasses of linear layers are cut where they compute the same, and refused elsewhere."""
    tp = Mesh(backend, tp=-1)["tp"]
    for kind in Renamed, Doubled, Scaled:
        with linop.layers.seeded(0):
            twin = torch.nn.Sequential(kind(3, 5), torch.nn.ReLU(), torch.nn.Linear(5, 2))
        cuts = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        if kind is Renamed:
            x = torch.arange(6.0).view(2, 3)
            net = parallelize_module(copy.deepcopy(twin), tp, cuts)
            assert torch.allclose(net(x), twin(x))
            continue
        with pytest.raises(ArgumentError, match=f"is a {kind.__name__}; .* computes something el"):
            parallelize_module(twin, tp, cuts)
