"""Whole parameters for longer than a forward: for computations outside of forwards, and for
micro-batches whose gradients are summed over the workers once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from linop.errors import ArgumentError, expect


@contextmanager
def unsharded(module: Any) -> Iterator[None]:
    """Context in which a module has the whole parameters in place of its shards. Collective, at its
    begin and its end.

    All forwards and backwards inside use the same ones; gradients stay on this worker, and are
    summed over the workers once, at the end, and added to ``grad`` of the shards. So it is the
    ``no_sync`` of gradient accumulation, which `linop.strategies.fully_shard` gives the module as a
    method, and the place for computations with parameters outside of a forward. A worker holds all
    whole parameters and gradients until the end. Values that are changed inside are lost.

    Args:
        module: with parameters that `linop.strategies.fully_shard` has sharded, in it or in its
            submodules.

    Raises:
        ArgumentError: it has no such parameters; or, at the end, shards were changed inside, as by
            an optimizer's step.

    Example:
        Two micro-batches, whose gradients are summed over the workers once:

        >>> import copy
        >>> net, x = torch.nn.Linear(2, 2), torch.arange(8.0).view(4, 2)
        >>> def program(backend):
        ...     mine = strategies.fully_shard(copy.deepcopy(net), strategies.Mesh(dp=2)["dp"])
        ...     with strategies.unsharded(mine):
        ...         for row in x.chunk(2)[backend.worker]:
        ...             mine(row).sum().backward()
        ...         shape = tuple(mine.weight.shape)
        ...     return shape, mine.weight.grad.tolist()
        >>> linop.launch(program, workers=2)
        [((2, 2), [[12.0, 16.0]]), ((2, 2), [[12.0, 16.0]])]
    """
    modules = expect("unsharded: module", module, torch.nn.Module).modules()
    every = [unit for one in modules for unit in getattr(one, "_linop_units", ())]
    if not every:
        raise ArgumentError("unsharded: the module has no sharded parameters")
    units = [unit for unit in every if unit.held is None]  # others are an outer context's
    try:
        for unit in units:
            unit.hold()
        before = [unit.versions() for unit in units]
        yield
        for unit, versions in zip(units, before, strict=True):
            if unit.versions() != versions:
                raise ArgumentError(
                    f"unsharded: shards of {unit.name} were changed inside, where the whole "
                    f"parameters are those of the begin; update parameters after it"
                )
            unit.release()
            unit.reduce()
    finally:
        for unit in units:
            unit.forget()
