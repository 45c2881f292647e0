"""What all layers promise, as SPMD programs for two workers or more: `test_layers` runs each on
threads and under MPI. Each is ``contract(backend)``. Needs torch.

The first ones are named after what goes wrong in DistDL, the paper's own code.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

import linop
from linop import COPIES, REPLICATED, Partition, TensorSpace, layers
from linop.backends import Backend
from linop.errors import ArgumentError, BackendError, DTypeError, PartitionError, ShapeError
from support.contracts.plans import mine, raised, size
from support.layers.cases import Case, block, cut, is_its_twin, made, normal, same, same_parameters


def row(backend: Backend, *before: int) -> Partition:
    """All workers along the last axis."""
    return Partition((*before, size(backend)))


def one(*shape: int, worker: int = 0) -> Partition:
    return Partition(shape, [worker])


def convolution(backend: Backend, **options: Any) -> Case:
    """Two dimensions over all workers, with halos."""
    P = row(backend, 1, 1, 1)
    return Case("Conv2d", (P,), (2, 3, 5, 9), (3, 4, 3), {"padding": 1, **options}, seed=2)


# What goes wrong in DistDL (peers)


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


def shapes_may_be_promised(backend: Backend) -> None:
    """Then nobody asks, but where all workers pass something new."""
    layer, twin = made(backend, convolution(backend))
    X = TensorSpace((2, 3, 5, 9), layer.inputs[0])

    def asked(batch: int) -> int:
        before = [row.calls for row in backend.counters() if row.operator.startswith("B_{1→")]
        whole = normal((batch, *X.global_shape[1:]), 1)
        wanted = twin(whole)
        Y = TensorSpace(tuple(wanted.shape), layer.inputs[0])
        given = layer(whole[(slice(None), *X.slices(mine(backend))[1:])])
        same(given, block(Y, wanted, backend))
        after = [row.calls for row in backend.counters() if row.operator.startswith("B_{1→")]
        return sum(after) - sum(before)

    asked(2)
    with layers.fixed_shapes():
        assert [asked(2), asked(1), asked(2), asked(1)] == [0, 1, 0, 0]
        with layers.fixed_shapes(False):
            assert asked(2) == 1
    assert asked(2) == 1


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
    is_its_twin(backend, Case("Linear", (P, one(1, 1), P), (2, 3), (3, 4), output=one(1, 1)))


def workers_may_pass_none(backend: Backend) -> None:
    """Whether something moves or not."""
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
    """The worker at (i, j) stands at (j, i): seed 002's examples 7 and 8, with fewer workers."""
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


# What else


def movements_are_their_operators(backend: Backend) -> None:
    n = size(backend)
    P, first = row(backend, 1), one(1, 1)
    copies = TensorSpace((2, 3 * n), P, axes=[COPIES, COPIES])
    split, whole = TensorSpace((2, 3 * n), P), TensorSpace((2, 3 * n), first)
    for layer, X in (
        (layers.Broadcast(first, P), whole),
        (layers.SumReduce(P, first), copies),
        (layers.AllReduce(P), copies),
        (layers.AllGather(P), split),
        (layers.AllGather(P, 1, REPLICATED), split),
        (layers.ReduceScatter(P), copies),
        (layers.Repartition(first, P), whole),
        (layers.Repartition(P, Partition((n, 1))), split),
        (layers.HaloExchange(P, (1, 3), 1, (0, 1)), split),
    ):
        op = layer.operator(X)
        x = own(X, X.integers(1), backend)
        y = layer(x.requires_grad_())
        upstream = op.codomain.integers(2)
        equal(y, own(op.codomain, op(X.integers(1)), backend))
        y.backward(own(op.codomain, upstream, backend).reshape(y.shape))
        if X.on(mine(backend)):
            equal(x.grad, own(X, op.H(upstream), backend))


def own(space: Any, vector: Any, backend: Backend) -> Any:
    """This worker's block of a vector."""
    held = [torch.from_numpy(vector[r.name].copy()) for r in space.on(mine(backend))]
    return held[0] if held else torch.empty(2, 0, dtype=torch.float64)


def equal(given: Any, wanted: Any) -> None:
    assert torch.equal(given, wanted), (given, wanted)


def the_batch_is_kept(backend: Backend) -> None:
    first, last = one(1, 1), one(1, 1, worker=size(backend) - 1)
    x = torch.ones(3, 4) if mine(backend) == 0 else layers.zero_volume_tensor()
    there = layers.Repartition(first, last)(x)
    outside = 0 < mine(backend) < size(backend) - 1
    assert there.shape == ((3, 4) if mine(backend) in last else (0,) if outside else (3, 0))
    kept = layers.Repartition(first, last)(
        x.reshape(3, -1) if mine(backend) == 0 else x.new_zeros(3, 0)
    )
    assert kept.shape == ((3, 4) if mine(backend) in last else (3, 0))
    plain = layers.Repartition(first, last, preserve_batch=False)(x)
    assert plain.shape == ((3, 4) if mine(backend) in last else (0,))


