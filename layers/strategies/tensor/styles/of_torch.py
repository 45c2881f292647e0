"""Styles of torch.distributed.tensor.parallel as those of linop: the same names, and layouts by
``Replicate()`` and ``Shard(dim)``. Outputs that torch has as DTensors are blocks here, whose
lengths are followed; so ``use_local_output`` says nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Module

from linop.errors import ArgumentError
from linop.spaces.decomposition import REPLICATED
from linop.strategies.tensor.layouts import layout_of
from linop.strategies.tensor.styles.cut import ColwiseParallel, RowwiseParallel
from linop.strategies.tensor.styles.kept import (
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    SequenceParallel,
)
from linop.strategies.tensor.styles.style import Style

_MODULE = "torch.distributed.tensor.parallel"


def is_torchs(style: Any) -> bool:
    """True for a style of torch, or of a class derived from one."""
    return not isinstance(style, Style) and any(
        one.__name__ == "ParallelStyle" and one.__module__.startswith(_MODULE)
        for one in type(style).__mro__
    )


def translated(style: Any, module: Module, name: str) -> Style:
    """The style of linop that computes what one of torch does.

    Args:
        module, name: that it is for.

    Raises:
        ArgumentError: there is none, as for classes of others; or a layout is none of linop's.
    """
    kind = type(style)
    known = _TRANSLATIONS.get(kind.__name__) if kind.__module__.startswith(_MODULE) else None
    if known is None:
        raise ArgumentError(
            f"{name!r}: {kind.__module__}.{kind.__name__} given; of the styles of {_MODULE} "
            f"{', '.join(_TRANSLATIONS)} are known: give one of these, or of linop.strategies"
        )
    return known(style, module, name)


def _column(style: Any, module: Module, name: str) -> Style:
    (given,), (wanted,) = style.input_layouts, style.output_layouts
    return ColwiseParallel(*_layouts(name, input_layouts=given, output_layouts=wanted))


def _row(style: Any, module: Module, name: str) -> Style:
    (given,), (wanted,) = style.input_layouts, style.output_layouts
    layouts = _layouts(name, input_layouts=given, output_layouts=wanted)
    if isinstance(module, torch.nn.Embedding) and layouts[0] is not REPLICATED:
        raise ArgumentError(
            f"{name!r}: RowwiseParallel with input_layouts={given!r}, which is torch's default, of "
            f"an Embedding, whose indices all workers have; input_layouts=Replicate() expected"
        )
    return RowwiseParallel(*layouts)


def _sequence(style: Any, module: Module, name: str) -> Style:
    (sharding,) = style.sequence_sharding
    return SequenceParallel(int(sharding.dim))


def _input(style: Any, module: Module, name: str) -> Style:
    return PrepareModuleInput(
        _each(style.input_layouts, name, "input_layouts"),
        _each(style.desired_input_layouts, name, "desired_input_layouts"),
        _by_name(style.input_kwarg_layouts, name),
        _by_name(style.desired_input_kwarg_layouts, name),
    )


def _output(style: Any, module: Module, name: str) -> Style:
    return PrepareModuleOutput(
        _each(style.output_layouts, name, "output_layouts"),
        _each(style.desired_output_layouts, name, "desired_output_layouts"),
    )


def _both(style: Any, module: Module, name: str) -> Style:
    given = _input(style.prepare_module_input, module, name)
    result = _output(style.prepare_module_output, module, name)
    return PrepareModuleInputOutput(**vars(given), **vars(result))


def _layouts(name: str, **given: Any) -> list[Any]:
    return [layout_of(one, f"{name!r}: {what}") for what, one in given.items()]


def _each(given: Any, name: str, what: str) -> Any:
    """Layouts of several tensors; None for one that is left as it is."""
    found = tuple(
        None if one is None else layout_of(one, f"{name!r}: {what}") for one in given or ()
    )
    return found[0] if len(found) == 1 else found


def _by_name(given: Any, name: str) -> Any:
    if not given:
        return None
    return {key: _each((one,), name, f"layout of {key!r}") for key, one in given.items()}


_TRANSLATIONS: dict[str, Callable[[Any, Module, str], Style]] = {
    "ColwiseParallel": _column,
    "RowwiseParallel": _row,
    "SequenceParallel": _sequence,
    "PrepareModuleInput": _input,
    "PrepareModuleInputOutput": _both,
    "PrepareModuleOutput": _output,
}
