"""Operators in torch's autograd: conversion of tensors, order of calls, and the differentiable
function. Without torch, its import says which package to install."""

from linop.errors import MissingExtraError

try:
    import torch  # noqa: F401
except ImportError as error:
    raise MissingExtraError(
        f"linop.autograd needs torch: pip install 'linop-algebra[torch]' ({error})"
    ) from None
