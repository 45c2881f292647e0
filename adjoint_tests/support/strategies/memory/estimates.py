"""Estimated memory beside that of tensors which workers really hold: contracts for threads."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from linop import REPLICATED, layers
from linop.backends.engine.base import Backend
from linop.strategies import (
    ColwiseParallel,
    DataParallel,
    Mesh,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    ShardedOptimizer,
    estimate,
    fully_shard,
    parallelize_module,
)

Tensor = Any
SUMMED = 80
"""Elements of a bucket beside gradients: a number for each parameter, and a digest."""


def net_of(half: bool) -> Any:
    norm = nn.LayerNorm(9) if half else nn.BatchNorm1d(9)
    net = nn.Sequential(
        nn.Linear(6, 9), norm, nn.ReLU(), nn.Linear(9, 5), nn.Sigmoid(), nn.Linear(5, 3)
    )
    assert net[3].bias is not None
    net[3].bias.requires_grad_(False)
    with torch.no_grad():
        for p in net.parameters():  # threads draw from one generator
            p.fill_(0.1)
    return net


def held(tensors: Any) -> int:
    """Bytes of tensors, shards included."""
    return sum(x.numel() * x.element_size() for x in tensors if isinstance(x, torch.Tensor))


def state_of(optimizer: Any) -> int:
    return sum(held(one.values()) for one in optimizer.state.values())


def is_estimated(backend: Backend, strategy: str, half: bool = False) -> None:
    workers, me = backend.workers or 1, backend.worker or 0
    make = partial(torch.optim.Adam, lr=0.1)
    x = torch.randn(11, 6)
    dtype = torch.bfloat16 if half else None
    options = {"units": ["0", "1", "3", "5"], "param_dtype": dtype} if "zero" in strategy else {}
    said = estimate(net_of(half), strategy, workers, make, (x,), **options)[me]
    axis, net = Mesh(backend, dp=-1)["dp"], net_of(half)
    rows = x.tensor_split(workers)[me]
    if strategy in ("zero2", "zero3"):
        after = strategy == "zero3"
        for module in (net[0], net[1], net[3], net[5]):
            fully_shard(module, axis, reshard_after_forward=after, param_dtype=dtype)
        model, optimizer = net, make(net.parameters())
    else:
        model = DataParallel(net, axis)
        plain = strategy == "dp"
        optimizer = make(net.parameters()) if plain else ShardedOptimizer(model, axis, make)
    units = [unit for one in net.modules() for unit in getattr(one, "_linop_units", ())]
    most = [0]

    def look(*unused: Any) -> None:
        most[0] = max(most[0], sum(unit.bytes_here for unit in units))

    for module in net:
        module.register_forward_pre_hook(look)
    kept: dict[int, Any] = {}

    def pack(one: Tensor) -> Tensor:
        kept[one.untyped_storage().data_ptr()] = one
        return one

    whole = {p.untyped_storage().data_ptr() for p in (*net.parameters(), *net.buffers())}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        y = model(rows)
    if not units:  # of sharded modules the hooks see views of gathered parameters, too
        own = [one for key, one in kept.items() if key not in whole]
        assert said.activations == sum(one.untyped_storage().nbytes() for one in own)
    y.sum().backward()
    optimizer.step()
    assert said.parameters == held(net.parameters())
    assert said.buffers == held(net.buffers())
    assert said.gradients == held(p.grad for p in net.parameters())
    inner = getattr(optimizer, "optimizer", optimizer)
    copies = held(optimizer.parts.parameters()) if workers > 1 and strategy == "zero1" else 0
    assert said.optimizer == state_of(inner) + copies
    if workers > 1 and not units:
        flat = held(bucket.flat for bucket in model._reducer._buckets)
        assert said.messages <= flat <= said.messages + 4 * SUMMED
    if units and workers > 1:
        # Of stage 2 torch's graph keeps those that backward needs.
        assert said.whole == most[0] if strategy == "zero3" else said.whole >= most[0]
    assert said.total >= said.parameters + said.gradients


class Attends(nn.Module):
    """Heads and an MLP, as of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.q, self.k, self.v, self.o = (nn.Linear(12, 12) for _ in range(4))
        self.up, self.down = nn.Linear(12, 20), nn.Linear(20, 12)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (f(h).unflatten(-1, (-1, 2)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(torch.relu(self.up(x)))


def cuts() -> dict[str, Any]:
    return {
        "*.norm": SequenceParallel(),
        "*.[qkv]": ColwiseParallel(1, heads=6),
        "*.o": RowwiseParallel(output_layouts=1, heads=6),
        "*.up": ColwiseParallel(1),
        "*.down": RowwiseParallel(output_layouts=1),
        "0": PrepareModuleInput(REPLICATED, 1),
    }


def saved_by(net: Any, run: Any) -> int:
    """Bytes of memory that autograd keeps of a call, but for parameters."""
    kept: dict[int, Any] = {}

    def pack(one: Tensor) -> Tensor:
        kept[one.untyped_storage().data_ptr()] = one
        return one

    whole = {p.untyped_storage().data_ptr() for p in (*net.parameters(), *net.buffers())}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
        y = run()
    del y
    own = [one for key, one in kept.items() if key not in whole]
    return sum(one.untyped_storage().nbytes() for one in own)


def tensor_parallel_is_estimated(backend: Backend) -> None:
    workers, me = backend.workers or 1, backend.worker or 0
    make = partial(torch.optim.Adam, lr=0.1)
    x = torch.ones(3, 7, 12)
    with layers.seeded(0):
        net = nn.Sequential(Attends(), Attends())
    said = estimate(net, "tp", workers, make, (x,), plan=cuts())[me]
    net = parallelize_module(net, Mesh(backend, tp=-1)["tp"], cuts())
    net(x)  # the first call is followed
    assert said.activations == saved_by(net, lambda: net(x))
    net(x).square().sum().backward()
    optimizer = make(net.parameters())
    optimizer.step()
    assert said.parameters == held(net.parameters())
    assert said.gradients == held(p.grad for p in net.parameters())
    assert said.optimizer == state_of(optimizer)
