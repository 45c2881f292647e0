"""Checkpoints: of a chain of modules autograd keeps the inputs of groups, and computes the rest
again."""

from __future__ import annotations

from typing import Any

from linop.errors import ArgumentError
from linop.spaces.region import integer
from linop.strategies.memory.chain import chain


def checkpoint(net: Any, *, every: int = 1) -> Any:
    """The chain of the same modules, of which autograd keeps the input of every k-th one, and
    computes the rest again in backward: `torch.utils.checkpoint`, whose random numbers are those of
    the first time. Results of linop's operators are kept, and nothing is sent twice; so workers may
    differ in `every`.

    Args:
        net: the chain, a `torch.nn.Sequential`; its modules, and the names in its state, are
            shared.
        every: the number of modules in a group.

    Raises:
        ArgumentError: it is no Sequential, or `every` is below 1.
    """
    made = chain(net, "checkpoint")
    if integer(every, "checkpoint: every") < 1:
        raise ArgumentError(f"checkpoint: every={every}; at least 1 expected")
    made.every = every
    return made
