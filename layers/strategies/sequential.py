"""The sequential module that a parallel one was made of, kept without values: `full_module` gives a
copy of it the values that the parallel one has by then."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from linop.errors import ArgumentError

_KEPT = "_linop_sequential"


def outline(module: Module) -> Module | Exception:
    """A copy of a module without the values in its state: its parameters, and those of its buffers
    that ``state_dict`` has, are on the device "meta". The error, if it cannot be copied."""
    try:
        memo: dict[int, Any] = {
            id(p): torch.nn.Parameter(p.detach().to("meta"), p.requires_grad)
            for p in module.parameters()
        }
        for one in module.modules():  # `state_dict` itself is refused where a worker has blocks
            for key, x in one._buffers.items():
                if x is not None and key not in one._non_persistent_buffers_set:
                    memo[id(x)] = x.detach().to("meta")
        return copy.deepcopy(module, memo)
    except Exception as error:  # of any class of other people's
        return error.with_traceback(None)  # whose frames would keep the whole module


def keep(module: Module, sequential: Module | Exception) -> None:
    """Keep the outline of the sequential module with a parallel one, as no submodule of it; of
    several steps by which a module is made parallel, that before the first one."""
    vars(module).setdefault(_KEPT, sequential)


def kept_in(module: Module) -> dict[str, Module]:
    """Parallel submodules with an outline, by name; none that is in another one."""
    found: dict[str, Module] = {}
    for name, one in module.named_modules():
        if _KEPT in vars(one) and not any(_is_in(name, outer) for outer in found):
            found[name] = one
    return found


def _is_in(name: str, outer: str) -> bool:
    return not outer or name.startswith(f"{outer}.")


def sequential(module: Module, name: str, state: Mapping[str, Tensor]) -> Module:
    """The sequential module that one was made of, with values of now.

    Args:
        name: of the module, for messages and in the state's keys.
        state: that of the whole sequential model.

    Raises:
        ArgumentError: it could not be copied.
    """
    made = _bare(module, name, {})
    now = dict(module.named_modules())
    values: dict[int, Tensor] = {}
    prefix = f"{name}." if name else ""
    for path, owner in made.named_modules():
        other = now.get(path)
        own = f"{prefix}{path}." if path else prefix
        if other is not None:
            owner.training = other.training
        for key, p in owner._parameters.items():
            if p is not None:
                if id(p) not in values:  # parameters that are one stay one
                    trained = _trained(other, key, p)
                    values[id(p)] = torch.nn.Parameter(state[own + key].clone(), trained)
                owner._parameters[key] = values[id(p)]
        for key, x in owner._buffers.items():
            if own + key in state:
                owner._buffers[key] = values.setdefault(id(x), state[own + key].clone())
            elif other is not None and isinstance(mine := other._buffers.get(key), Tensor):
                owner._buffers[key] = mine.clone()
    return made


def _bare(module: Module, name: str, known: dict[int, Module]) -> Module:
    """A copy of the outline of a module, in which those of its submodules take their places."""
    kept = vars(module).get(_KEPT)
    if isinstance(kept, Exception):
        raise ArgumentError(
            f"full_module: {name or 'the module'} could not be copied when it was made parallel "
            f"({type(kept).__name__}: {kept}); make a sequential model, and load "
            f"linop.strategies.full_state_dict(module)"
        ) from kept
    if id(module) in known:
        return known[id(module)]
    made: Module = module if kept is None else copy.deepcopy(kept)
    known[id(module)] = known[id(made)] = made
    for key, child in made.named_children():
        setattr(made, key, _bare(child, f"{name}.{key}".lstrip("."), known))
    return made


def _trained(module: Module | None, key: str, before: Tensor) -> bool:
    """True if a parameter requires a gradient now; as before, where this worker has no block."""
    p = None if module is None else module._parameters.get(key)
    return before.requires_grad if p is None else p.requires_grad
