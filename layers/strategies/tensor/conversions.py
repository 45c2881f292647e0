"""Conversions of inputs and outputs of modules that stay as they are: kept in an attribute, applied
by hooks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import Module

from linop.errors import ArgumentError
from linop.strategies.tensor.modules.layer import ParallelLayer, Redistribute

CONVERSIONS = "linop_conversions"
"""Attribute of modules with conversions of inputs or outputs."""


def hold(module: Module, what: str, converts: Any) -> None:
    """Keep conversions in a module's attributes, where its copies have them too; not as submodules,
    since they have no place in its state.

    Args:
        converts: a sequence of conversions, of which some may be None; or a dictionary.
    """
    module.__dict__.setdefault(CONVERSIONS, {})[what] = converts


def held(module: Module, what: str) -> Any:
    """The conversions under a name; none, if there are none."""
    return module.__dict__.get(CONVERSIONS, {}).get(what, ())


def parallel_layers(net: Module) -> list[ParallelLayer]:
    """All parallel modules and conversions in a net."""
    every: list[Any] = list(net.modules())
    for module in net.modules():
        for converts in module.__dict__.get(CONVERSIONS, {}).values():
            every.extend(converts.values() if isinstance(converts, Mapping) else converts)
    return [module for module in every if isinstance(module, ParallelLayer)]


def convert_inputs(module: Module, args: Any, kwargs: Any) -> Any:
    """Hook before a forward: inputs by position and by name in their new layouts."""
    converts, named = held(module, "inputs"), dict(held(module, "options"))
    kind = type(module).__name__
    if len(args) < len(converts):
        hint = ", ".join(kwargs) or "none"
        raise ArgumentError(
            f"PrepareModuleInput: {kind} called with {len(args)} positional inputs; "
            f"{len(converts)} are converted: pass those by position, or give their layouts as "
            f"input_kwarg_layouts= and desired_input_kwarg_layouts=; by name it has {hint}"
        )
    done = [_converted(convert, x) for convert, x in zip(converts, args, strict=False)]
    for name, convert in named.items():
        if name not in kwargs:
            raise ArgumentError(
                f"PrepareModuleInput: {kind} called without an input {name!r} by name; it has "
                f"{len(args)} inputs by position, and {', '.join(kwargs) or 'none'} by name: for "
                f"those by position give input_layouts= and desired_input_layouts="
            )
        kwargs = {**kwargs, name: _converted(convert, kwargs[name])}
    return (*done, *args[len(done) :]), kwargs


def convert_output(module: Module, args: Any, result: Any) -> Any:
    """Hook after a forward: its output, or each member of a tuple, in its new layout."""
    converts = held(module, "output")
    if not isinstance(result, tuple | list):
        return _converted(converts[0], result)
    if len(result) < len(converts):
        raise ArgumentError(
            f"PrepareModuleOutput: {type(module).__name__} returns {len(result)} outputs; "
            f"{len(converts)} are converted"
        )
    done = [_converted(convert, x) for convert, x in zip(converts, result, strict=False)]
    return type(result)((*done, *result[len(done) :]))


def _converted(convert: Redistribute | None, x: Any) -> Any:
    return x if convert is None or x is None else convert(x)


def first_tensor(args: Any, kwargs: Any) -> Any:
    """The first input of a call, by position or by name."""
    for x in (*args, *kwargs.values()):
        if isinstance(x, torch.Tensor):
            return x
    raise ArgumentError("SequenceParallel: a module called without a tensor")


def with_first(args: Any, kwargs: Any, value: Any) -> tuple[Any, Any]:
    """The inputs of a call, with another first tensor."""
    for k, x in enumerate(args):
        if isinstance(x, torch.Tensor):
            return (*args[:k], value, *args[k + 1 :]), kwargs
    name = next(name for name, x in kwargs.items() if isinstance(x, torch.Tensor))
    return args, {**kwargs, name: value}
