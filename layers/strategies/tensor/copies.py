"""Whole parameters of a module that computes with blocks: used as independent copies while it runs.

The module stays, of whatever class it is. Its parameters are `REPLICATED` in states and for
optimizers; in forward it has them by way of E, of which the adjoint is the all-reduce of their
gradients: these are the same on all workers. Nothing moves in forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from linop.layers.layer import Layer
from linop.spaces.decomposition import COPIES, REPLICATED
from linop.strategies.interrupted import end_if_interrupted
from linop.strategies.mesh import Axis
from linop.strategies.tensor.conversions import first_tensor, held, hold, with_first
from linop.strategies.tensor.layouts import Layout
from linop.strategies.tensor.modules.layer import Redistribute

_SWAPPED = "linop_parameters"
"""Attribute of a module that computes: parameters that it had, to be put back."""
Held = list[tuple[Module, str, Any]]


def use_copies(
    module: Module, axis: Axis, dim: int | None, input: Layout | None, output: Layout | None
) -> Module:
    """The module, with hooks that give it copies of its parameters.

    Args:
        dim: the dimension of its input that is split; None: any.
        input, output: layouts of its first input and of its output; None: split along `dim`.
    """
    hold(module, "parameters", [Redistribute(axis, REPLICATED, COPIES)])
    if dim is not None:
        if input is not None and input != dim:
            hold(module, "cut", [Redistribute(axis, input, dim)])
        if output is not None and output != dim:
            hold(module, "laid out", [Redistribute(axis, dim, output)])
    module.__dict__["linop_split"] = dim
    module.register_forward_pre_hook(_enter, with_kwargs=True)
    module.register_forward_hook(_leave, always_call=True)
    end_if_interrupted(module, _open, _put_back)
    return module


def _enter(module: Module, args: Any, kwargs: Any) -> Any:
    (embed,) = held(module, "parameters")
    cut = held(module, "cut")
    types = None if embed.calls is None else embed.calls.types
    if cut:
        args, kwargs = with_first(args, kwargs, cut[0](first_tensor(args, kwargs)))
    elif types is not None and module.__dict__["linop_split"] is not None:
        types.check([module.__dict__["linop_split"]], [first_tensor(args, kwargs)])
    found = [*_parameters(module)]
    kinds = [(same, _copies(embed, same)) for same in _by_kind(found)]
    module.__dict__.setdefault(_SWAPPED, []).append(found)
    for same, copies in kinds:
        for (owner, name, _), copy in zip(same, copies, strict=True):
            owner._parameters[name] = copy  # type: ignore[assignment]
    return args, kwargs


def _open(module: Module) -> int:
    return len(module.__dict__.get(_SWAPPED, ()))


def _put_back(module: Module) -> None:
    for found in module.__dict__.get(_SWAPPED, [])[-1:]:
        for owner, name, p in found:
            owner._parameters[name] = p
        module.__dict__[_SWAPPED].pop()


def _leave(module: Module, args: Any, result: Any) -> Any:
    _put_back(module)
    laid_out = held(module, "laid out")
    return laid_out[0](result) if laid_out and result is not None else result


def _parameters(module: Module) -> Iterator[tuple[Module, str, Any]]:
    """Parameters of plain modules; parallel ones have their own ways."""
    for owner in module.modules():
        if not isinstance(owner, Layer):
            for name, p in owner._parameters.items():
                if p is not None:
                    yield owner, name, p


def _by_kind(found: Held) -> list[Held]:
    """Parameters in groups, each of which travels in one message."""
    kinds: dict[Any, Held] = {}
    for one in found:
        p = one[2]
        kinds.setdefault((p.dtype, p.device, p.requires_grad), []).append(one)
    return [*kinds.values()]


def _copies(embed: Redistribute, same: Held) -> Sequence[Tensor]:
    tensors = [p for _, _, p in same]
    if not tensors[0].requires_grad:
        return tensors
    if len(tensors) == 1:
        return [embed(tensors[0])]
    whole = embed(torch.cat([p.flatten() for p in tensors]))
    parts = whole.split([p.numel() for p in tensors])
    return [part.view(p.shape) for part, p in zip(parts, tensors, strict=True)]
