"""Faults of DistDL, the paper's own code, as contracts of layers: ``contract(backend)``, for two
workers or more. Needs torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from linop import Partition, TensorSpace, layers
from linop.backends import Backend
from linop.errors import PartitionError, ShapeError
from support.contracts.plans import mine, raised, size
from support.layers.cases import Case, block, cut, is_its_twin, made, normal, same


def row(backend: Backend, *before: int) -> Partition:
    """All workers along the last axis."""
    return Partition((*before, size(backend)))


def one(*shape: int, worker: int = 0) -> Partition:
    return Partition(shape, [worker])


def convolution(backend: Backend, **options: Any) -> Case:
    """Two dimensions over all workers, with halos."""
    P = row(backend, 1, 1, 1)
    return Case("Conv2d", (P,), (2, 3, 5, 9), (3, 4, 3), {"padding": 1, **options}, seed=2)


def gradients_may_be_expanded(backend: Backend) -> None:
    layer, _ = made(backend, convolution(backend))
    X = cut((2, 3, 5, 9), layer.inputs[0], 0)
    given = []
    for how in (lambda y: y.sum().backward(), lambda y: y.backward(torch.ones(y.shape).double())):
        x = block(X, normal(X.global_shape, 1), backend, gradient=True)
        how(layer(x))
        given.append(x.grad)
    same(*given)


def inputs_may_have_any_strides(backend: Backend) -> None:
    exchange = layers.HaloExchange(row(backend, 1), (1, 3))
    x = normal((5, 4), 3).t()
    wanted = exchange(x.contiguous())
    assert not x.is_contiguous()
    assert torch.equal(exchange(x), wanted)
    assert torch.equal(exchange(x.flip(0)), exchange(x.flip(0).contiguous()))
    assert torch.equal(exchange(x[:, :1].expand(4, 5)), exchange(x[:, :1].repeat(1, 5)))


def inputs_and_gradients_are_never_changed(backend: Backend) -> None:
    P = row(backend)
    exchange = layers.HaloExchange(P, 3, padding=1)
    X = TensorSpace((3 * size(backend),), P)
    H = exchange.operator(X)
    w = normal((3,), mine(backend)).requires_grad_()
    v = 2 * w
    h = exchange(v)
    ones = torch.ones_like(h)
    torch.autograd.backward([v, h], [ones[:3], ones])
    assert torch.equal(v, 2 * w)
    assert torch.equal(ones, torch.ones(len(h)).double())
    back = H.H(H.codomain.vector({r.name: np.ones(r.shape) for r in H.codomain.regions}))
    wanted = 2 * (1 + back[X.region(mine(backend)).name])
    assert w.grad.tolist() == wanted.tolist()


def shapes_may_change(backend: Backend) -> None:
    """Every worker's, or only one's: the last rows of an image are fewer."""
    layer, twin = made(backend, convolution(backend))
    for shape in ((2, 3, 5, 9), (1, 3, 5, 9), (2, 3, 5, 8), (2, 3, 7, 12), (2, 3, 5, 9)):
        X = TensorSpace(shape, layer.inputs[0])
        wanted = twin(normal(shape, 0))
        Y = TensorSpace(tuple(wanted.shape), layer.inputs[0])
        same(layer(block(X, normal(shape, 0), backend)), block(Y, wanted, backend))


def a_shape_that_changes_on_one_worker_is_an_error_on_all(backend: Backend) -> None:
    layer, _ = made(backend, convolution(backend))
    X = TensorSpace((2, 3, 5, 9), layer.inputs[0])
    x = block(X, normal(X.global_shape, 0), backend)
    before = layer(x)
    wrong = x[:1] if mine(backend) == 1 else x
    for _ in range(2):
        text = raised(ShapeError, lambda: layer(wrong))
        assert "on worker 1" in text, text
        assert "do not make up one tensor" in text, text
    same(layer(x), before)


def halos_may_be_wider_than_blocks(backend: Backend) -> None:
    P = row(backend, 1, 1)
    is_its_twin(backend, Case("Conv1d", (P,), (1, 1, 2 * size(backend)), (1, 1, 5), {"padding": 2}))
    is_its_twin(backend, Case("MaxPool1d", (P,), (1, 1, size(backend) + 4), (5, 1)))


def channels_and_groups_may_be_split(backend: Backend) -> None:
    n = size(backend)
    P = Partition((1, n, 1))
    for groups in (1, n):
        options = {"groups": groups, "padding": 1}
        is_its_twin(backend, Case("Conv1d", (P,), (2, 2 * n, 7), (2 * n, 4 * n, 3), options))
    # Depthwise: what is needed is there.
    depthwise = layers.Conv1d(P, n, n, 3, groups=n)
    depthwise(torch.ones(2, 1, 7))
    assert sum(row.messages for row in backend.counters() if "H" in row.operator) == 0


def paddings_may_wrap_around(backend: Backend) -> None:
    for mode in ("reflect", "replicate", "circular"):
        is_its_twin(backend, convolution(backend, padding_mode=mode))


def workers_may_hold_nothing(backend: Backend) -> None:
    """All construct all layers, and call them."""
    last = size(backend) - 1
    first, other = one(1, 1, 1), one(1, 1, 1, worker=last)
    is_its_twin(backend, Case("Conv1d", (first,), (2, 3, 5), (3, 4, 2), {}, {"P_y": other}, other))
    is_its_twin(backend, Case("MaxPool1d", (other,), (2, 3, 5), (2,)))
    P = one(1, 1, worker=last)
    is_its_twin(backend, Case("Linear", (P,), (2, 3), (3, 4), {}, {"P_y": one(1, 1)}, one(1, 1)))


def workers_may_pass_none(backend: Backend) -> None:
    """The same with and without movement."""
    first = one(1, 1, 1)
    for layer in (
        layers.MaxPool1d(first, 1),
        layers.MaxPool1d(first, 2),
        layers.Conv1d(first, 1, 1, 1),
        layers.Repartition(first, one(1, 1, 1, worker=1)),
    ):
        y = layer(torch.ones(2, 1, 4, requires_grad=True) if mine(backend) == 0 else None)
        assert y.requires_grad
        y.sum().backward()


def axes_count_from_the_end(backend: Backend) -> None:
    P = row(backend, 1)
    x = torch.full((2, 3), 1.0 + mine(backend))
    whole = size(backend) * (size(backend) + 1) / 2
    assert torch.equal(layers.AllReduce(P, -1)(x), torch.full((2, 3), whole))
    assert torch.equal(layers.AllReduce(P, 1)(x), layers.AllReduce(P, [-1])(x))


def gradients_have_gradients(backend: Backend) -> None:
    layer, twin = made(backend, convolution(backend))
    X = cut((2, 3, 5, 9), layer.inputs[0], 1)
    whole = normal(X.global_shape, 1).requires_grad_()
    x = block(X, whole, backend, gradient=True)
    for of, at in ((layer, x), (twin, whole)):
        (g,) = torch.autograd.grad(of(at).pow(3).sum(), at, create_graph=True)
        g.pow(2).sum().backward()
    same(x.grad, block(X, whole.grad, backend))
    for name, parameter in layer.named_parameters():
        same(parameter.grad, dict(twin.named_parameters())[name].grad)


def numbers_may_be_bfloat16(backend: Backend) -> None:
    n = size(backend)
    x = torch.arange(4).to(torch.bfloat16) + mine(backend)
    y = layers.AllReduce(row(backend))(x)
    wanted = n * torch.arange(4) + n * (n - 1) / 2
    assert torch.equal(y, wanted.to(torch.bfloat16))
    layer, twin = made(backend, convolution(backend))
    layer, twin = layer.to(torch.bfloat16), twin.to(torch.bfloat16)
    X = TensorSpace((2, 3, 5, 9), layer.inputs[0])
    whole = normal(X.global_shape, 1).to(torch.bfloat16)
    given, wanted = layer(block(X, whole, backend)), twin(whole)
    assert given.dtype == torch.bfloat16
    Y = TensorSpace(tuple(wanted.shape), layer.inputs[0])
    assert torch.allclose(given.float(), block(Y, wanted, backend).float(), atol=0.05)


def defaults_are_those_of_torch(backend: Backend) -> None:
    P = row(backend, 1, 1)
    for name in ("MaxPool1d", "AvgPool1d"):
        is_its_twin(backend, Case(name, (P,), (2, 3, 11), (3,)))
    is_its_twin(backend, Case("Conv1d", (P,), (2, 3, 11), (3, 2, 3)))


def grids_are_transposed_as_in_mathematics(backend: Backend) -> None:
    """The worker at (i, j) stands at (j, i): examples 7 and 8 of DistDL's page on
    sum-reduction, with fewer workers."""
    n = size(backend)
    columns, wide = Partition((n, 1)), Partition((1, n))
    x = torch.full((2, 1), float(mine(backend)))
    assert torch.equal(layers.Broadcast(columns, wide, transpose_src=True)(x), x)
    assert torch.equal(layers.SumReduce(columns, wide, transpose_dest=True)(x), x)
    y = layers.SumReduce(columns, one(1), transpose_src=True)(x)
    assert y.tolist() == ([[n * (n - 1) / 2]] * 2 if mine(backend) == 0 else [[], []])
    if n == 4:
        grid, halves = Partition((2, 2)), Partition((2, 1), [2, 1])
        y = layers.SumReduce(grid, halves, transpose_src=True)(x)
        # Columns of the grid transposed: workers 0 and 2, 1 and 3.
        assert y.tolist() == {2: [[2], [2]], 1: [[4], [4]]}.get(mine(backend), [[], []])
    raised(PartitionError, lambda: layers.SumReduce(wide, columns))
    raised(PartitionError, lambda: layers.Broadcast(wide, one(1)))


DISTDL: list[Callable[[Backend], None]] = [
    gradients_may_be_expanded,
    inputs_may_have_any_strides,
    inputs_and_gradients_are_never_changed,
    shapes_may_change,
    a_shape_that_changes_on_one_worker_is_an_error_on_all,
    halos_may_be_wider_than_blocks,
    channels_and_groups_may_be_split,
    paddings_may_wrap_around,
    workers_may_hold_nothing,
    workers_may_pass_none,
    axes_count_from_the_end,
    gradients_have_gradients,
    numbers_may_be_bfloat16,
    defaults_are_those_of_torch,
    grids_are_transposed_as_in_mathematics,
]
