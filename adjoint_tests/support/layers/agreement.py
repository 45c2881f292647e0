"""Layers that differ between workers say so, in the network's words: SPMD programs for two workers
or more. Each is ``contract(backend)``. Needs torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import linop
from linop import COPIES, REPLICATED, Partition, TensorSpace, layers
from linop.backends import Backend
from linop.errors import BackendError, DTypeError, PartitionError, ShapeError
from linop.layers.agreement.input_agreement import agreement_of
from support.contracts.plans import mine, raised, size
from support.layers.cases import normal


class Net(torch.nn.Module):  # type: ignore[misc]
    """A network in a network, whose second layer is called by the outermost module alone."""

    def __init__(self, P: Partition) -> None:
        super().__init__()
        self.features = torch.nn.Sequential(
            torch.nn.ReLU(), layers.Conv1d(P, 1, 2, 3, padding=1), torch.nn.ReLU()
        )
        self.tail = torch.nn.ModuleList([layers.MaxPool1d(P, 2)])

    def forward(self, x: Any) -> Any:
        return self.tail[0](self.features(x))


def errors_name_the_layer(backend: Backend) -> None:
    net = Net(Partition((1, 1, size(backend))))
    x = torch.ones(1, 1, 4)
    odd = mine(backend) == 1
    text = raised(DTypeError, lambda: net(x.double() if odd else x))
    assert text.startswith("Net.features.1 (Conv1d): worker 1 passes torch.float64"), text
    text = raised(ShapeError, lambda: net(torch.ones(1, 2, 4)))
    assert text.startswith("Net.features.1 (Conv1d): an input of shape (1, 2,"), text
    net = torch.nn.Sequential(net.tail[0])
    text = raised(PartitionError, lambda: net(torch.ones(4)))
    assert text.startswith("Sequential.0 (MaxPool1d): "), text
    text = raised(PartitionError, lambda: net[0](torch.ones(4)))
    assert text.startswith("MaxPool1d: "), text


def other_layers_are_named(backend: Backend) -> None:
    P = Partition((size(backend),))
    net = torch.nn.ModuleDict({"sum": layers.AllReduce(P), "halo": layers.HaloExchange(P, 1)})

    class Choose(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Any) -> Any:
            return self.net["halo" if mine(backend) else "sum"](x)

    text = raised(BackendError, lambda: Choose()(torch.ones(2)))
    assert "worker 0 calls Choose.net.sum (AllReduce) (layer 1)" in text, text
    assert "worker 1 calls Choose.net.halo (HaloExchange) (layer 2)" in text, text


def errors_of_backward_name_the_layer(backend: Backend) -> None:
    net = torch.nn.Sequential(layers.AllReduce(Partition((size(backend),))))
    x = torch.ones(2, requires_grad=True)
    net(x).sum().backward()
    ys = [net(x) for _ in range(3)]
    text = raised(BackendError, lambda: ys[0 if mine(backend) else 1].sum().backward())
    assert text.startswith("Sequential.0 (AllReduce), backward: workers call different"), text


def arguments_are_compared(backend: Backend) -> None:
    """Arguments that change what is sent, or nothing but numbers; and later, where debugging."""
    n, odd = size(backend), mine(backend) == 1
    P, M = Partition((1, n)), Partition((1, 1, n))
    x = torch.ones(2, 2)
    for make, words, given in (
        (lambda: layers.LayerNorm(P, 2 * n, eps=0.5 if odd else 0.25), ("eps=0.25", "eps=0.5"), x),
        (
            lambda: layers.BatchNorm1d(P, 2 * n, momentum=None if odd else 0.1),
            ("momentum=0.1", "momentum=None"),
            x,
        ),
        (
            lambda: layers.AvgPool1d(M, 2, count_include_pad=odd),
            ("count_include_pad=False", "count_include_pad=True"),
            torch.ones(1, 1, 4),
        ),
        (lambda: layers.Dropout(P, 0.5 if odd else 0.25), ("p=0.25", "p=0.5"), x),
        (lambda: layers.Linear(P, 2 * n, 4, P_W=P, bias=odd), ("bias=False", "bias=True"), x),
        (
            lambda: layers.Embedding(P, 9, 4, P_W=P, padding_idx=3 if odd else None),
            ("padding_idx=None", "padding_idx=3"),
            x.long(),
        ),
    ):
        text = raised(BackendError, lambda make=make, given=given: make()(given))
        assert f"constructed with {words[0]} on worker 0 and {words[1]} on worker 1" in text, text
    same = layers.LayerNorm(P, 2 * n, eps=0.25)
    same(x)
    backend.debug = True  # type: ignore[attr-defined]
    changed = layers.LayerNorm(P, 2 * n, eps=0.25)
    agreement_of(backend).debug = True
    changed(x)
    changed.eps = 0.5 if odd else 0.25
    text = raised(BackendError, lambda: changed(x))
    assert text.startswith("LayerNorm: constructed with eps=0.25 on worker 0 and eps=0.5"), text


def a_layer_of_one_worker_alone(backend: Backend) -> None:
    """No blank in it: what each worker does."""
    P = Partition((1, size(backend)))
    layer = layers.Linear(P, 2 * size(backend), 4, P_W=P)

    def alone() -> None:
        if mine(backend) == 1:
            layers.Conv1d(Partition((1, 1, 1)), 1, 1, 3)
        layer(torch.ones(2, 2))

    text = raised(BackendError, alone)
    # Before its first call the sum of calls is compiled, where ranks share no memory.
    assert re.search("workers do different things: worker 0: (compile|call layers)", text), text
    assert "; worker 1: construct Conv1d" in text, text
    assert text.isprintable()


def replicated_values_are_compared_in_debug_mode(backend: Backend) -> None:
    n, odd = size(backend), mine(backend) == 1
    agreement_of(backend).debug = True
    P = Partition((n,))
    linear = layers.Linear(P, 4, 2 * n, P_W=Partition((n, 1)), x_axes=[REPLICATED], y_axes=[1])
    net = torch.nn.Sequential(linear)
    x = normal((3, 4), 1).float()
    net(x)
    other = x.clone()
    other[2, 1] += 1e-6
    text = raised(BackendError, lambda: net(other if odd else x))
    assert text.startswith(
        "Sequential.0 (Linear): input 0 differs between workers 0 and 1, which hold the same piece"
    ), text
    net(x)
    norm = layers.BatchNorm1d(Partition((n, 1)), 3)
    batch = normal((2, 3), mine(backend)).float()
    norm(batch)
    if odd:
        norm.running_mean[0] += 1
    text = raised(BackendError, lambda: norm(batch))
    assert "parameter 'running_mean' differs between workers 0 and 1" in text, text


def blocks_may_differ_in_debug_mode(backend: Backend) -> None:
    """Blocks, and copies, are each worker's own; and one worker may checkpoint alone."""
    n, me = size(backend), mine(backend)
    agreement_of(backend).debug = True
    P = Partition((1, n))
    linear = layers.Linear(P, 2 * n, 4, P_W=P)
    total = layers.AllReduce(P)
    x = normal((3, 2), me).float().requires_grad_()
    y = total(x) + 0 * linear(x).sum()
    assert torch.equal(y, sum(normal((3, 2), w).float() for w in range(n)))
    if me == 0:
        y = checkpoint(total, x, use_reentrant=False, context_fn=linop.autograd.checkpoint_context)
    else:
        y = total(x)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((3, 2), float(n)))


