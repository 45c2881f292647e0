"""Operators inside torch's autograd: `linop.backends.autograd`, by the name that users know."""

from linop.backends.autograd.functions import Module, apply, remembering, tie

__all__ = ["Module", "apply", "remembering", "tie"]
