"""Contracts of all layers, as SPMD programs for two workers or more: `test_layers` runs each on
threads and under MPI. Each is ``contract(backend)``. Needs torch.

The first ones are named after what goes wrong in DistDL, the paper's own code.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import linop
from linop import COPIES, REPLICATED, Partition, TensorSpace, layers
from linop.backends import Backend
from linop.errors import ArgumentError, BackendError, DTypeError, PartitionError, ShapeError
from linop.layers.agreement.input_agreement import agreement_of
from support.contracts.plans import mine, raised, size
from support.layers.cases import Case, block, cut, made, normal, same, same_parameters
from support.layers.distdl import DISTDL, convolution, one, row


def shapes_may_be_promised(backend: Backend) -> None:
    """Then nobody asks, but where all workers pass something new."""
    layer, twin = made(backend, convolution(backend))
    X = TensorSpace((2, 3, 5, 9), layer.inputs[0])
    agreement, sums = agreement_of(backend), [0]
    summed = agreement.summed

    def counted(*given: Any) -> tuple[int, int]:
        sums[0] += 1
        return summed(*given)

    agreement.summed = counted  # type: ignore[method-assign]

    def asked(batch: int) -> int:
        before = sums[0]
        whole = normal((batch, *X.global_shape[1:]), 1)
        wanted = twin(whole)
        Y = TensorSpace(tuple(wanted.shape), layer.inputs[0])
        given = layer(whole[(slice(None), *X.slices(mine(backend))[1:])])
        same(given, block(Y, wanted, backend))
        return sums[0] - before

    asked(2)
    with layers.fixed_shapes():
        assert [asked(2), asked(1), asked(2), asked(1)] == [0, 1, 0, 0]
        with layers.fixed_shapes(False):
            assert asked(2) == 1
    assert asked(2) == 1


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
            (P,),
            (4, 6),
            (6, 5),
            {},
            {"P_W": Partition((n, 1)), "x_axes": [REPLICATED], "y_axes": [1]},
        ),
    )
    down, twin_down = made(
        backend,
        Case(
            "Linear",
            (P,),
            (4, 5),
            (5, 3),
            {},
            {"P_W": Partition((1, n)), "x_axes": [1], "y_axes": [REPLICATED]},
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
    rows = [row for row in backend.counters() if row.calls and row.operator[0] in "PR"]
    sent = [(row.operator[0], row.messages > 0) for row in rows]
    assert sent == [("P", False), ("R", True), ("R", False), ("P", True)], sent


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
    """Outputs and gradients are those of activations that make new tensors."""
    P = row(backend, 1, 1)
    x = torch.randn(4, 2, 4, requires_grad=True)
    net = torch.nn.Sequential(
        layers.Conv1d(P, 2, 3, 3, padding=1),
        torch.nn.LeakyReLU(inplace=True),
        layers.MaxPool1d(P, 2),
        torch.nn.LeakyReLU(inplace=True),
        layers.Repartition(P, one(1, 1, 1)),
        torch.nn.LeakyReLU(inplace=True),  # also on workers that hold none of it
        torch.nn.Flatten(),
        layers.Linear(one(1, 1), 6 * size(backend), 2),
        torch.nn.LeakyReLU(inplace=True),
        torch.nn.Sigmoid(),
    )
    found = []
    for inplace in (True, False):
        for activation in net:
            if isinstance(activation, torch.nn.LeakyReLU):
                activation.inplace = inplace
        y = net(x)
        leaves = [x, *net.parameters()]
        for leaf in leaves:
            leaf.grad = None
        y.sum().backward()
        found.append((y, *(leaf.grad for leaf in leaves)))
    assert all(map(torch.equal, *found))
    assert found[0][1].count_nonzero()  # no activation's slope is 0


def layers_may_be_compiled(backend: Backend) -> None:
    """With a graph break for each."""
    P = row(backend, 1, 1)
    net = torch.nn.Sequential(layers.Conv1d(P, 2, 3, 3, padding=1), torch.nn.ReLU())
    x = torch.randn(4, 2, 4)
    wanted = net(x)
    compiled = torch.compile(net, backend="eager")(x)
    assert torch.equal(compiled, wanted)
    compiled.sum().backward()
    up = layers.ConvTranspose1d(P, 2, 3, 3, stride=2)
    sized = torch.compile(up, backend="eager")
    for extent in (8 * size(backend) + 2, 8 * size(backend) + 1):
        assert torch.equal(sized(x, output_size=[extent]), up(x, [extent]))


# Mistakes


def bad_tensors_are_errors_on_all(backend: Backend) -> None:
    P = row(backend, 1)
    layer = layers.Linear(P, 2 * size(backend), 3, P_W=Partition((1, size(backend)))).double()
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
    layer = layers.Linear(P, 2 * size(backend), 3, P_W=Partition((1, size(backend))))
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
    raised(PartitionError, lambda: layers.Linear(row, 2, 2, P_W=row))
    P = Partition((1, 1, n))
    raised(PartitionError, lambda: layers.Conv1d(P, 6, 6, 1, P_W=Partition((n,))))
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
