"""Linear layers with terms of low rank beside them (LoRA, as those of `peft`): a style for one is
styles for its parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.nn import Module

from linop.errors import ArgumentError
from linop.spaces.decomposition import COPIES, REPLICATED
from linop.strategies.tensor.layouts import layout_of
from linop.strategies.tensor.styles.cut import ColwiseParallel, RowwiseParallel
from linop.strategies.tensor.styles.kept import SequenceParallel
from linop.strategies.tensor.styles.style import Style


def has_low_rank(module: Module) -> bool:
    """True for a linear layer, `base_layer`, with matrices `lora_A` and `lora_B` beside it."""
    parts = {name for name, _ in module.named_children()}
    base: Any = getattr(module, "base_layer", None)
    return {"base_layer", "lora_A", "lora_B"} <= parts and not isinstance(base, torch.nn.Embedding)


def styles_of_parts(name: str, module: Any, style: Style) -> dict[str, Style]:
    """The styles of the parts of a linear layer with terms of low rank.

    By output, ``B A x`` is cut as the layer is: A is whole, and B cut by output. By input, A is cut
    by input, and the sum over the workers is of as few numbers as the rank is.

    Raises:
        ArgumentError: the style is for other modules, or the layer is of another kind (DoRA).
    """
    if any(True for part in _others(module) for _ in part.parameters()):
        raise ArgumentError(
            f"{name!r} has parameters beside base_layer, lora_A and lora_B, as DoRA's magnitudes; "
            f"without them expected (use_dora=False)"
        )
    down = [f"{name}.{part}" for part in _linears(module, "lora_A")]
    up = [f"{name}.{part}" for part in _linears(module, "lora_B")]
    found = {f"{name}.base_layer": style}
    if isinstance(style, ColwiseParallel):
        given = layout_of(style.input_layouts, "input_layouts")
        found |= dict.fromkeys(up, style)
        if given is COPIES:
            found |= dict.fromkeys(down, SequenceParallel(None))
        elif given is not REPLICATED:
            assert isinstance(given, int)
            found |= dict.fromkeys(down, SequenceParallel(given))
        return found
    if isinstance(style, RowwiseParallel):
        found |= dict.fromkeys(down, replace(style))
        ends = layout_of(style.output_layouts, "output_layouts")
        if isinstance(ends, int):
            found |= dict.fromkeys(up, SequenceParallel(ends))
        return found
    raise ArgumentError(
        f"{name!r} is a linear layer with terms of low rank (LoRA); ColwiseParallel or "
        f"RowwiseParallel expected"
    )


def _linears(module: Any, part: str) -> Iterator[str]:
    """Names of matrices: one, or one for each adapter."""
    one = getattr(module, part)
    if isinstance(one, torch.nn.Linear):
        yield part
    for key, child in one.named_children():
        yield f"{part}.{key}"
        if not isinstance(child, torch.nn.Linear):
            raise ArgumentError(f"{part}.{key} is a {type(child).__name__}; a Linear expected")


def _others(module: Module) -> Iterator[Module]:
    for name, child in module.named_children():
        if name not in ("base_layer", "lora_A", "lora_B"):
            yield child
