"""Reversible blocks and checkpoints beside the nets that store everything, and the bytes that
autograd keeps alive. Needs torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from linop.backends.engine.base import Backend
from linop.strategies import (
    ColwiseParallel,
    Reversible,
    RowwiseParallel,
    checkpoint,
    offload,
    parallelize_module,
)
from support.strategies.tensor.tensor_networks import MLP, equal, filled, values
from support.strategies.tensor.tensor_parallel import axis_of, counted

Tensor = Any
WIDTH = 8


class Held(TorchDispatchMode):  # type: ignore[misc]  # torch is not typed here
    """Memory that functions called inside made, and that still is in use."""

    def __init__(self, *without: Any) -> None:
        super().__init__()
        self._without = {p.untyped_storage()._cdata for net in without for p in net.parameters()}
        self._made: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, torch.Tensor):
                self.note(x)
        return result

    def note(self, x: Tensor) -> None:
        """Count a tensor's memory, too."""
        memory = x.untyped_storage()
        self._made[memory._cdata] = StorageWeakRef(memory), memory.nbytes()

    @property
    def bytes(self) -> int:
        """Of all, without parameters."""
        return sum(
            size
            for at, (memory, size) in self._made.items()
            if at not in self._without and not memory.expired()
        )


class Kept(Held):
    """Memory in use that functions called inside made, or that autograd saves: results of linop's
    operators, too."""

    def hooks(self) -> Any:
        def pack(x: Tensor) -> Tensor:
            self.note(x)
            return x.detach()

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)


def between_passes(run: Any, text: Tensor) -> int:
    """Bytes between forward and backward, beside parameters and the batch, of a `Run` of
    examples/gpt.py. Collective."""
    rows = text.tensor_split(run.parts)[run.part]
    with Kept(run.net) as kept, kept.hooks():
        value = run.loss(run.net(rows[:, :-1]), rows[:, 1:])
    found = kept.bytes
    value.backward()
    run.net.zero_grad()
    return found


def layer(drop: float = 0.0, hidden: int = 2 * WIDTH) -> Any:
    return nn.Sequential(
        nn.Linear(WIDTH, hidden), nn.GELU(), nn.Dropout(drop), nn.Linear(hidden, WIDTH)
    )


def reversible(depth: int, make: Callable[[], Any] = layer) -> Any:
    net = filled(nn.Sequential(*[Reversible(make(), make()) for _ in range(depth)]), 0)
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(0.3)  # so that values stay of size 1 along the chain
    return net


def storing(net: Any, pair: Any) -> Any:
    """The outputs of reversible blocks, by a graph that keeps all."""
    for block in net:
        x1, x2 = pair
        y1 = x1 + block.f(x2)
        pair = y1, x2 + block.g(y1)
    return pair


def loss(pair: Any) -> Tensor:
    return pair[0].sin().sum() + pair[1].square().sum()


def pair(shape: Any = (5, WIDTH)) -> Any:
    return tuple(values(*shape, seed=s).requires_grad_() for s in (1, 2))


def recomputes_a_parallel_chain(backend: Backend) -> None:
    """A chain that was made parallel before it is checkpointed."""
    axis = axis_of(backend)
    plan = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}
    chain = filled(nn.Sequential(*[MLP(WIDTH, 9) for _ in range(3)]), 0)
    twin = parallelize_module(copy.deepcopy(chain), axis, plan)
    net = checkpoint(parallelize_module(chain, axis, plan))
    x = values(5, WIDTH, seed=1)
    for _ in range(2):
        for model in (net, twin):
            model(x).square().sum().backward()
    for (name, p), q in zip(net.named_parameters(), twin.parameters(), strict=True):
        equal(name, p.grad, q.grad, 0)


def keeps_messages(backend: Backend, blocks: str) -> None:
    """Tensor-parallel modules inside reversible blocks, or a chain that is checkpointed, and
    offloaded: messages and gradients are those of the net that stores everything."""
    axis = axis_of(backend)
    plan = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}
    if blocks == "reversible":
        net = reversible(3, lambda: MLP(WIDTH, 9))
        plan = {f"*.{key}": style for key, style in plan.items()}
    else:
        net = filled(nn.Sequential(*[MLP(WIDTH, 9) for _ in range(5)]), 0)
    twin = parallelize_module(copy.deepcopy(net), axis, plan)
    if blocks != "reversible":
        net = checkpoint(net, every=2)
    if blocks == "offload":
        net = offload(net, prefetch=0)
    net = parallelize_module(net, axis, plan)
    each = []
    for step in range(2):
        for model in (net, twin):
            before = counted(axis.backend)
            if blocks == "reversible":
                x = pair()
                y = model(x) if model is net else storing(model, x)
                loss(y).backward()
            else:
                x = (values(5, WIDTH, seed=1).requires_grad_(),)
                model(x[0]).square().sum().backward()
            after = counted(axis.backend)
            each.append({key: n - before.get(key, 0) for key, n in after.items()})
        tolerance = 1e-11 if blocks == "reversible" else 0
        for (name, p), q in zip(net.named_parameters(), twin.parameters(), strict=True):
            equal(name, p.grad, q.grad, tolerance)
        if step:
            assert each[-1] == each[-2], each
