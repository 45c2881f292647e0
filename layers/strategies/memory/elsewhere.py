"""Estimates of parameters that `linop.strategies.offload` has in host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from linop.errors import ArgumentError
from linop.strategies.data.data_parallel import DataParallel

Away = Sequence[tuple[str, int]]
"""Names of modules whose parameters are in host memory, each moved by itself, and the number that
are brought in ahead."""


def parameters_away(net: Any, strategy: str) -> Away:
    """The modules of a net whose parameters are in host memory, in their order.

    Raises:
        ArgumentError: parameters are sharded over workers, or data parallel; or they are in host
            memory, and to be sharded.
    """
    found = []
    for name, module in net.named_modules():
        units = getattr(module, "_linop_units", ())
        if isinstance(module, DataParallel) or any(unit.axis.size > 1 for unit in units):
            raise ArgumentError(
                f"estimate: {name or 'the net'} is parallel already; the sequential module expected"
            )
        if units:
            found.append((name, max(unit.prefetch for unit in units)))
    if found and strategy not in ("dp", "tp", "pp"):
        raise ArgumentError(
            f"estimate: strategy {strategy!r} of parameters that offload has in host memory, as "
            f"those of {found[0][0] or 'the net'!r}, which cannot be sharded again; 'dp', 'tp' or "
            f"'pp' expected, or a net whose activations alone are offloaded"
        )
    return found


def inside(away: Away, name: str) -> Away:
    """The modules inside of one, by their names in it."""
    return [
        (one.removeprefix(name).removeprefix("."), ahead)
        for one, ahead in away
        if one == name or one.startswith(f"{name}.")
    ]


def moved(
    memory: Any, net: Any, away: Away, optimizer: Any, state: Callable[[Sequence[Tensor], Any], int]
) -> Any:
    """A `Memory` in which what is in host memory counts there.

    Args:
        memory: as if all parameters were in the memory in which the program computes.
        net: on the meta device, without units.
        state: bytes of an optimizer's state for parameters.
    """
    if not away:
        return memory
    modules = dict(net.named_modules())
    units = [[*modules[name].parameters()] for name, _ in away]
    every = list(dict.fromkeys(p for unit in units for p in unit))
    trained = [p for p in every if p.requires_grad]
    parameters, gradients = _bytes(every), _bytes(trained)
    optimized = state(trained, optimizer)
    ahead = [n for _, n in away]
    windows = [sum(map(_bytes, units[k : k + n + 1])) for k, n in enumerate(ahead)]
    return replace(
        memory,
        parameters=memory.parameters - parameters,
        gradients=memory.gradients - gradients,
        optimizer=memory.optimizer - optimized,
        whole=memory.whole + max(windows),
        host=memory.host + parameters + gradients + optimized,
    )


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)
