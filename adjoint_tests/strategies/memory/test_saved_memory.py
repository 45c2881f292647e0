"""Reversible blocks and checkpoints are the nets that store everything, and keep what is
predicted."""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import copy

import torch
from torch import nn

from linop.errors import ArgumentError, BackendError
from linop.strategies import Reversible, checkpoint, offload
from support.requirements import needs_mpi
from support.strategies.memory.saved_memory import (
    WIDTH,
    Held,
    keeps_messages,
    layer,
    loss,
    pair,
    recomputes_a_parallel_chain,
    reversible,
    storing,
)
from support.strategies.tensor.tensor_networks import equal, filled, values
from support.workers import on_ranks, on_threads

PAIR = 2 * 5 * WIDTH * 8
"""Bytes of a pair of tensors."""


@pytest.mark.parametrize("drop", [0.0, 0.3])
@pytest.mark.parametrize("depth", [1, 2, 5, 16])
def test_reversible_is_the_net_that_stores(depth: int, drop: float) -> None:
    net = reversible(depth, lambda: layer(drop))
    twin = copy.deepcopy(net)
    for _ in range(2):  # gradients accumulate
        x, z = pair(), pair()
        torch.manual_seed(3)
        y = net(x)
        torch.manual_seed(3)
        wanted = storing(twin, z)
        assert all(map(torch.equal, y, wanted))
        state = torch.get_rng_state()
        loss(y).backward()
        assert torch.equal(torch.get_rng_state(), state)
        loss(wanted).backward()
        for a, b in zip(x, z, strict=True):
            equal("input", a.grad, b.grad, 1e-12 * depth)
        for (name, p), q in zip(net.named_parameters(), twin.parameters(), strict=True):
            equal(name, p.grad, q.grad, 1e-12 * depth)


@pytest.mark.parametrize("depth", [1, 2, 5, 16])
def test_reversible_keeps_one_pair(depth: int) -> None:
    net, x = reversible(depth), pair()
    with Held(net) as held:
        y = net(x)
    assert held.bytes == PAIR
    with Held(net) as stored:
        kept = storing(net, x)
    assert stored.bytes > PAIR * (2 * depth + 1)
    loss(y).backward()
    del y, kept
    assert held.bytes == 0


def test_inverse() -> None:
    net = reversible(16)
    x = pair()
    y = net(x)
    for block in reversed(net):
        y = block.inverse(y)
    for found, wanted in zip(y, x, strict=True):
        equal("input", found, wanted.detach(), 1e-11)


def test_backwards_of_a_part_and_again() -> None:
    net = reversible(4)
    twin = copy.deepcopy(net)
    results = []
    for model, run in ((net, lambda p: net[2:](net[:2](p))), (twin, lambda p: storing(twin, p))):
        x = pair()
        middle = model[:2](x) if model is net else storing(model[:2], x)
        end = model[2:](middle) if model is net else storing(model[2:], middle)
        grads = torch.autograd.grad(loss(middle), x, retain_graph=True)  # before the end's
        again = torch.autograd.grad(loss(end) + loss(middle), x, retain_graph=True)
        third = torch.autograd.grad(loss(end), x)
        results.append((*grads, *again, *third))
        assert len(run(pair())) == 2
    for found, wanted in zip(*results, strict=True):
        equal("gradient", found, wanted, 1e-11)


def test_frozen_input_and_evaluation() -> None:
    net = reversible(2)
    twin = copy.deepcopy(net)
    x = tuple(one.detach() for one in pair())
    loss(net(x)).backward()
    loss(storing(twin, x)).backward()
    for (name, p), q in zip(net.named_parameters(), twin.parameters(), strict=True):
        equal(name, p.grad, q.grad, 1e-11)
    with torch.no_grad():
        assert all(map(torch.equal, net(x), storing(twin, x)))


class Swap(nn.Module):  # type: ignore[misc]
    def forward(self, pair: Any) -> Any:
        return pair[1], pair[0]


class Twice(nn.Module):  # type: ignore[misc]
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, pair: Any) -> Any:
        return pair[self.number], pair[self.number]


def normed() -> Any:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())


@pytest.mark.parametrize(
    ("between", "make"),
    [
        (Swap(), lambda: layer(0.3)),
        (Twice(0), layer),
        (Twice(1), layer),
        (nn.Identity(), normed),
    ],
    ids=["swapped", "the first twice", "the second twice", "running statistics"],
)
def test_reversible_in_other_chains(between: Any, make: Any) -> None:
    net = reversible(4, make)
    twin = copy.deepcopy(net)
    ends = []
    for model in (net, twin):
        x = y = pair()
        torch.manual_seed(3)
        for block in model:
            y = between(block(y) if model is net else storing([block], y))
        loss(y).backward()
        grads = [one.grad for one in (*x, *model.parameters())]
        ends.append([*(torch.zeros(()) if g is None else g for g in grads), *model.buffers()])
    for found, wanted in zip(*ends, strict=True):
        equal("gradient or buffer", found, wanted, 1e-11)


@pytest.mark.parametrize("every", [1, 2, 4])
def test_checkpoints_change_running_statistics_once(every: int) -> None:
    net = nn.Sequential(*[normed() for _ in range(4)])
    ends = []
    for model in (copy.deepcopy(net), checkpoint(net, every=every)):
        value = model(torch.arange(5.0 * WIDTH).sin().reshape(5, WIDTH)).sum()
        value.backward(retain_graph=True)
        value.backward()  # computed again, again
        ends.append([p.grad for p in model.parameters()] + [*model.buffers()])
    assert all(map(torch.equal, *ends))


