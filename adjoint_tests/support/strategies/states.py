"""States of parallel models: keys and values are the single-process model's; or torch's own
functions refuse, and name what gathers them."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from linop import layers
from linop.backends.engine.base import Backend
from linop.errors import LinopError
from linop.schedules import GENERATORS
from linop.strategies import (
    ColwiseParallel,
    DataParallel,
    Mesh,
    Pipeline,
    RowwiseParallel,
    checkpoint,
    full_state_dict,
    fully_shard,
    load_full_state_dict,
    offload,
    parallelize_module,
    split,
    unsharded,
)
from support.strategies.pipelines.pipelines import fill, squares, values

Tensor = Any
WIDTH = 4
WRAPPERS = (
    "data parallel",
    "shards",
    "tensor parallel",
    "checkpoints",
    "offloads",
    "host memory",
)

COMPOSITIONS = [
    ["data parallel"],
    ["shards"],
    ["tensor parallel"],
    ["checkpoints"],
    ["offloads"],
    ["host memory"],
    ["tensor parallel", "shards"],
    ["shards", "data parallel"],
    ["tensor parallel", "data parallel"],
    ["tensor parallel", "shards", "data parallel"],
    ["shards", "checkpoints"],
    ["checkpoints", "data parallel"],
    ["offloads", "data parallel"],
    ["host memory", "data parallel"],
]
"""Strategies from the inside out."""
EXTENTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 1, 2)]
"""Of the axes ep, dp and tp."""


class Block(torch.nn.Module):  # type: ignore[misc]  # torch is not typed here
    """A module with all kinds of tensors: tied ones, buffers in the state and others, a parameter
    that nobody uses."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, 6), torch.nn.Linear(6, WIDTH)
        self.spare = torch.nn.Parameter(torch.empty(3))
        self.scale = torch.nn.Parameter(torch.empty(WIDTH))
        self.register_buffer("count", torch.tensor([seed, 7]))
        self.register_buffer("shift", torch.arange(float(WIDTH)), persistent=False)
        self.norm = torch.nn.BatchNorm1d(WIDTH)
        self.again = self.norm
        self.double()
        fill(self, seed)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.tanh(self.up(x))) + self.shift
        return self.again(y * self.scale)

    def scaled(self, x: Tensor) -> Tensor:
        """A method that forward does not call."""
        return x * self.scale


def model(seed: int, blocks: int) -> Any:
    return torch.nn.Sequential(*(Block(seed + k) for k in range(blocks)))


def wrapped(net: Any, names: Sequence[str], mesh: Mesh) -> Any:
    """The model in strategies, from the inside out."""
    for name in names:
        if name == "tensor parallel":
            plan = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}
            net = parallelize_module(net, mesh["tp"], plan)
        elif name == "shards":
            for block in net:
                fully_shard(block, mesh["dp"])
        elif name == "data parallel":
            net = DataParallel(net, mesh["ep"])
        elif name == "checkpoints":
            net = checkpoint(net)
        elif name == "offloads":
            net = offload(net)
        elif name == "host memory":
            net = offload(net, parameters=True)
    return net


def is_the_models(
    backend: Backend, names: Sequence[str], seed: int, extents: dict[str, int], folder: str
) -> None:
    """States of compositions, both ways, by linop's functions and by torch's."""
    mesh = Mesh(backend, **extents)
    twin, other = model(seed, 2), model(seed + 5, 2)
    net = wrapped(model(seed, 2), names, mesh)
    cut = any(
        name in names and extents[axis] > 1
        for name, axis in (("tensor parallel", "tp"), ("shards", "dp"))
    )
    optimizer, alone = (torch.optim.Adam(one.parameters(), lr=0.1) for one in (net, twin))
    wanted = twin.state_dict()
    _same(layers.gather_state(net), wanted)
    if cut:
        _same(full_state_dict(net), wanted)
        load_full_state_dict(net, other.state_dict())
        _same(full_state_dict(net), other.state_dict())
    else:
        _same(net.state_dict(), wanted)
        net.load_state_dict(other.state_dict())
        _same(net.state_dict(), other.state_dict())
    for whole in (torch.nn.Sequential(net), net):
        if cut:
            _refuses("full_state_dict|gather_state", whole.state_dict)
            _refuses("load_full_state_dict|scatter_state", lambda m=whole: m.load_state_dict({}))
    layers.scatter_state(net, wanted)
    x = values(3, WIDTH, seed=seed)
    for one in (net, twin):
        squares(one(x), 0).backward()
    for step in (optimizer, alone):
        step.step()
    if cut:
        _refuses("gather_optimizer_state", optimizer.state_dict)
    else:
        assert optimizer.state_dict()["state"].keys() == alone.state_dict()["state"].keys()
    # Of blocks each group of copies writes a file.
    path = f"{folder}/{mesh['ep'].index if cut else 'all'}"
    layers.save(net, path)
    found = torch.load(path, weights_only=True)
    assert [*found] == [*wanted]
    fresh = wrapped(model(seed + 9, 2), names, mesh)
    layers.load(fresh, path)
    _same(layers.gather_state(fresh), found)
    _copies(net, names)


def _same(state: Any, wanted: Any) -> None:
    assert [*state] == [*wanted]
    for key, value in wanted.items():
        assert torch.equal(state[key], value), key


