"""Sharded parameters under checkpoints, others' hooks and prefetch: contracts for threads and
ranks."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torchs

from linop.backends.engine.base import Backend
from linop.errors import ArgumentError
from linop.strategies import (
    Axis,
    DataParallel,
    Mesh,
    ShardedOptimizer,
    checkpoint,
    full_state_dict,
    fully_shard,
)
from support.strategies.data.replicas import Case, same
from support.strategies.data.shards import slice_of, units, weak
from support.strategies.pipelines.pipelines import squares, values

Tensor = Any
WIDTH, LAYERS = 8, 4


def chain(layers: int = LAYERS) -> Any:
    """Linear layers, the same on all workers."""
    net = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH).double() for _ in range(layers)))
    with torch.no_grad():
        for k, p in enumerate(net.parameters()):
            p.copy_(values(*p.shape, seed=k))
    return net


def sharded(stage: int = 3, prefetch: int = 0, layers: int = LAYERS) -> Any:
    """A chain whose layers are units."""
    net, axis = chain(layers), Mesh(dp=-1)["dp"]
    for layer in net:
        fully_shard(layer, axis, reshard_after_forward=stage == 3, prefetch=prefetch)
    return net


class Inside(torch.nn.Module):
    """A module that checkpoints its parts, whose parameters are of one unit."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.net, self.reentrant = chain(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.net:
            x = torchs(layer, x, use_reentrant=self.reentrant)
        return x


def survives_checkpoints(backend: Backend, stages: Sequence[int] = (2, 3)) -> None:
    """Gradients are those without checkpoints, around units and inside; each unit is gathered once
    more in backward, and neither whole parameters nor activations are kept."""
    me, axis = backend.worker or 0, Mesh(dp=-1)["dp"]
    x = [values(3, WIDTH, seed=10 + w) for w in range(axis.size)]
    twin = chain()
    sum(squares(twin(one), 0) for one in x).backward()
    around: list[Callable[[Any], Any]] = [
        checkpoint,
        lambda net: lambda y: torchs(net, y, use_reentrant=False),
        lambda net: lambda y: torchs(net, y, use_reentrant=True),
    ]
    for stage in stages:
        for number, make in enumerate(around):
            net, seen = sharded(stage), []
            net[1].register_forward_pre_hook(lambda m, y, to=seen: to.append(weak(m.weight)))
            net[2].register_forward_pre_hook(lambda m, y, to=seen: to.append(weak(y[0])))
            loss = squares(make(net)(x[me].clone().requires_grad_()), 0)
            # A checkpoint of every layer keeps their inputs.
            assert not seen[0]() or stage == 2, (stage, number)
            assert not seen[1]() or number == 0, (stage, number)
            before = [unit._bridge.plan.counters.calls for _, unit in units(net)]
            loss.backward()
            calls = [unit._bridge.plan.counters.calls for _, unit in units(net)]
            gathered = {b - a for a, b in zip(before, calls, strict=True)}
            # Reentrant ones make a graph of their own, which gives up its parameters again.
            assert gathered == {2 if (stage, number) == (3, 2) else 1}, (stage, number, gathered)
            has_gradients_of(twin, net, axis)
        inside = fully_shard(Inside(False), axis, reshard_after_forward=stage == 3)
        squares(inside(x[me]), 0).backward()
        has_gradients_of(twin, inside, axis, "net.")
        lost = fully_shard(Inside(True), axis, reshard_after_forward=stage == 3)
        with pytest.raises(ArgumentError, match="use_reentrant=False"):
            squares(lost(x[me].clone().requires_grad_()), 0).backward()


def has_gradients_of(twin: Any, net: Any, axis: Any, prefix: str = "") -> None:
    rows, wanted = slice_of(net, axis), dict(twin.named_parameters())
    for name, p in net.named_parameters():
        whole = wanted[name.removeprefix(prefix)].grad
        same(Case(whole=False), p.grad, rows(name, whole), name)


def differentiates_gradients(backend: Backend) -> None:
    """Gradients of the squares of gradients, which are summed or averaged each time."""
    me, axis = backend.worker or 0, Mesh(dp=-1)["dp"]
    x = [values(3, WIDTH, seed=20 + w) for w in range(axis.size)]
    drawn = itertools.product((False, True), (False, True), (0, 1))
    for averages, reshards, ahead in drawn:
        n, twin, net = axis.size if averages else 1, chain(2), chain(2)
        every = list(twin.parameters())
        loss = sum(twin(one).pow(3).mean() for one in x) / n
        first = torch.autograd.grad(loss, every, create_graph=True)
        second = torch.autograd.grad(sum(one.square().sum() for one in first), every)
        for layer in net:
            options: Any = {"reshard_after_forward": reshards, "prefetch": ahead}
            fully_shard(layer, axis, reduction="mean" if averages else "sum", **options)
        names, mine = zip(*net.named_parameters(), strict=True)
        rows, case = slice_of(net, axis), Case(whole=False)
        found = torch.autograd.grad(net(x[me]).pow(3).mean(), mine, create_graph=True)
        sum(one.square().sum() for one in found).backward()
        for name, shard, part, g, h in zip(names, mine, found, first, second, strict=True):
            what = f"of {name}, {averages=}, {reshards=}, {ahead=}"
            same(case, part.detach(), rows(name, g.detach()), f"gradient {what}")
            same(case, shard.grad, rows(name, h) / n, f"gradient of gradients {what}")


