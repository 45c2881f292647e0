"""More habits of people with a torch model: parameters frozen in turns, copies with hooks, means in
half precision, values beside training; contracts for threads and ranks."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from linop.backends.engine.base import Backend
from linop.errors import ArgumentError
from linop.strategies import DataParallel, Mesh, full_state_dict, fully_shard
from support.strategies.data.habits import HALF, are_the_twins, part, perceptron, sharded, whole


def thaws_in_turns(backend: Backend) -> None:
    """Of two layers one is frozen and the other thawed, in turns."""
    x = whole(8, 4, seed=9)
    for make in (DataParallel, lambda net: sharded(net, backend)):
        inner, twin = perceptron(), perceptron()
        for one in (inner, twin):
            one[0].requires_grad_(False)
        net = make(inner)
        for turn in range(4):
            for one in (inner, twin):
                one[0].requires_grad_(turn % 2 == 1)
                one[2].requires_grad_(turn % 2 == 0)
                one.zero_grad()
            net(part(backend, x)).sum().backward()
            twin(x).sum().backward()
            are_the_twins(backend, net, twin)


def copies_all(backend: Backend) -> None:
    """A deep copy of DataParallel has its mode, hooks and attributes, and loads states as it
    does."""
    del backend
    net = DataParallel(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), reduction="sum")
    net.module.train()
    net.train(False)
    net.module[1].train()
    calls: list[Any] = []
    net.register_forward_hook(lambda *_: calls.append(1))
    net.note = [5]
    copied = copy.deepcopy(net)
    assert not copied.training and not copied.module.training and copied.module[1].training
    assert copied.note == [5] and copied.note is not net.note
    with torch.no_grad():
        copied(torch.ones(2, 3))
    assert calls == [1]
    assert copied._reducer is not net._reducer
    state = {"inner." + key: 2 * value for key, value in net.state_dict().items()}
    nn.ModuleDict({"inner": copied}).load_state_dict(state)
    assert torch.equal(copied.module[0].weight, 2 * net.module[0].weight)


def divides_widely(backend: Backend) -> None:
    """Means of half precision are taken of the sum: a third is no number of half precision, and
    three thirds are one."""
    axis = Mesh(backend, dp=-1)["dp"]
    for prefetch in (0, 1):
        net = nn.Linear(1, 2 * axis.size, bias=False)
        nn.init.zeros_(net.weight)
        fully_shard(net, axis, reduction="mean", param_dtype=HALF, prefetch=prefetch)
        for _ in range(2):
            net.zero_grad()
            net(torch.ones(1, 1)).sum().backward()
            assert torch.equal(net.weight.grad.as_subclass(torch.Tensor), torch.ones(2, 1))
            net.zero_grad()
            with net.no_sync():
                net(torch.ones(1, 1)).sum().backward()
            assert torch.equal(net.weight.grad.as_subclass(torch.Tensor), torch.ones(2, 1))


def shares_sums(backend: Backend) -> None:
    """A share of the rows, of gradients that are divided already, is refused."""
    del backend
    with pytest.raises(ArgumentError, match=r"share: .* leave the share out"):
        DataParallel(perceptron(), reduction="mean").share(2)


def saves_what_is_ahead(backend: Backend) -> None:
    """The state between a forward that ends early and the next one, of half precision, too."""
    axis = Mesh(backend, dp=-1)["dp"]
    for dtype in (HALF, torch.float32):
        layers = [nn.Linear(4, 4, bias=False).to(dtype) for _ in range(3)]
        wanted = [whole(4, 4, seed=k).to(dtype) for k in range(3)]
        for one, values in zip(layers, wanted, strict=True):
            one.weight.data.copy_(values)
        net = nn.Sequential(*layers)
        for one in layers:
            fully_shard(one, axis, prefetch=1)
        x = whole(2, 4, seed=9).to(dtype)
        for _ in range(2):
            net(x).sum().backward()
        with torch.no_grad():
            layers[1](layers[0](x))  # and gathers the last one ahead
        for _ in range(2):
            state = full_state_dict(net)
            assert all(torch.equal(state[f"{k}.weight"], one) for k, one in enumerate(wanted))
            net(x).sum().backward()


def forgets_what_was_whole(backend: Backend) -> None:
    """Whole parameters of micro-batches are given up, those of half precision, too."""
    for dtype in (HALF, torch.float32):
        net = sharded(perceptron().to(dtype), backend)
        seen = []
        for _ in range(2):
            with net.no_sync():
                net(whole(4, 4, seed=9).to(dtype)).sum().backward()
                seen += [weakref.ref(unit._held) for unit in net._linop_units]
        gc.collect()
        assert len(seen) == 2 and all(known() is None for known in seen)


def has_a_mean_loss(backend: Backend, copies: bool, own: bool) -> None:
    """Means over something else than rows, and of other models; then one of the model's own rows,
    after a forward of another one.

    Args:
        copies: of DataParallel; or shards.
        own: False: leave the last one out.
    """
    x = whole(4, 4, seed=9)

    def make() -> Any:
        return DataParallel(perceptron()) if copies else sharded(perceptron(), backend)

    rows, net, other = make(), make(), make()
    if not own:
        rows(x).square().mean(1).sum().backward()
    net(x)  # for its value alone
    perceptron()(x).mean().backward()
    if own:
        y = net(x)
        other(x)
        y.mean().backward()


def updates_in_backward(backend: Backend) -> None:
    """An optimizer's step in a hook after each gradient's accumulation: of shards that of one
    process; of copies, whose gradients are no sums then, an error."""
    x = whole(8, 4, seed=9)

    def stepping(net: Any) -> Any:
        for p in net.parameters():
            sgd = torch.optim.SGD([p], lr=0.01)

            def hook(p: Any, sgd: Any = sgd) -> None:
                sgd.step()
                sgd.zero_grad()

            p.register_post_accumulate_grad_hook(hook)
        return net

    twin = stepping(perceptron())
    net = stepping(sharded(perceptron(), backend))
    for _ in range(2):
        twin(x).sum().backward()
        net(part(backend, x)).sum().backward()
    state = full_state_dict(net)
    for name, p in twin.state_dict().items():
        assert torch.allclose(state[name], p, rtol=1e-5, atol=1e-5), name
    copies = stepping(DataParallel(perceptron(), reduction="sum"))
    loss = copies(part(backend, x)).sum()
    if backend.workers == 1:
        loss.backward()
    else:
        with pytest.raises(ArgumentError, match="an optimizer's step inside of backward"):
            loss.backward()


def refuses_forwards_that_write(backend: Backend) -> None:
    """An embedding with max_norm changes rows of its weight, which are another worker's rows."""
    for make in (DataParallel, lambda net: fully_shard(net, Mesh(backend, dp=-1)["dp"])):
        for kind in (nn.Embedding, nn.EmbeddingBag):
            net = nn.Sequential(kind(5, 2, max_norm=1.0))
            with torch.no_grad():
                net[0].weight.fill_(1.0)
            if backend.workers == 1:
                make(net)
                continue
            with pytest.raises(ArgumentError, match=r"module '0' is of Embedding.* max_norm=1.0"):
                make(net)
