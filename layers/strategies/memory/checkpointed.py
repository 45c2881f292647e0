"""Checkpoints: of a chain of modules autograd keeps the inputs of groups, and computes the rest
again; of modules in a list the inputs of each."""

from __future__ import annotations

from typing import Any

import torch

from linop.errors import ArgumentError
from linop.spaces.region import integer
from linop.strategies.memory.chain import chain
from linop.strategies.memory.members import members


def checkpoint(net: Any, *, every: int = 1) -> Any:
    """The chain of the same modules, of which autograd keeps the input of every k-th one, and
    computes the rest again in backward: `torch.utils.checkpoint`, whose random numbers are those of
    the first time. Results of linop's operators are kept, and nothing is sent twice; so workers may
    differ in `every`.

    Of a `torch.nn.ModuleList`, whose modules their owner calls, as ``model.layers`` of
    transformers, each member is computed again, whatever its arguments and results are. Members are
    changed in place, and stay the same objects: names, classes and hooks are as before, and copies
    and pickles of them are checkpointed too. Hooks of a member itself run once.

    Args:
        net: the chain, a `torch.nn.Sequential`; its modules, and the names in its state, are
            shared. Or a `torch.nn.ModuleList`.
        every: the number of modules in a group; of a ModuleList 1.

    Returns:
        The chain; or the list, with the same members.

    Raises:
        ArgumentError: it is neither, or `every` is below 1, or not 1 of a ModuleList; from a
            member's call: it has a cache of keys and values, which would grow twice.

    Example:
        The gradients are those of the plain chain, bit for bit:

        >>> import copy
        >>> net = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(6)))
        >>> kept = strategies.checkpoint(copy.deepcopy(net), every=2)  # three groups
        >>> for model in (net, kept):
        ...     model(torch.ones(2, 4)).square().sum().backward()
        >>> all(torch.equal(p.grad, q.grad) for p, q in zip(net.parameters(), kept.parameters()))
        True
    """
    listed = isinstance(net, torch.nn.ModuleList)
    made: Any = members(net, "checkpoint") if listed else chain(net, "checkpoint")
    if integer(every, "checkpoint: every") < 1:
        raise ArgumentError(f"checkpoint: every={every}; at least 1 expected")
    if listed and every != 1:
        raise ArgumentError(
            f"checkpoint: every={every} of a ModuleList, whose modules their owner calls one by "
            f"one; every=1 expected, or a torch.nn.Sequential of the modules"
        )
    if listed:
        made.checkpoint()
    else:
        made.every = every
    return made