def leaves_hooks_to_others(backend: Backend) -> None:
    """Activations inside a unit pass the hooks around it; whole parameters do not."""
    seen: list[tuple[int, ...]] = []
    net, x = sharded(), values(3, WIDTH, seed=1)

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tuple(tensor.shape))
        return tensor.numpy(force=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, torch.from_numpy):
        loss = squares(net(x), 0)
    assert seen.count((3, WIDTH)) >= LAYERS, seen
    assert (WIDTH, WIDTH) not in seen, seen
    loss.backward()
    twin = chain()
    (squares(twin(x), 0) * (backend.workers or 1)).backward()
    has_gradients_of(twin, net, Mesh(dp=-1)["dp"])


class Complex(torch.nn.Module):
    """A module that uses conjugate, negated and real views of a complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.complex(values(5, seed=1), values(5, seed=2)))

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        y = (w * w.conj()).real * x + w.conj().imag.pow(3)[1:].sum()
        return y + w.real.square() + torch.view_as_real(w)[:2].square().sum()


def keeps_views_of_complex_parameters(backend: Backend) -> None:
    """Backward has the views that forward has saved: of the same dtype, and as conjugate."""
    x, twin = values(backend.workers, 5, seed=3), Complex()
    twin(x).sum().backward()
    for stage in (2, 3):
        axis = Mesh(dp=-1)["dp"]
        net = fully_shard(Complex(), axis, reshard_after_forward=stage == 3)
        net(x[axis.index, None]).sum().backward()
        has_gradients_of(twin, net, axis)


def refuses_other_uses(backend: Backend) -> None:
    """Errors instead of results of shards, on every worker."""
    axis = Mesh(dp=-1)["dp"]
    net = chain()
    early = torch.optim.SGD(net.parameters(), lr=1.0)
    fully_shard(net, axis)
    x = values(1, WIDTH, seed=1)
    with pytest.raises(ArgumentError, match="make the optimizer after fully_shard"):
        early.step()
    with pytest.raises(ArgumentError, match="called outside of that module's forward"):
        net[0](x)
    net(x)
    with pytest.raises(ArgumentError, match=r"cannot be pickled: .*full_module\(net\)"):
        pickle.dumps(net)
    refuses_replaced_parameters(axis, x)
    copies = DataParallel(chain(), axis)
    copies.module.append(torch.nn.Linear(WIDTH, 2).double())
    with pytest.raises(ArgumentError, match=r"\['4.weight', '4.bias'\] are not those"):
        copies(x)
    copies = DataParallel(chain(), axis)
    optimizer = ShardedOptimizer(copies, axis, partial(torch.optim.SGD, lr=1.0))
    with copies.no_sync():
        squares(copies(x), 0).backward()
    with pytest.raises(ArgumentError, match="have not been summed"):
        optimizer.step()
    copies.reduce_gradients()
    optimizer.step()
    with pytest.raises(ArgumentError, match="prefetch=-1"):
        fully_shard(chain(), axis, prefetch=-1)
    with pytest.raises(ArgumentError, match="mebibytes, from 0"):
        DataParallel(chain(), axis, bucket_cap_mb=float("nan"))


def refuses_replaced_parameters(axis: Axis, x: Tensor) -> None:
    """Parameters that are others than the strategy's, which nobody would use, or sum."""
    for wrap in (fully_shard, DataParallel):
        net = wrap(chain(), axis)
        doubled = {name: 2 * p.detach() for name, p in net.named_parameters()}
        if wrap is fully_shard and axis.size > 1:  # rows, and not whole parameters
            with pytest.raises(ArgumentError, match=r"0\.weight'.* are not th"):
                torch.func.functional_call(net, doubled, (x,))
        else:  # the user's own, whose gradients are the user's
            torch.func.functional_call(net, doubled, (x,))
        net(x)
        if wrap is DataParallel or axis.size == 1:
            net.load_state_dict(doubled)
            net(x)
            net.load_state_dict(doubled, assign=True)
        else:  # rows are no state
            with pytest.raises(ArgumentError, match="load_full_state_dict"):
                net.load_state_dict(doubled)
            net[3].bias = torch.nn.Parameter(doubled["3.bias"])
        with pytest.raises(ArgumentError, match=r"3\.bias'.* are not th"):
            net(x)