def replicated_linear_layers_are_megatrons(backend: Backend) -> None:
    """Column-, then row-parallel: messages for one sum forward, and for one back."""
    n = size(backend)
    P = row(backend)
    up, twin_up = made(
        backend,
        Case(
            "Linear",
            (P, P, Partition((n, 1))),
            (4, 6),
            (6, 5),
            {},
            {"x_axes": [REPLICATED], "y_axes": [1]},
        ),
    )
    down, twin_down = made(
        backend,
        Case(
            "Linear",
            (P, P, Partition((1, n))),
            (4, 5),
            (5, 3),
            {},
            {"x_axes": [1], "y_axes": [REPLICATED]},
        ),
    )
    x, whole = (normal((4, 6), 1).requires_grad_() for _ in range(2))
    y, wanted = down(torch.tanh(up(x))), twin_down(torch.tanh(twin_up(whole)))
    y.pow(2).sum().backward()
    wanted.pow(2).sum().backward()
    same(y, wanted)  # on every worker
    same(x.grad, whole.grad)
    same_parameters(up, twin_up, gradients=True)
    same_parameters(down, twin_down, gradients=True)
    sent = [(row.operator[0], row.messages > 0) for row in backend.counters() if row.calls]
    assert sent[1:] == [("P", False), ("R", True), ("R", False), ("P", True)], sent


def checkpointing_repeats_no_communication(backend: Backend) -> None:
    layer, twin = made(backend, convolution(backend))
    X = cut((2, 3, 5, 9), layer.inputs[0], 0)
    whole = normal(X.global_shape, 1).requires_grad_()
    x = block(X, whole, backend, gradient=True)
    if mine(backend) == 0:  # alone
        y = checkpoint(
            lambda z: layer(torch.sin(z)),
            x,
            use_reentrant=False,
            context_fn=linop.autograd.checkpoint_context,
        )
    else:
        y = layer(torch.sin(x))
    y.sum().backward()
    twin(torch.sin(whole)).sum().backward()
    same(x.grad, block(X, whole.grad, backend))


def copies_of_layers_work(backend: Backend) -> None:
    layer, _ = made(backend, convolution(backend))
    X = cut((2, 3, 5, 9), layer.inputs[0], 0)
    x = block(X, normal(X.global_shape, 1), backend)
    wanted = layer(x)
    other = copy.deepcopy(layer)
    same(other(x), wanted)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    same(other(x), 2 * wanted)  # not with the parameters of the first
    same(layer(x), wanted)


def layers_may_be_autocast(backend: Backend) -> None:
    """Torch computes in bfloat16; parameters, gradients and what moves stay as they are."""
    layer, twin = (module.float() for module in made(backend, convolution(backend)))
    X = cut((2, 3, 5, 9), layer.inputs[0], 0)
    whole = normal(X.global_shape, 1).float().requires_grad_()
    x = block(X, whole, backend, gradient=True)
    with torch.autocast("cpu", torch.bfloat16):
        y, wanted = layer(torch.relu(x)), twin(torch.relu(whole))
    assert wanted.dtype == torch.bfloat16
    Y = TensorSpace(tuple(wanted.shape), layer.inputs[0])
    assert torch.allclose(y.float(), block(Y, wanted, backend).float(), atol=0.05)
    y.float().pow(2).sum().backward()
    wanted.float().pow(2).sum().backward()
    assert x.grad.dtype == torch.float32
    assert torch.allclose(x.grad, block(X, whole.grad, backend), atol=0.2)
    for name, parameter in layer.named_parameters():
        assert parameter.grad.dtype == torch.float32
        assert torch.allclose(parameter.grad, dict(twin.named_parameters())[name].grad, rtol=0.1)


def results_may_be_changed_in_place(backend: Backend) -> None:
    P = row(backend, 1, 1)
    net = torch.nn.Sequential(
        layers.Conv1d(P, 2, 3, 3, padding=1),
        torch.nn.ReLU(inplace=True),
        layers.MaxPool1d(P, 2),
        torch.nn.ReLU(inplace=True),
        layers.Repartition(P, one(1, 1, 1)),
        torch.nn.Sigmoid(),
    )
    x = torch.randn(4, 2, 4, requires_grad=True)
    net(x).sum().backward()
    assert x.grad.abs().sum() > 0


def layers_may_be_compiled(backend: Backend) -> None:
    """With a graph break for each."""
    P = row(backend, 1, 1)
    net = torch.nn.Sequential(layers.Conv1d(P, 2, 3, 3, padding=1), torch.nn.ReLU())
    x = torch.randn(4, 2, 4)
    wanted = net(x)
    compiled = torch.compile(net, backend="eager")(x)
    assert torch.equal(compiled, wanted)
    compiled.sum().backward()


# Mistakes


