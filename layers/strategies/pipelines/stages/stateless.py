"""Calls of a module with other parameters and buffers than its own.

`torch.func.functional_call` leaves a module that has two names in another one with what it was
called with: it restores tensors in the order in which it replaced them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.nn.utils.stateless import _reparametrize_module


def reading(module: Module, state: Mapping[str, Tensor]) -> AbstractContextManager[Any]:
    """Context in which a module has other parameters and buffers, by name; tied ones under each of
    their names."""
    context: AbstractContextManager[Any] = _reparametrize_module(
        module, dict(state), tie_weights=True, stack_weights=True
    )
    return context


def called(
    module: Module,
    state: Mapping[str, Tensor],
    inputs: Sequence[Any],
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Result of a module with other parameters and buffers, by name.

    Args:
        inputs, options: its arguments, by position and by name.
    """
    with reading(module, state):
        return module(*inputs, **(options or {}))