def test_reversible_swapped_keeps_one_pair() -> None:
    net, y = reversible(5), pair()
    with Held(net) as held:
        for block in net:
            y = Swap()(block(y))
    assert held.bytes == PAIR


def test_reversible_under_autocast() -> None:
    net = reversible(3).float()
    twin = copy.deepcopy(net)
    x = tuple(one.detach().float() for one in pair())
    for model, run in ((net, net), (twin, lambda x: storing(twin, x))):
        with torch.autocast("cpu", torch.bfloat16):
            y = run(x)
        loss(y).backward()
        assert all(p.grad is not None for p in model.parameters())
    for (name, p), q in zip(net.named_parameters(), twin.named_parameters(), strict=True):
        equal(name, p.grad, q[1].grad, 2e-2)  # two steps of bfloat16


class Doubling(nn.Module):  # type: ignore[misc]  # torch is not typed here
    def forward(self, x: Any) -> Any:
        return x.mul_(2)


def test_hooks_of_a_chain() -> None:
    calls = []
    net = nn.Sequential(nn.Linear(2, 2))
    net.register_forward_pre_hook(lambda *given: calls.append(given[2]), with_kwargs=True)
    net.register_full_backward_hook(lambda *given: calls.append("backward"))
    checkpoint(net)(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert calls == [{}, "backward"]


class Turned(nn.Sequential):  # type: ignore[misc]  # torch is not typed here
    """Calls its modules in reverse order."""

    def forward(self, x: Any) -> Any:
        return nn.Sequential(*reversed(self))(x)


def test_refused() -> None:
    net = reversible(1)
    with pytest.raises(ArgumentError, match="a pair of tensors expected"):
        net(pair()[0])
    with pytest.raises(ArgumentError, match=r"a result of shape \(5, 3\); \(5, 8\) expected"):
        Reversible(nn.Linear(WIDTH, 3).double(), nn.Identity())(pair())
    with pytest.raises(ArgumentError, match="changes its input in place"):
        Reversible(nn.Identity(), Doubling())(pair())
    with pytest.raises(BackendError, match="no gradients of gradients"):
        torch.autograd.grad(loss(net(pair())), list(net.parameters()), create_graph=True)
    y = net(pair())
    y[0].detach().zero_()
    with pytest.raises(BackendError, match="an output was changed in place"):
        (y[0] + y[1]).sum().backward()
    others = {name: (p * 2).detach().requires_grad_() for name, p in net.named_parameters()}
    y = torch.func.functional_call(net, others, (pair(),))
    with pytest.raises(BackendError, match="f or g has other parameters or buffers than when it"):
        loss(y).backward()
    with pytest.raises(
        ArgumentError, match=r"a torch.nn.Sequential or ModuleList expected, given Linear"
    ):
        checkpoint(nn.Linear(2, 2))
    with pytest.raises(ArgumentError, match="Turned has a forward of its own"):
        checkpoint(Turned(nn.Identity()))
    with pytest.raises(ArgumentError, match=r"every=0; at least 1 expected"):
        checkpoint(nn.Sequential(), every=0)


@pytest.mark.parametrize("every", [1, 2, 3, 7, 9])
def test_checkpoints(every: int) -> None:
    twin = filled(nn.Sequential(*[layer(0.3) for _ in range(7)]), 0)
    net = checkpoint(copy.deepcopy(twin), every=every)
    assert list(net.state_dict()) == list(twin.state_dict())
    x, z = (values(5, WIDTH, seed=1).requires_grad_() for _ in range(2))
    torch.manual_seed(3)
    with Held(net) as held:
        y = net(x)
    groups = -(-7 // every)
    assert held.bytes == groups * PAIR // 2  # inputs of groups but the first, and the output
    torch.manual_seed(3)
    wanted = twin(z)
    assert torch.equal(y, wanted)
    y.square().sum().backward()
    wanted.square().sum().backward()
    assert torch.equal(x.grad, z.grad)
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    with torch.no_grad():
        assert torch.equal(net.eval()(x), twin.eval()(x))


@pytest.mark.parametrize("make", [partial(checkpoint, every=2), offload])
def test_modules_that_come_twice(make: Any) -> None:
    inner, relu = nn.Linear(WIDTH, WIDTH), nn.ReLU()
    twin = filled(nn.Sequential(inner, relu, inner, relu, nn.Linear(WIDTH, 1)), 0)
    net = make(copy.deepcopy(twin))
    x = values(5, WIDTH, seed=1)
    assert len(net) == 5
    net(x).sum().backward()
    twin(x).sum().backward()
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


BLOCKS = pytest.mark.parametrize("blocks", ["reversible", "checkpoint", "offload"])


@BLOCKS
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_messages_on_threads(blocks: str, workers: int) -> None:
    on_threads(workers, keeps_messages, blocks)


@pytest.mark.parametrize("workers", [1, 3])
def test_checkpoints_of_a_parallel_chain(workers: int) -> None:
    on_threads(workers, recomputes_a_parallel_chain)


@needs_mpi
@BLOCKS
def test_messages_on_ranks(blocks: str) -> None:
    on_ranks(2, keeps_messages, blocks)
