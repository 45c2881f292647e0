"""Sequential modules made again of parallel ones: contracts. Needs torch.

Ranks import this module, and no test.
"""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

from linop import REPLICATED
from linop.backends import Backend
from linop.errors import ArgumentError
from linop.strategies import (
    AttentionParallel,
    ColwiseParallel,
    DataParallel,
    ExpertParallel,
    LocalAttributes,
    Mesh,
    PrepareModuleInput,
    RowwiseParallel,
    full_module,
    fully_shard,
    parallelize_module,
)
from support.strategies.expert_nets import Experts, net_of
from support.strategies.tensor.tensor_networks import Case, LanguageModel, filled, plan

WRAPS = "alone", "data parallel", "sharded"
"""Strategies that a tensor-parallel net is under."""


def loaded(module: Any) -> Any:
    """A module from a file that torch alone reads."""
    file = io.BytesIO()
    torch.save(module, file)
    assert b"linop" not in file.getvalue()
    file.seek(0)
    return torch.load(file, weights_only=False)


def are_the_same(found: Any, wanted: Any, *inputs: Any) -> None:
    """Classes, modes, states, which parameters are one or trained, and results are equal."""
    modules = [*wanted.named_modules()]
    assert [name for name, _ in found.named_modules()] == [name for name, _ in modules]
    for name, one in modules:
        other = found.get_submodule(name)
        assert type(other) is type(one) and other.training == one.training, name
    for kind in "named_parameters", "named_buffers":
        every = dict(getattr(wanted, kind)())
        others = dict(getattr(found, kind)())
        assert others.keys() == every.keys()
        for name, x in every.items():
            assert torch.equal(others[name], x), name
            assert others[name].requires_grad == x.requires_grad, name
    assert torch.equal(found(*inputs), wanted(*inputs))


def changed(net: Any) -> None:
    """Other values than the first ones, the same on all workers."""
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(2)


def of_language_models(backend: Backend, case: Case, wrap: str) -> None:
    """Tied, frozen, in evaluation, with a buffer that no state has."""
    workers = backend.workers or 1
    mesh = Mesh(backend, dp=2 if wrap != "alone" and workers % 2 == 0 else 1, tp=-1)
    twin = filled(LanguageModel(case), case.seed)
    twin.blocks[0].mlp.up.weight.requires_grad_(False)
    twin.register_buffer("unsaved", torch.ones(2), persistent=False)
    net: Any = parallelize_module(copy.deepcopy(twin), mesh["tp"], plan(case, mesh["tp"].size))
    net.unsaved.add_(1)
    if wrap == "data parallel":
        net = DataParallel(net, mesh["dp"], reduction="sum")
    elif wrap == "sharded":
        net = fully_shard(net, mesh["dp"])
    changed(net)
    changed(twin)
    twin.unsaved.add_(1)
    for module in (twin, net):
        module.eval()
    text = torch.arange(case.length)[None] % 5
    found = loaded(full_module(net))
    are_the_same(found, twin, text)
    if case.tied:
        assert found.head.weight is found.words.weight
    found(text).sum().backward()  # nothing is left of what was parallel
    net(text)


class Heads(nn.Module):  # type: ignore[misc]
    """It knows its number of heads, has a hook, and a block in which others are."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.q, self.o = 4, nn.Linear(6, 8), nn.Linear(8, 6)
        self.attention = nn.TransformerEncoderLayer(6, 3, 8, 0.0, batch_first=True)
        self.register_forward_hook(_twice)

    def forward(self, x: Any) -> Any:
        y = self.q(x).unflatten(-1, (self.heads, 2)).flatten(-2)
        return self.attention(self.o(y))


X = torch.arange(12.0, dtype=torch.double).view(1, 2, 6)


def _twice(module: Any, args: Any, result: Any) -> Any:
    return result * 2


def of_parts(backend: Backend, inside: bool) -> None:
    """A net that is made parallel in two steps, or a part of it, whose attributes and hooks are
    those of before."""
    axis = Mesh(backend, tp=-1)["tp"]
    twin = filled(Heads(), 0)
    net: Any = copy.deepcopy(twin)
    inner = {"linear1": ColwiseParallel(), "linear2": RowwiseParallel()}
    if axis.size <= 3:
        inner["self_attn"] = AttentionParallel()
    if inside:
        parallelize_module(net.attention, axis, inner)
    else:
        outer = {
            "": LocalAttributes("heads"),
            "q": ColwiseParallel(heads=4),
            "o": RowwiseParallel(),
        }
        every = {f"attention.{name}": style for name, style in inner.items()}
        net = parallelize_module(net, axis, {"": PrepareModuleInput(REPLICATED, REPLICATED)})
        are_the_same(loaded(full_module(net)), twin, X)
        parallelize_module(net, axis, outer | {"o": RowwiseParallel()} | every)
        assert net.heads == 4 // axis.size
    changed(net)
    changed(twin)
    found = loaded(full_module(net))
    assert found.heads == 4
    are_the_same(found, twin, X)


def of_experts(backend: Backend, case: Experts) -> None:
    mesh = Mesh(backend, dp=case.dp, ep=-1)
    twin = net_of(case)
    net: Any = ExpertParallel(mesh["ep"], mesh["dp"]).parallelize(net_of(case))
    net = DataParallel(net, mesh["dp", "ep"], reduction="sum")
    changed(net)
    changed(twin)
    x = torch.arange(6.0, dtype=torch.double).view(1, 2, 3)
    are_the_same(loaded(full_module(net)), twin, x)
    grid = Mesh(backend, tp=case.dp, ep=-1)
    cut = ExpertParallel(grid["ep"]).parallelize(net_of(case))
    routers = {"*.router": ColwiseParallel(output_layouts=REPLICATED)}
    parallelize_module(cut, grid["tp"], routers)
    are_the_same(loaded(full_module(cut)), net_of(case), x)


class Uncopied(nn.Linear):  # type: ignore[misc]
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("a lock")


def what_cannot_be_copied_is_said(backend: Backend) -> None:
    """It becomes parallel as before, and has a state."""
    net = filled(nn.Sequential(nn.Linear(2, 4), Uncopied(4, 2)), 0)
    axis = Mesh(backend, tp=-1)["tp"]
    parallelize_module(net, axis, {"0": ColwiseParallel(output_layouts=REPLICATED)})
    with pytest.raises(ArgumentError, match=r"full_module: .*TypeError: a lock.*full_state_dict"):
        full_module(net)
