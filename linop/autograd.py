"""Operators in torch's autograd: public names of `linop.backends.autograd.functions`."""

import warnings
from typing import Any

from linop.backends.autograd.functions import Module, add_dependency, apply, checkpoint_context

__all__ = ["Module", "add_dependency", "apply", "checkpoint_context"]

_RENAMED = {"remembering": "checkpoint_context", "tie": "add_dependency"}


def __getattr__(name: str) -> Any:
    """Resolve deprecated names, with a warning."""
    if name not in _RENAMED:
        raise AttributeError(f"module 'linop.autograd' has no attribute {name!r}")
    new = _RENAMED[name]
    warnings.warn(f"linop.autograd.{name} is {new} now", DeprecationWarning, stacklevel=2)
    return globals()[new]
