"""Layouts along chains of modules (`torch.nn.Sequential`), compared before anything runs. Those of
other modules are compared at their first call (`linop.strategies.tensor.types`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from linop.errors import PartitionError
from linop.spaces.decomposition import REPLICATED
from linop.strategies.tensor.conversions import held
from linop.strategies.tensor.layouts import Layout, in_words
from linop.strategies.tensor.modules.layer import ParallelLayer
from linop.strategies.tensor.styles.kept import ELEMENTWISE

_Found = tuple[Layout | None, str]


def check_chains(net: Any, inputs: Layout) -> None:
    """Compare the output of each module of a Sequential with the input of the next one.

    Args:
        inputs: layout of the net's input.

    Raises:
        PartitionError: they differ.
    """
    for path, chain in net.named_modules():
        if type(chain) is not torch.nn.Sequential:
            continue
        given = inputs if chain is net else None
        layout, before = _prepared(chain, "inputs", path, (given, "the input"))
        for name, module in chain._modules.items():
            where = f"{path}.{name}".lstrip(".")
            layout, before = _prepared(module, "inputs", where, (layout, before))
            if isinstance(module, ParallelLayer):
                if layout is not None and _differ(layout, module.layouts[0]):
                    _refuse(where, in_words(module.layouts[0]), before, layout)
                layout = module.output_layout
            elif held(module, "parameters"):  # its functions are followed
                layout = None
            elif not isinstance(module, (*ELEMENTWISE, torch.nn.Dropout)):
                if layout not in (None, REPLICATED) and [*module.parameters(recurse=False)]:
                    _refuse(
                        f"{where} ({type(module).__name__})", in_words(REPLICATED), before, layout
                    )
                layout = None
            layout, before = _prepared(module, "output", where, (layout, where))


def _prepared(module: Any, what: str, where: str, found: _Found) -> _Found:
    """The layout of a chain's tensor, and what has given it that, after the conversions of a
    module: those of its inputs, by position or by name, or of its output."""
    kinds = (what, "options") if what == "inputs" else (what,)
    every = [one for kind in kinds for one in _values(held(module, kind)) if one is not None]
    if not every:
        return found
    style = "PrepareModuleInput" if what == "inputs" else "PrepareModuleOutput"
    return every[0].output_layout, f"{style} of {where or 'the net'}"


def _values(converts: Any) -> list[Any]:
    return [*(converts.values() if isinstance(converts, Mapping) else converts)]


def _differ(one: Layout, other: Layout) -> bool:
    """True if layouts differ in tensors of any number of dimensions."""
    if isinstance(one, int) and isinstance(other, int):
        return one != other and (one < 0) == (other < 0)
    return one is not other


def _refuse(where: str, wanted: str, before: str, found: Layout | None) -> None:
    raise PartitionError(
        f"parallelize_module: {where}: an input {wanted} expected; that of {before} is "
        f"{in_words(found)}. Name the module in the plan, or give input_layouts= or output_layouts="
    )
