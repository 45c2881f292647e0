"""Base class of the styles of a plan, and refusals of modules that a style is not for."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import Module

from linop.errors import ArgumentError
from linop.layers.layer import Layer
from linop.spaces.decomposition import COPIES
from linop.strategies.mesh import Axis
from linop.strategies.tensor.layouts import layout_of

CUT = torch.nn.Linear, torch.nn.Embedding
"""Modules whose weights are cut."""


class Style:
    """How a named module is made parallel."""

    def check(self, module: Module, axis: Axis, name: str) -> None:
        """Check that the style is for such a module.

        Raises:
            ArgumentError, PartitionError: it is not.
        """
        raise NotImplementedError

    def keeps(self, module: Module) -> bool:
        """True if the module stays, with its hooks; False if another takes its place."""
        del module
        return False

    def apply(self, module: Module, axis: Axis) -> Module:
        """The module that takes its place; itself, with hooks."""
        raise NotImplementedError


def refuse(style: Style, name: str, module: Module, expected: str) -> None:
    if isinstance(module, Layer):
        raise ArgumentError(
            f"{name!r} is parallel already ({type(module).__name__}); "
            f"parallelise the sequential module once"
        )
    hint = ""
    if isinstance(module, torch.nn.MultiheadAttention):
        hint = ". Its projections are in one tensor: AttentionParallel() is for it"
    elif type(module) not in CUT and isinstance(module, CUT):
        hint = (
            f". {type(module).__module__}.{type(module).__name__} computes something else, or has "
            f"more parameters: put a plain one in its place, or leave it out of the plan, so that "
            f"every worker computes it whole"
        )
    raise ArgumentError(
        f"{name!r} is a {type(module).__name__}; {type(style).__name__} is for {expected}{hint}"
    )


def no_copies(layout: Any) -> None:
    """Refuse a layout of copies for an output."""
    if layout is not None and layout_of(layout, "output_layouts") is COPIES:
        raise ArgumentError(
            "output_layouts=COPIES: a module's output is one tensor; linop.REPLICATED or a "
            "dimension expected"
        )
