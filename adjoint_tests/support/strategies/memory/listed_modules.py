"""Modules in a ModuleList, whose owner calls them with arguments of its own: a small model as
those of transformers are written. Needs torch."""

from __future__ import annotations

import copy
import gc
import weakref
from functools import partial
from typing import Any

import torch
from torch import nn

from linop.backends.engine.base import Backend
from linop.strategies import Mesh, checkpoint, full_state_dict, fully_shard, offload
from support.strategies.tensor.tensor_networks import filled, values

Tensor = Any
WIDTH = 8


class Layer(nn.Module):  # type: ignore[misc]  # torch is not typed here
    """Of inputs by position and by name, in structures, and several results."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(drop)
        self.kind = "full"

    def forward(self, x: Tensor, rotary: Any, *, mask: Tensor | None = None) -> Any:
        cos, sin = rotary
        y = self.down(self.drop(torch.tanh(self.up(self.norm(x))))) * cos + sin
        return (y if mask is None else y.masked_fill(mask, 0.0)), {"size": x.shape[0]}


class Owner(nn.Module):  # type: ignore[misc]
    """It reads attributes of its layers, takes a part of them, and calls them."""

    def __init__(self, depth: int, drop: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(drop) for _ in range(depth)])
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        rotary = (x[:1] * 0 + self.scale).cos(), torch.full((WIDTH,), 0.1, dtype=x.dtype)
        mask = torch.arange(WIDTH) == 2
        for k, layer in enumerate(self.layers[: len(self.layers)]):
            if layer.kind == "full":
                x, _ = layer(x, rotary, mask=mask if k % 2 else None)
        return x


def owner(depth: int, drop: float = 0.0) -> Any:
    return filled(Owner(depth, drop), 0)


def batch(rows: int = 5, seed: int = 1) -> Tensor:
    return values(rows, WIDTH, seed=seed)


def results(net: Any, x: Tensor) -> list[Tensor]:
    """Loss, gradients and buffers of two backwards of one seed."""
    net.zero_grad()
    torch.manual_seed(3)
    x = x.clone().requires_grad_()
    losses = [net(x).square().sum() for _ in range(2)]
    for one in losses[::-1]:
        one.backward()
    grads = [x.grad, *(p.grad for p in net.parameters())]
    return [*(one.detach() for one in losses), *grads, *(b.clone() for b in net.buffers())]


def saves_sharded(backend: Backend, before: bool, away: bool) -> None:
    """Sharded members compute again, or are moved: their updates are those without."""
    axis, states = Mesh(backend, dp=2)["dp"], []
    how = offload if away else checkpoint
    for saving in (False, True):
        net = owner(3)
        if saving and before:
            net.layers = how(net.layers)
        for layer in net.layers:
            fully_shard(layer, axis)
        fully_shard(net, axis)
        if saving and not before:
            net.layers = how(net.layers)
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(2):
            sgd.zero_grad()
            net(batch(4, seed=2 * step + axis.index)).square().sum().backward()
            sgd.step()
        states.append(full_state_dict(net))
    plain, found = states
    assert list(plain) == list(found)
    for key, value in plain.items():
        assert torch.equal(found[key], value), key


class Watched(nn.Module):  # type: ignore[misc]
    """It has a parameter of its own, and one in a module inside, and sees the memory of the one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(weakref.ref(self.weight.untyped_storage()))
        return x + self.inner(torch.tanh(x @ self.weight))


class Chained(nn.Module):  # type: ignore[misc]
    """It calls its members one by one."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList([make() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def gives_up_gathered(backend: Backend) -> None:
    """Checkpointed members of which whole parameters are gathered, for themselves or for the model,
    or are in another memory: those are given up after forward, and gradients are the plain ones."""
    axis = Mesh(backend, dp=-1)["dp"]
    x = batch(4)
    for make in Watched, partial(nn.Linear, WIDTH, WIDTH):
        base = filled(Chained(make), 0)
        twin = copy.deepcopy(base)
        twin(x).square().sum().backward()
        for how in "each", "after", "model", "away":
            net = copy.deepcopy(base)
            if how != "after":
                net.layers = checkpoint(net.layers)
            if how == "model":
                fully_shard(net, axis, reduction="sum")
            elif how == "away":
                net.layers = offload(net.layers, activations=False, parameters=True)
            else:
                for layer in net.layers:
                    fully_shard(layer, axis, reduction="sum")
            if how == "after":
                net.layers = checkpoint(net.layers)
            workers = axis.size if how != "away" else 1
            for _ in range(2):
                net.zero_grad()
                y = net(x)
                gc.collect()
                for layer in net.layers:
                    assert all(ref() is None for ref in getattr(layer, "seen", ()))
                y.square().sum().backward()
                for p, q in zip(net.parameters(), twin.parameters(), strict=True):
                    mine = workers * q.grad.tensor_split(workers)[axis.index if workers > 1 else 0]
                    assert torch.allclose(p.grad, mine, rtol=1e-12), how
            assert not hasattr(net.layers[0], "seen") or len(net.layers[0].seen) == 4
