"""Mixtures of experts in graphs of torch's compiler and its export: contracts for ranks. Needs
torch."""

from __future__ import annotations

import gc
from typing import Any

import torch

import linop
from linop import Partition, TensorSpace
from linop.backends import Backend
from linop.backends.autograd.kept_graphs import _RECORDED
from linop.errors import BackendError
from support.contracts.plans import mine
from support.layers.cases import WIDE, block
from support.layers.mixtures import Mixture

Tensor = Any


def net_of(case: Mixture, backend: Backend) -> Any:
    net = linop.layers.MixtureOfExperts(
        Partition((len(case.lengths),)),
        case.features,
        case.hidden,
        case.experts,
        case.k,
        case.factor,
        case.normalize,
        dtype=WIDE,
    )
    for name, whole in case.parameters().items():
        if (p := getattr(net, name)) is not None:
            p.data.copy_(whole[net.spaces[name].slices(mine(backend))])
    return net


def blocks(case: Mixture, backend: Backend) -> list[Tensor]:
    """This worker's tokens, of three calls, which go to other experts."""
    P = Partition((len(case.lengths),))
    X = TensorSpace(case.tokens().shape, P, sizes={0: case.lengths})
    each = [case.tokens() * torch.tensor([1, turn, turn]) for turn in (1, -1, 3)]
    return [block(X, whole, backend, gradient=True) for whole in each]


def found_by(net: Any, call: Any, case: Mixture, backend: Backend) -> list[Tensor]:
    """Results, losses and gradients of calls."""
    found = []
    for x in blocks(case, backend):
        net.zero_grad()
        y, losses = call(x)
        total = (y * y.detach().cos()).sum() + 0.3 * losses.balance + 0.2 * losses.z
        total.backward()
        gradients = [x.grad, *(p.grad for p in net.parameters())]
        found += [y.detach(), *(one.detach() for one in losses), *gradients]
    return found


def is_eager(backend: Backend, case: Mixture) -> None:
    """Results, losses and gradients have the bits of eager calls, for routings that change."""
    torch.compiler.reset()
    eager, other, third = (net_of(case, backend) for _ in range(3))
    call = torch.compile(other, fullgraph=True, backend="aot_eager")
    wanted = found_by(eager, lambda x: eager(x, losses=True), case, backend)
    given = blocks(case, backend)[0].detach()
    program = torch.export.export(third, (given,), {"losses": True}).module()
    for net, way in (other, call), (program, program):
        found = found_by(net, lambda x, way=way: way(x, losses=True), case, backend)
        for a, b in zip(wanted, found, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b), (a, b)


def is_forgotten(backend: Backend) -> None:
    """The records of a forward are gone with the graph: after backward, and without one; and saved
    tensors that are copies are an error."""
    torch.compiler.reset()
    case = Mixture((3,) * (backend.workers or 1))
    net = net_of(case, backend)
    call = torch.compile(net, fullgraph=True, backend="aot_eager")
    x = blocks(case, backend)[0]
    for _ in range(2):
        y = call(x)
        assert len(_RECORDED) == 1
        y.sum().backward()
        del y
        gc.collect()
        assert not _RECORDED
    y, z = call(x), call(x)
    assert len(_RECORDED) == 2
    (y.sum() + z.sum()).backward()
    del y, z
    with torch.no_grad():
        call(x)
    gc.collect()
    assert not _RECORDED
    with torch.autograd.graph.save_on_cpu():
        y = call(x)
    y.sum().backward()  # on a CPU they are the same
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x):
        y = call(x)
    try:
        y.sum().backward()
    except BackendError as error:
        assert "what its forward recorded is gone" in str(error), str(error)
    else:
        raise AssertionError("no error")


def serves_compilers(backend: Backend) -> None:
    """Inside of a net, by torch's own compiler, too, which computes some values again in backward
    and puts others in their memory; and in autocast."""
    case = Mixture((6,) * (backend.workers or 1), features=8, hidden=4)
    for compiler, kind, limit in ("inductor", WIDE, 1e-12), ("aot_eager", torch.float32, 0.0):
        torch.compiler.reset()
        results = []
        for compiled in False, True:
            torch.manual_seed(0)
            net = torch.nn.Sequential(
                torch.nn.Linear(8, 8), torch.nn.Tanh(), net_of(case, backend), torch.nn.Linear(8, 8)
            ).to(kind)
            call = torch.compile(net, fullgraph=True, backend=compiler) if compiled else net
            found = []
            for turn in range(2):
                x = torch.linspace(-1, 1 + turn, 48).view(6, 1, 8).to(kind)
                net.zero_grad()
                with torch.autocast("cpu", enabled=kind is torch.float32):
                    y = call(x * (1 + mine(backend)))
                y.square().sum().backward()
                found += [y.detach(), *(p.grad for p in net.parameters())]
            results.append(found)
        for a, b in zip(*results, strict=True):
            assert a.dtype is b.dtype, (a.dtype, b.dtype)
            assert (a - b).abs().max() <= limit * a.abs().max(), (compiler, a, b)
