"""Modules in a ModuleList, whose owner calls them with arguments of its own: a small model as
those of transformers are written. Needs torch."""

from __future__ import annotations

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