def _refuses(cure: str, call: Callable[[], Any]) -> None:
    with pytest.raises(LinopError, match=cure):
        call()


def _copies(net: Any, names: Sequence[str]) -> None:
    """Copies have the same state, or say why there are none."""
    try:
        made = copy.deepcopy(net)
    except LinopError as error:
        assert "cannot be copied" in str(error)
    else:
        _same(layers.gather_state(made), layers.gather_state(net))
    try:
        pickle.dumps(net)
    except LinopError as error:
        assert "pickled" in str(error)


def pipelines_have_the_models(backend: Backend, names: Sequence[str], seed: int, cut: bool) -> None:
    """States of pipelines of wrapped stages: those of the model that `split` cut, or of a
    Sequential of the stages."""
    whole = model(seed, 2)
    stages = split(copy.deepcopy(whole), ["1"]) if cut else [*copy.deepcopy(whole)]
    mesh = Mesh(backend, ep=1, pp=2)
    if "data parallel" in names:
        mine, axis = mesh["pp"].index, mesh["ep"]
        stages[mine] = DataParallel(stages[mine], axis)
    elif "checkpoints" in names and cut:
        stages = [checkpoint(stage) for stage in stages]
    tied = [["0.spare", "1.spare"]] if seed % 2 else []
    if tied:
        for one in (whole, *stages):
            for key, p in one.named_parameters():
                if key.endswith("spare"):
                    p.data.fill_(1)
    pipe = Pipeline(
        stages,
        GENERATORS["1f1b"](2, 2),
        squares,
        tied=tied,
        backend=backend,
        optimizer=partial(torch.optim.SGD, lr=0.1),
    )
    _same(pipe.state_dict(), whole.state_dict())
    other = model(seed + 5, 2).state_dict()
    pipe.load_state_dict(other)
    _same(pipe.state_dict(), other)
    pipe.step(values(4, WIDTH, seed=1), torch.zeros(4, WIDTH))


def shards_refuse(backend: Backend, seed: int, use: Callable[[Any, Tensor], Any]) -> None:
    """Uses of shards outside of forwards are refused, and right under `unsharded`."""
    net, twin = Block(seed), Block(seed)
    x = values(2, WIDTH, seed=seed)
    fully_shard(net, Mesh(backend, dp=-1)["dp"])
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            _refuses(r"with linop\.strategies\.unsharded\(module\)", lambda: use(net, x))
            with unsharded(net):
                assert torch.equal(use(net, x), use(twin, x))
    with unsharded(net):
        squares(use(net, x), 0).backward()
    squares(use(twin, x), 0).backward()
    for (name, p), q in zip(net.named_parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None and backend.workers:
            mine = torch.tensor_split(backend.workers * q.grad, backend.workers)[
                backend.worker or 0
            ]
            assert torch.allclose(p.grad, mine), name


def shards_are_read(backend: Backend, seed: int) -> None:
    """Reading shards, and changing them in place, goes on."""
    net, twin = Block(seed).eval(), Block(seed).eval()
    fully_shard(net, Mesh(backend, dp=-1)["dp"])
    for p in net.parameters():
        assert (p.grad, p.is_leaf, p.requires_grad) == (None, True, True)
        assert p.numel() == len(p.tolist()) * (p.numel() // max(len(p), 1))
        assert "Shard" in repr(p) or "tensor" in repr(p)
        assert p.tolist() == p.detach().clone().tolist()
        with torch.no_grad():
            p.copy_(2 * p.data)
            torch.nn.init.constant_(p, 1.0)
        p.data.fill_(0.5)
    for p in twin.parameters():
        p.data.fill_(0.5)
    mine, wanted = (
        torch.optim.AdamW(one.parameters(), lr=0.1, amsgrad=True) for one in (net, twin)
    )
    schedule = torch.optim.lr_scheduler.StepLR(mine, 1, 0.5)
    workers, x = backend.workers or 1, values(2, WIDTH, seed=seed)
    squares(net(x), 0).backward()
    (workers * squares(twin(x), 0)).backward()
    torch.nn.utils.clip_grad_value_(net.parameters(), 0.1)
    torch.nn.utils.clip_grad_value_(twin.parameters(), 0.1)
    layers.clip_grad_norm_(net, 0.5)
    torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
    mine.step()
    wanted.step()
    schedule.step()
    state, file = full_state_dict(net), io.BytesIO()
    torch.save(state, file)
    for key, value in twin.state_dict().items():
        assert torch.allclose(state[key].double(), value.double(), rtol=1e-12), key


def exported(seed: int) -> None:
    """Stages of a model that torch exports have together the keys of its state, and copies too."""
    net = Block(seed)
    net.alias = net.down.weight
    net.register_buffer("total", net.norm.running_mean)
    chain = _Chain(net, torch.nn.Linear(WIDTH, 2).double())
    stages = split(chain, ["last"], values(2, WIDTH, seed=1))
    for made in (stages, [copy.deepcopy(stage) for stage in stages]):
        keys = [key for stage in made for key in stage.state_dict()]
        assert sorted(keys) == sorted(chain.state_dict())
        for stage in made:
            for key, value in stage.state_dict().items():
                assert torch.equal(value, chain.state_dict()[key]), key


class _Chain(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, first: Any, last: Any) -> None:
        super().__init__()
        self.first, self.last = first, last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))
