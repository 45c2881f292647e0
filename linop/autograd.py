"""Operators in torch's autograd: public names of `linop.backends.autograd.functions`."""

from linop.backends.autograd.functions import Module, apply, remembering, tie

__all__ = ["Module", "apply", "remembering", "tie"]
