"""Members of a ModuleList that compute again, or whose saved tensors are moved, are the plain ones,
bit for bit; they keep less, and stay the objects that they are."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import copy
import gc
import io
import weakref

import torch
from torch import nn

from linop.errors import ArgumentError
from linop.strategies import checkpoint, offload
from support.requirements import needs_mpi
from support.strategies.memory.listed_modules import (
    Layer,
    batch,
    gives_up_gathered,
    owner,
    results,
    saves_sharded,
)
from support.strategies.memory.saved_memory import Held
from support.workers import on_ranks, on_threads

HOW = {
    "checkpoint": checkpoint,
    "offload": offload,
    "ahead": lambda layers: offload(layers, prefetch=0),
    "both": lambda layers: offload(checkpoint(layers)),
    "parameters": lambda layers: offload(layers, parameters=True),
    "all": lambda layers: checkpoint(offload(layers, parameters=True)),
}


def same(found: list[Any], wanted: list[Any]) -> None:
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("drop", [0.0, 0.3])
@pytest.mark.parametrize("how", HOW)
def test_members_are_the_plain_ones(how: str, drop: float) -> None:
    net = owner(4, drop)
    twin = copy.deepcopy(net)
    keys, layers = list(net.state_dict()), list(net.layers)
    net.layers = HOW[how](net.layers)
    assert list(net.state_dict()) == keys
    assert all(one is other for one, other in zip(net.layers, layers, strict=True))
    for seed in (1, 2):
        same(results(net, batch(seed=seed)), results(twin, batch(seed=seed)))
    net.eval(), twin.eval()
    with torch.no_grad():
        assert torch.equal(net(batch()), twin(batch()))


def test_members_are_changed_in_place() -> None:
    net, twin = owner(3), owner(3)
    checkpoint(net.layers)
    assert [type(one) for one in net.layers] == [Layer] * 3
    same(results(net, batch()), results(twin, batch()))
    with Held(net) as held:
        y = net(batch())
    with Held(twin) as stored:
        z = twin(batch())
    assert held.bytes < stored.bytes / 2
    assert torch.equal(y, z)


@pytest.mark.parametrize("how", ["checkpoint", "offload", "both"])
def test_copies_and_pickles(how: str) -> None:
    net = owner(3)
    wanted = results(copy.deepcopy(net), batch())
    net.layers = HOW[how](net.layers)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    for other in copy.deepcopy(net), torch.load(file, weights_only=False):
        for layer, own in zip(other.layers, net.layers, strict=True):
            assert layer is not own
            assert layer.forward._module is layer
            assert layer.forward.again is own.forward.again
            assert layer.forward.series is not own.forward.series or how == "checkpoint"
        assert len({id(layer.forward.series) for layer in other.layers}) == 1
        same(results(other, batch()), wanted)
    same(results(net, batch()), wanted)


def test_copies_of_one_member() -> None:
    net = owner(2)
    net.layers = offload(checkpoint(net.layers))
    one = copy.deepcopy(net.layers[0])
    rotary = torch.ones(8, dtype=torch.float64), torch.zeros(8, dtype=torch.float64)
    y, _ = one(batch().requires_grad_(), rotary)
    y.sum().backward()
    assert one.up.weight.grad is not None
    assert net.layers[0].up.weight.grad is None


def test_bytes_that_are_moved() -> None:
    here, every = [], []
    for ahead in (0, 1, 3):
        net = owner(8)
        net.layers = offload(net.layers, prefetch=ahead)
        y = net(batch())
        window = net.layers.window
        here.append(window.bytes_here)
        every.append(window.bytes_here + window.bytes_away)
        y.sum().backward()
        del y
        gc.collect()
        assert window.bytes_away == window.bytes_here == 0
    assert 0 < here[0] < here[1] < here[2] < every[0] == every[1] == every[2]


def test_members_are_collected() -> None:
    net = owner(2)
    net.layers = offload(checkpoint(net.layers))
    results(net, batch())
    ref = weakref.ref(net.layers[0])
    del net
    gc.collect()
    assert ref() is None


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("away", [False, True])
def test_sharded_members(before: bool, away: bool) -> None:
    on_threads(2, saves_sharded, before, away)


@needs_mpi
def test_sharded_members_on_ranks() -> None:
    on_ranks(2, saves_sharded, True, False)


@pytest.mark.parametrize("workers", [1, 2])
def test_gathered_parameters_are_given_up(workers: int) -> None:
    on_threads(workers, gives_up_gathered)


def test_other_parameters() -> None:
    net, twin = owner(2), owner(2)
    net.layers = checkpoint(net.layers)
    others = {name: (p * 2).detach().requires_grad_() for name, p in net.named_parameters()}
    each = []
    for model in (net, twin):
        y = torch.func.functional_call(model, others, (batch(),))
        each.append(torch.autograd.grad(y.square().sum(), list(others.values())))
    same(list(each[0]), list(each[1]))


class DynamicCache:
    """As that of transformers."""


class Listed(nn.ModuleList):
    """With a method of its own."""


def test_refused() -> None:
    with pytest.raises(ArgumentError, match=r"every=2 of a ModuleList.*every=1 expected"):
        checkpoint(owner(2).layers, every=2)
    with pytest.raises(ArgumentError, match=r"Listed is a ModuleList with methods of its own"):
        checkpoint(Listed())
    with pytest.raises(ArgumentError, match=r"offload\(torch.nn.ModuleList\(\[module\]\)\)"):
        offload(nn.Linear(2, 2))

    class Caching(nn.Module):
        def forward(self, x: Any, past: Any = None) -> Any:
            return x

    (layer,) = checkpoint(nn.ModuleList([Caching()]))
    with pytest.raises(ArgumentError, match=r"called with a DynamicCache \('past'\).*use_cache="):
        layer(torch.ones(2), past=DynamicCache())
