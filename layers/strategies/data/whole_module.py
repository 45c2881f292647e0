"""The model of one process, as a module, of one that is sharded, tensor or data parallel: to be
pickled, copied, or called by one worker."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from linop.errors import ArgumentError, expect
from linop.layers.layer import Layer
from linop.layers.parameters.partial_states import refuses_shards
from linop.strategies import sequential
from linop.strategies.data.batch_norm import as_torchs
from linop.strategies.data.data_parallel import DataParallel
from linop.strategies.data.sharded.fully_shard import full_state_dict
from linop.strategies.data.sharded.precision import Inputs
from linop.strategies.interrupted import drop_ends


class _Gone:
    """Stands for a unit, while its module is copied."""

    def __deepcopy__(self, memo: object) -> _Gone:
        return self


def full_module(module: Any) -> Any:
    """A copy of the sequential model, on every worker, with whole parameters and this worker's
    buffers: ``torch.save(full_module(net), path)`` writes what torch alone reads. Collective.

    Args:
        module: under `fully_shard`, `parallelize_module`, in it or in its submodules, or
            `DataParallel`, or several of them; in the copy `ContextParallel` is left out, too. Of
            tensor-parallel modules the copy is the sequential module as it was before, with its
            hooks, and with the parameters, buffers and modes of now.

    Raises:
        ArgumentError: it is no module; or it has layers of linop.layers, whose sequential model
            only the program knows: there `full_state_dict` gives its state.

    Example:
        >>> import copy
        >>> net, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
        >>> def program(backend):
        ...     mine = strategies.fully_shard(copy.deepcopy(net), strategies.Mesh(dp=2)["dp"])
        ...     whole = strategies.full_module(mine)  # a plain torch.nn.Linear
        ...     return type(whole.weight) is torch.nn.Parameter, torch.equal(whole(x), net(x))
        >>> linop.launch(program, workers=2)
        [(True, True), (True, True)]
    """
    net = expect("full_module: module", module, torch.nn.Module)
    while isinstance(net, DataParallel):
        net = net.module
    kept = sequential.kept_in(net)
    inside = {id(one) for module in kept.values() for one in module.modules()}
    parallel = [
        type(one).__name__
        for one in net.modules()
        if isinstance(one, Layer | DataParallel) and id(one) not in inside
    ]
    if parallel:
        raise ArgumentError(
            f"full_module: a {parallel[0]} inside of it is of all workers together; make a "
            f"sequential model, and load linop.strategies.full_state_dict(module)"
        )
    blocks = any(isinstance(one, Layer) or hasattr(one, "_linop_units") for one in net.modules())
    state = full_state_dict(net) if blocks else net.state_dict()
    memo = {id(one): sequential.sequential(one, name, state) for name, one in kept.items()}
    return without_units(net, lambda unit: [one.detach().clone() for one in unit.values()], memo)


def without_units(net: Any, values: Callable[[Any], Sequence[Tensor]], memo: dict[int, Any]) -> Any:
    """A copy of a module, of which nothing is sharded, and nothing is left of `fully_shard`.

    Args:
        values: of a unit: its whole parameters.
        memo: copies of other objects, by the originals' `id`.
    """
    gone = _Gone()
    for one in net.modules():
        for unit in getattr(one, "_linop_units", ()):
            memo[id(unit)] = gone
            for shard, whole in zip(unit.shards, values(unit), strict=True):
                memo[id(shard)] = torch.nn.Parameter(whole, requires_grad=shard.requires_grad)
    copied = copy.deepcopy(net, memo)
    for one in copied.modules():
        as_torchs(one)
        every = [v for name, v in vars(one).items() if "_hooks" in name and isinstance(v, dict)]
        ours = {key for hooks in every for key, hook in hooks.items() if _is_ours(hook)}
        for hooks in every:  # by the same numbers torch keeps how some are to be called
            for key in ours & hooks.keys():
                del hooks[key]
        drop_ends(one, _is_ours)
        if one.__dict__.pop("_linop_units", None) is not None:
            one.__dict__.pop("no_sync", None)
    return copied


def _is_ours(hook: Any) -> bool:
    inner = getattr(hook, "hook", hook)
    ours = isinstance(inner, Inputs) or refuses_shards(inner)
    owner = getattr(inner, "__self__", None)
    return ours or isinstance(owner, _Gone) or getattr(owner, "hooks_are_ours", False)