def converts(backend: Backend) -> None:
    """Modules that are converted after they were sharded have the gradients of their converted
    twin, and its state; also with shards in host memory, and gathered ahead."""
    axis, x = Mesh(dp=-1)["dp"], values(3, WIDTH, seed=10)
    for options in ({}, {"reshard_after_forward": False}, {"offload": True}, {"prefetch": 1}):
        net, twin = chain(), chain()
        for layer in net:
            fully_shard(layer, axis, **options)
        for kind in (torch.float64, torch.float32, torch.float64):
            net.to(kind)
            state = full_state_dict(net)
            for one in (net, twin.to(kind)):
                one.zero_grad()
                squares(one(x.to(kind)), 0).backward()
            rows = slice_of(net, axis)
            for (name, p), q in zip(net.named_parameters(), twin.parameters(), strict=True):
                assert torch.equal(state[name], q)
                assert p.grad.dtype is kind
                assert torch.allclose(p.grad, rows(name, axis.size * q.grad), rtol=1e-4)


def prefetches(backend: Backend, prefetch: int) -> None:
    """Results are bit for bit those without; so many more whole parameters are held, and not one
    gather more is made, in forward and in backward. A reduce-scatter is under way while backward
    computes the modules during which its gather was under way in forward."""
    me, layers = backend.worker or 0, 5
    x = values(3, WIDTH, seed=10 + me)
    found = []
    for ahead in (0, prefetch):
        net = sharded(3, ahead, layers)
        adam = torch.optim.Adam(net.parameters(), lr=2.0**-5)
        held: list[int] = []
        sums: list[list[int]] = []
        for layer in net:
            layer.register_forward_pre_hook(lambda *_, to=held, of=net: to.append(holds(of)))
            layer.register_forward_hook(partial(notes_sums, net, sums))
        losses = []
        for step in range(3):
            del held[:], sums[:]
            adam.zero_grad()
            calls = gathers(net)
            y = net(x)
            # Of the first forward the order is not known yet.
            known = ahead if step else 0
            assert held == [min(known, layers - 1 - k) + 1 for k in range(layers)], held
            y.register_hook(lambda _, to=held: to.clear())
            for layer in net:
                layer.weight.register_hook(lambda *_, to=held, of=net: to.append(holds(of)))
            squares(y, 0).backward()
            # The first layer's weight is not needed. A gradient is there when the backward of the
            # module has ended during whose forward its gather was started, or its own.
            at = [max(0, k - known) for k in reversed(range(layers))]
            wanted = [max(0, min(ahead, c - 1) + (known > 0)) if c else 0 for c in at]
            assert held[: layers - 1] == wanted[: layers - 1], (held, wanted)
            wanted_sums = [[*range(c + 1, min(c + known, layers - 1) + 1)] for c in range(layers)]
            assert sums == wanted_sums[::-1], (sums, wanted_sums)
            more = [b - a for a, b in zip(calls, gathers(net), strict=True)]
            assert more == [1, *[2] * (layers - 1)], more
            losses.append(squares(y, 0).item())
            for layer in net:
                layer.weight._backward_hooks = None
            adam.step()
        with torch.no_grad():  # stale gathers are not used
            losses.append(squares(net(x), 0).item())
            losses.append(squares(net[:2](x), 0).item())
            adam.step()
            losses.append(squares(net[2:](x), 0).item())
        squares(net(x), 0).backward()
        found.append((losses, [p.grad for p in net.parameters()], [*net.parameters()]))
    for one, other in zip(*found, strict=True):
        for a, b in zip(one, other, strict=True):
            assert a == b if isinstance(a, float) else a.tolist() == b.tolist()


def notes_sums(net: Any, to: list[list[int]], module: Any, x: Any, y: Tensor) -> None:
    """Before the backward of a module note the units whose reduce-scatter is under way."""

    def note(gradient: Tensor) -> None:
        plans = [unit._bridge.plan.H for _, unit in units(net)]
        to.append([k for k, plan in enumerate(plans) if plan.is_running])

    if y.requires_grad:
        y.register_hook(note)


def gathers(net: Any) -> list[int]:
    """Numbers of gathers, by unit."""
    return [unit._bridge.plan.counters.calls for _, unit in units(net)]


def holds(net: Any) -> int:
    """Units of which this worker has, or is gathering, whole parameters."""
    calls = [[known() for known in unit._calls] for _, unit in units(net)]
    return sum(
        unit._ahead is not None
        or bool(unit._open)
        or any(call is not None and call.whole is not None for call in its)
        for (_, unit), its in zip(units(net), calls, strict=True)
    )
