"""Layers and tensor-parallel nets in one graph of torch's compiler: contracts for ranks. Threads
share one compiler, which runs one of them at a time."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from linop import Partition, layers
from linop.backends.engine.base import Backend
from linop.strategies import ColwiseParallel, Mesh, RowwiseParallel, parallelize_module

Tensor = Any


def is_one_graph(net: Any, x: Tensor) -> None:
    """Compiled and exported, a net is the eager one, its gradients too, for several shapes."""
    results = []
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    for call in (net, compiled, compiled):
        net.zero_grad()
        y = call(x)
        y.square().sum().backward()
        results.append([y.detach(), *(p.grad for p in net.parameters())])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    both = torch.cat([x, x])
    torch.testing.assert_close(compiled(both), net(both))
    exported = torch.export.export(net, (x,))
    assert torch.equal(exported.module()(x), results[0][0])
    targets = [str(node.target) for node in exported.graph.nodes]
    assert "linop.plan.default" in targets, targets


def tensor_parallel_nets(backend: Backend) -> None:
    base = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    with torch.no_grad():
        for k, p in enumerate(base.parameters()):
            p.copy_(torch.linspace(-1, 1 + k, p.numel()).view(p.shape))
    cut = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    net = parallelize_module(copy.deepcopy(base), Mesh(backend, tp=-1)["tp"], cut)
    is_one_graph(net, torch.linspace(-2, 1, 24).view(3, 8))


def nets_of_layers(backend: Backend) -> None:
    n = backend.workers or 1
    space, channels = Partition((1, 1, n)), Partition((1, n, 1))
    net = nn.Sequential(
        layers.Conv1d(space, 2, 4, 3, padding=1),
        nn.Tanh(),
        layers.AvgPool1d(space, 2),
        layers.Repartition(space, channels),
        layers.RMSNorm(channels, 4 * n),
    )
    is_one_graph(net, torch.linspace(-2, 1, 48).view(3, 2, 8))


def modes_of_layers(backend: Backend) -> None:
    """A compiled layer that is told to train, or to evaluate, does it from its next call on."""
    n = backend.workers or 1
    rows, tokens = Partition((n, 1)), Partition((1, n, 1))
    x = torch.linspace(-2, 1, 15).view(3, 5)
    block = torch.linspace(-2, 1, 32).view(2, 2, 8)
    attention = layers.MultiheadAttention(tokens, 8, 2, dropout=0.5, batch_first=True)
    nets: list[tuple[Any, tuple[Tensor, ...]]] = [
        (layers.BatchNorm1d(rows, 5), (x,)),
        (nn.Sequential(layers.Dropout(rows, 0.5)), (x,)),
        (attention, (block, block, block)),
    ]
    for net, given in nets:
        options = {"need_weights": False} if net is attention else {}
        compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
        for trains in True, False, True:
            compiled.train(trains)
            found = []
            for call in net, compiled:
                torch.manual_seed(1)
                y = call(*given, **options)
                found.append(y[0] if isinstance(y, tuple) else y)
            assert torch.equal(*found), (net, trains)