def bad_tensors_are_errors_on_all(backend: Backend) -> None:
    P = row(backend, 1)
    layer = layers.Linear(P, P, Partition((1, size(backend))), 2 * size(backend), 3).double()
    good = torch.ones(4, 2, dtype=torch.float64)
    odd = mine(backend) == 1
    for kind, bad, words in (
        (ArgumentError, None, "a torch.Tensor expected, None given"),
        (ArgumentError, [1.0], "a torch.Tensor expected, list given"),
        (ArgumentError, good.to_sparse(), "torch.strided expected"),
        (ArgumentError, good.to("meta"), "on device meta"),
        (DTypeError, good.float(), "one dtype expected on all"),
        (ShapeError, good[0], "equally many dimensions expected"),
        (ShapeError, good[:3], "differ in dimension 0"),
        (ShapeError, good[:, :1], f"(…, {2 * size(backend)}) expected"),
    ):
        text = raised(kind, lambda bad=bad: layer(bad if odd else good))
        assert words in text, text
    assert layer(good).shape[0] == 4
    first = layers.Repartition(one(1, 1), P)
    text = raised(ArgumentError, lambda: first(good))
    assert "worker 1 is not in" in text, text


def bad_parameters_are_errors_on_all(backend: Backend) -> None:
    P = row(backend, 1)
    layer = layers.Linear(P, P, Partition((1, size(backend))), 2 * size(backend), 3)
    x = torch.ones(4, 2)
    if mine(backend) == 1:
        layer.weight = torch.nn.Parameter(torch.ones(3, 1))
    assert "parameter 'weight' of worker 1" in raised(ShapeError, lambda: layer(x))
    if mine(backend) == 1:
        layer.weight = torch.nn.Parameter(torch.ones(3, 2, dtype=torch.float64))
    assert "of torch.float64; torch.float32 expected" in raised(DTypeError, lambda: layer(x))


def different_calls_are_errors_on_all(backend: Backend) -> None:
    P = row(backend)
    one, other = layers.AllReduce(P), layers.HaloExchange(P, 1)
    x = torch.ones(2)
    text = raised(BackendError, lambda: (one if mine(backend) else other)(x))
    assert "workers call different layers" in text, text
    if mine(backend) == 1:
        one.eval()
    assert "training mode on some" in raised(BackendError, lambda: one(x))
    one.train()
    with torch.set_grad_enabled(mine(backend) == 1):
        text = raised(BackendError, lambda: one(x))
    assert "gradients are enabled on some workers, and not on" in text, text
    assert one(x).tolist() == [size(backend)] * 2


def missing_workers_are_errors(backend: Backend) -> None:
    text = raised(BackendError, lambda: layers.AllReduce(Partition((size(backend) + 1,))))
    assert "linop.launch" in text, text


def partitions_have_to_suit_the_kernel(backend: Backend) -> None:
    n = size(backend)
    row = Partition((n,))
    raised(PartitionError, lambda: layers.Conv2d(row, 1, 1, 3))
    raised(PartitionError, lambda: layers.MaxPool2d(row, 3))
    raised(PartitionError, lambda: layers.Linear(row, row, row, 2, 2))
    P = Partition((1, 1, n))
    cutting = Partition((1, 2, 1, 1))
    text = raised(PartitionError, lambda: layers.Conv1d(P, 6, 6, 1, groups=3, P_W=cutting))
    assert "in the middle of 3 groups" in text, text
    small = layers.Conv1d(P, 1, 1, 9)
    text = raised(ShapeError, lambda: small(torch.ones(1, 1, 1)))
    assert "no output" in text, text
    text = raised(ShapeError, lambda: layers.Conv1d(P, 2, 1, 1)(torch.ones(1, 1, 3)))
    assert "(batch, 2, …)" in text, text
    raised(ArgumentError, lambda: layers.MaxPool1d(P, 2, return_indices=True))
    raised(ArgumentError, lambda: layers.MaxPool1d(P, 2, padding=2))


def no_new_communicators(backend: Any) -> None:
    """After the first call of every layer, none is made. A new one has the lowest free handle."""
    every = [made(backend, convolution(backend))[0], layers.AllReduce(row(backend, 1, 1, 1))]
    x = normal((2, 3, 5, 9 // size(backend)), 0)
    for step in range(4):
        for layer in every:
            layer(x.requires_grad_()).sum().backward()
        if step == 0:
            before = fresh(backend)
    assert fresh(backend) == before


def fresh(backend: Any) -> int:
    comm = backend.transport.comm.Dup()
    handle: int = comm.py2f()
    comm.Free()
    return handle


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
CONTRACTS: list[Callable[[Backend], None]] = [
    *DISTDL,
    shapes_may_be_promised,
    movements_are_their_operators,
    the_batch_is_kept,
    replicated_linear_layers_are_megatrons,
    checkpointing_repeats_no_communication,
    copies_of_layers_work,
    layers_may_be_autocast,
    results_may_be_changed_in_place,
    bad_tensors_are_errors_on_all,
    bad_parameters_are_errors_on_all,
    different_calls_are_errors_on_all,
    missing_workers_are_errors,
    partitions_have_to_suit_the_kernel,
]
