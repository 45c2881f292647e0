"""Checkpoints: of a chain of modules autograd keeps the inputs of groups, and computes the rest
again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as _torch_s

from linop.backends.autograd.functions import checkpoint_context
from linop.errors import ArgumentError
from linop.spaces.region import integer

Tensor = Any
"""torch is not typed here."""


class _Checkpointed(torch.nn.Sequential):  # type: ignore[misc]  # torch is not typed here
    """A chain whose groups of modules are computed again in backward."""

    every: int

    def forward(self, x: Tensor) -> Tensor:
        """The output of the last module."""
        modules = list(self)
        for k in range(0, len(modules), self.every):
            group = modules[k : k + self.every]
            if torch.is_grad_enabled():
                x = _torch_s(_run, group, x, use_reentrant=False, context_fn=checkpoint_context)
            else:
                x = _run(group, x)
        return x

    def extra_repr(self) -> str:
        return f"every={self.every}"


def checkpoint(net: torch.nn.Sequential, *, every: int = 1) -> torch.nn.Sequential:
    """The chain of the same modules, of which autograd keeps the input of every k-th one, and
    computes the rest again in backward: `torch.utils.checkpoint`, whose random numbers are those of
    the first time. Results of linop's operators are kept, and nothing is sent twice; so workers may
    differ in `every`.

    Args:
        net: the chain; its modules, and the names in its state, are shared.
        every: the number of modules in a group.

    Raises:
        ArgumentError: it is no Sequential, or `every` is below 1.
    """
    if not isinstance(net, torch.nn.Sequential):
        raise ArgumentError(
            f"checkpoint: a torch.nn.Sequential expected, given {type(net).__name__}"
        )
    if integer(every, "checkpoint: every") < 1:
        raise ArgumentError(f"checkpoint: every={every}; at least 1 expected")
    made = _Checkpointed(OrderedDict(net.named_children()))
    made.every, made.training = every, net.training
    return made


def _run(modules: Sequence[Any], x: Tensor) -> Tensor:
    for module in modules:
        x = module(x)
    return x
