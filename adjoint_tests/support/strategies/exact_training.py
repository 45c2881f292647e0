"""Training with the same bits on any number of workers: programs for threads and ranks. Needs
torch."""

from __future__ import annotations

import copy
import hashlib
from functools import partial
from typing import Any

import torch
from torch import nn

import linop
from linop import REPLICATED
from linop.backends.engine.base import Backend
from linop.strategies import (
    ColwiseParallel,
    CrossEntropyLoss,
    DataParallel,
    Mesh,
    RowwiseParallel,
    SequenceParallel,
    VirtualShards,
    check,
    full_state_dict,
    fully_shard,
    parallelize_module,
)
from linop.strategies.mesh import Axis
from support.examples import example

gpt = example("gpt")
SIZE = gpt.Size(width=32, heads=8, blocks=2, length=16)
BATCH = 12
"""Rows, which eight shards have some more of than others."""
STRATEGIES = "dp", "zero3", "tp"
WORKERS = 1, 2, 4, 8


def plan(heads: int) -> dict[str, Any]:
    """That of examples/gpt.py, in which each projection gathers its own input."""
    same = {"heads": heads}
    return {
        "words": RowwiseParallel(),
        "start": SequenceParallel(input_layouts=REPLICATED),
        "blocks.*.[fg].norm": SequenceParallel(),
        "blocks.*.f.inner.[qkv]": ColwiseParallel(1, **same),
        "blocks.*.f.inner.o": RowwiseParallel(output_layouts=1, **same),
        "blocks.*.g.inner.up": ColwiseParallel(1),
        "blocks.*.g.inner.down": RowwiseParallel(output_layouts=1),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(1),
    }


def trained(
    backend: Backend,
    strategy: str,
    steps: int,
    dtype: torch.dtype = torch.float64,
    size: Any = SIZE,
    rows: int = BATCH,
) -> tuple[list[float], str]:
    """Losses of all steps, and a digest of the last parameters."""
    torch.set_num_threads(1)
    net = gpt.network("sequential", size, dtype)
    axis = Mesh(backend, only=-1)["only"]
    net = made(net, strategy, axis, size)
    shards = VirtualShards(axis if strategy != "tp" else None)
    loss = CrossEntropyLoss(axis, shards=8) if strategy == "tp" else None
    adam = gpt.language_model.optimizer(net.parameters())
    losses = []
    text = gpt.language_model.text()
    for x, target in gpt.language_model.batches(text, rows, steps, length=size.length):
        adam.zero_grad()
        if loss is None:
            value = shards.step(net, partial(_term, rows), x, target)
        else:
            value = loss(net(x).flatten(0, 1), target.flatten())
            value.backward()
        losses.append(float(value.detach()))
        adam.step()
    blocks = axis.size > 1 and strategy != "dp"
    state = full_state_dict(net) if blocks or strategy == "tp" else net.state_dict()
    found = hashlib.sha256()
    for p in state.values():
        found.update(p.numpy().tobytes())
    return losses, found.hexdigest()


def made(net: nn.Module, strategy: str, axis: Axis, size: Any) -> nn.Module:
    if strategy == "dp":
        return DataParallel(net, axis)
    if strategy == "zero3":
        for block in net.blocks:
            fully_shard(block, axis)
        return fully_shard(net, axis)
    return parallelize_module(net, axis, plan(size.heads), shards=8)


def _term(rows: int, net: Any, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return gpt.language_model.loss(net(x), target) * (len(x) / rows)


def has_the_bits(backend: Backend, strategy: str, steps: int, wanted: Any) -> None:
    assert trained(backend, strategy, steps) == wanted


def perceptron(seed: int, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    with linop.layers.seeded(seed):
        return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8)).to(
            dtype
        )


def batch(seed: int, rows: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, Any]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 16, generator=draw, dtype=dtype), torch.randn(
        rows, 8, generator=draw, dtype=dtype
    )


def checked(
    backend: Backend, strategy: str, spoil: str = "", rows: int = 16, seed: int = 0
) -> float:
    """`check(exact=True)` of a perceptron.

    Args:
        spoil: a fault of the last worker: "bit": of one gradient; "twice": a term counts twice.
    """
    torch.set_num_threads(1)
    net = perceptron(seed)
    twin = copy.deepcopy(net)
    axis = Mesh(backend, only=-1)["only"]
    if strategy == "dp":
        model: Any = DataParallel(net, axis)
    elif strategy == "zero3":
        model = fully_shard(net, axis)
    else:  # the layers, and nothing of the net itself
        for layer in (net[0], net[2], net[3]):
            fully_shard(layer, axis)
        model = net
    if spoil and axis.index == axis.size - 1:
        factor = 1 + 2.0**-51 if spoil == "bit" else 2.0
        net[0].weight.register_hook(lambda g: g * factor)
    return check(model, twin, batch(seed, rows), squares, exact=True)


def checked_over_features(backend: Backend, spoil: bool = False) -> float:
    """`check(exact=True)` of the tensor-parallel GPT, whose twin is cut over one worker.

    Args:
        spoil: change the last bits of one gradient, on the last worker.
    """
    torch.set_num_threads(1)
    axis = Mesh(backend, only=-1)["only"]
    alone = Axis("only", (0,), 0, linop.backends.alone())
    nets = [gpt.network("sequential", SIZE, torch.float64) for _ in range(2)]
    model, twin = (
        made(net, "tp", over, SIZE) for net, over in zip(nets, (axis, alone), strict=True)
    )
    losses = {id(model): CrossEntropyLoss(axis, shards=8)}
    if spoil and axis.index == axis.size - 1:
        model.head.weight.register_hook(lambda g: g * (1 + 2.0**-51))

    def step(net: Any, batch: Any) -> float:
        x, target = batch
        loss = losses.get(id(net)) or losses.setdefault(id(net), CrossEntropyLoss(alone, shards=8))
        value = loss(net(x).flatten(0, 1), target.flatten())
        value.backward()
        return float(value.detach())

    text = gpt.language_model.text()
    x, target = next(iter(gpt.language_model.batches(text, 4, 1, length=SIZE.length)))
    return check(model, twin, (x, target), step=step, exact=True)


def squares(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((y - target) ** 2).sum()