def anomalies_may_be_detected(backend: Backend) -> None:
    """Workers that are threads have no leaf in common: torch holds its lock."""
    layer = layers.AllReduce(Partition((size(backend),)))
    for _ in range(30):
        x = torch.ones(2, requires_grad=True)
        layer(x).pow(2).sum().backward()
    X = TensorSpace((2,), Partition((size(backend),)), axes=[COPIES])
    y = linop.autograd.apply(linop.all_reduce(X), torch.ones(2).double(), backend)
    y.sum().backward()


def embeddings_have_gradients_where_nothing_moves(backend: Backend) -> None:
    """On a worker that has indices, or none, and neither rows nor output."""
    first = Partition((1,))
    for P_x in (Partition((size(backend),)), first):
        layer = layers.Embedding(P_x, 5, 3, P_y=first, P_W=Partition((1, 1)))
        x = torch.tensor([mine(backend), 4]) if mine(backend) in P_x else None
        y = layer(x)
        assert (y.requires_grad, y.dtype) == (True, torch.float32), y
        y.pow(2).sum().backward()
        if mine(backend) == 0:
            assert y.shape == (2 * P_x.size, 3)
            assert layer.weight.grad[4].abs().sum() > 0
        else:
            assert y.numel() == 0


CONTRACTS: list[Callable[[Backend], None]] = [
    errors_name_the_layer,
    other_layers_are_named,
    errors_of_backward_name_the_layer,
    arguments_are_compared,
    a_layer_of_one_worker_alone,
    replicated_values_are_compared_in_debug_mode,
    blocks_may_differ_in_debug_mode,
    anomalies_may_be_detected,
    embeddings_have_gradients_where_nothing_moves,
]
