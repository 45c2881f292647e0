"""torch.func's transforms of nets whose parameters are sharded: contracts. Needs torch.

Ranks import this module, and no test.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import func, nn

from linop.backends import Backend
from linop.strategies import Mesh, full_state_dict, fully_shard, unsharded
from support.layers.cases import normal, same

Tensor = Any
Given = dict[str, Tensor]

OF_INPUTS: dict[str, Callable[[Any, Tensor], Any]] = {
    "grad": lambda net, x: func.grad(lambda y: net(y).square().sum())(x),
    "vmap": lambda net, x: torch.vmap(net)(x),
    "vmap of grad": lambda net, x: torch.vmap(func.grad(lambda y: net(y).square().sum()))(x),
    "jvp": lambda net, x: func.jvp(net, (x,), (x.cos(),))[1],
    "vjp": lambda net, x: func.vjp(net, x)[1](x[:, :2])[0],
    "jacrev": lambda net, x: func.jacrev(net)(x[0]),
    "jacfwd": lambda net, x: func.jacfwd(net)(x[0]),
    "hessian": lambda net, x: func.hessian(lambda y: net(y).square().sum())(x[0]),
    "grad of grad": lambda net, x: func.grad(
        lambda y: func.grad(lambda z: net(z).square().sum())(y).square().sum()
    )(x),
}
"""Transforms of the net."""
OF_PARAMETERS: dict[str, Callable[[Any, Given, Tensor], Any]] = {
    "call": func.functional_call,
    "grad": lambda net, given, x: func.grad(
        lambda p: func.functional_call(net, p, (x,)).square().sum()
    )(given)["0.weight"],
    "each row": lambda net, given, x: torch.vmap(
        func.grad(lambda p, row: func.functional_call(net, p, (row[None],)).square().sum()),
        (None, 0),
    )(given, x)["2.bias"],
}
"""Of functions of whole parameters."""


def plain() -> Any:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def sharded(backend: Backend, base: Any, units: bool, **options: Any) -> Any:
    axis, net = Mesh(backend, dp=-1)["dp"], copy.deepcopy(base)
    for layer in (net[0], net[2]) if units else ():
        fully_shard(layer, axis, reduction="sum", **options)
    return net if units else fully_shard(net, axis, reduction="sum", **options)


FORWARD = frozenset(("jvp", "jacfwd", "hessian"))
"""Transforms in forward mode, whose levels are one in torch for all threads."""


def of_inputs(
    backend: Backend, base: Any, name: str, units: bool, reshards: bool, ahead: int
) -> None:
    """Results, and gradients of the shards of what is computed of them, are those of the plain
    net."""
    transform, x, twin = OF_INPUTS[name], normal((5, 3), 1), copy.deepcopy(base)
    wanted = transform(twin, x)
    wanted.sin().sum().backward()
    workers = backend.workers or 1
    options = {"reshard_after_forward": reshards, "prefetch": ahead}
    net = sharded(backend, base, units, **options)
    found = transform(net, x)
    same(found, wanted, 1e-12)
    (found.sin().sum() / workers).backward()
    whole = dict(twin.named_parameters())
    for key, p in net.named_parameters():
        grad = whole[key].grad
        if grad is None:  # the last bias, of a derivative
            assert p.grad is None
            continue
        part = grad.tensor_split(workers)[backend.worker or 0]
        same(p.grad.as_subclass(torch.Tensor), part, 1e-12)
    net(x).sum().backward()  # and nothing is left
    with unsharded(net):
        same(transform(net, x), wanted, 1e-12)


def of_parameters(backend: Backend, base: Any, name: str, units: bool) -> None:
    """Functions of whole parameters are those of the plain net, and nothing is sent."""
    # functional_call changes the module for its time: threads have one each.
    transform, x, twin = OF_PARAMETERS[name], normal((5, 3), 1), copy.deepcopy(base)
    net = sharded(backend, base, units)
    given = {key: value * 2 for key, value in full_state_dict(net).items()}
    same(transform(net, given, x), transform(twin, given, x), 1e-12)
    own = dict(net.named_parameters())
    same(func.functional_call(net, own, (x,)), twin(x), 1e-12)
