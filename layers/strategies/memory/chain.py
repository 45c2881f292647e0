"""Chains of modules in groups, of which autograd keeps less: `checkpointed` and `offloaded` say
what, each alone or both."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.checkpoint import checkpoint as _torch_s

from linop.backends.autograd.functions import checkpoint_context
from linop.errors import ArgumentError
from linop.strategies.data.sharded.unit import Unit
from linop.strategies.memory.window import Window


class Offloadable:
    """Modules that are called one after another, whose memory may be elsewhere between their calls.

    Attributes:
        window: of those whose saved tensors are not moved out; None: all of them.
        units: of parameters that are in another memory, in the order of the modules.
    """

    window: Window | None = None
    units: Sequence[Unit] = ()

    @property
    def bytes_here(self) -> int:
        """Bytes of parameters that `offload` has here, or on their way here."""
        return sum(unit.bytes_here for unit in self.units)

    @property
    def bytes_leaving(self) -> int:
        """Bytes of gradients of such that are on their way to the other memory."""
        return sum(unit.bytes_leaving for unit in self.units)

    def _described(self, again: str) -> str:
        """Settings, for `extra_repr`."""
        ahead = "" if self.window is None else f"prefetch={self.window.ahead}"
        return ", ".join(filter(None, [again, ahead]))


class Chain(Offloadable, torch.nn.Sequential):
    """A chain of modules, called group by group; the window is of groups.

    Attributes:
        every: the number of modules in a group, which are computed again in backward; None: each
            is a group, and computed once.
    """

    every: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        """The output of the last module."""
        modules, size = list(self), self.every or 1
        groups = [modules[k : k + size] for k in range(0, len(modules), size)]
        if not torch.is_grad_enabled():
            return _run(modules, x)
        call = None if self.window is None else self.window.call(self)
        run: Any = _run if self.every is None else _checkpointed
        for k, group in enumerate(groups):
            with nullcontext() if call is None else call.saving(k):
                x = run(group, x)
        return x

    def extra_repr(self) -> str:
        return self._described("" if self.every is None else f"every={self.every}")


@contextmanager
def buffers_kept(buffers: Iterable[Tensor]) -> Iterator[None]:
    """A context after which buffers have the values from before: what is computed again there does
    not change running statistics twice."""
    values = [(x, x.clone()) for x in buffers]
    try:
        yield
    finally:
        for buffer, value in values:  # norms change them without a new version
            if not torch.equal(buffer, value):
                buffer.detach().copy_(value)


def chain(net: Any, name: str) -> Chain:
    """A chain of the modules of a Sequential, with copies of its hooks, the units of its sharded
    parameters, and with what is said of it already if it is a chain.

    Raises:
        ArgumentError: it is no Sequential, or one with a forward of its own.
    """
    if not isinstance(net, torch.nn.Sequential):
        given = type(net).__name__
        raise ArgumentError(
            f"{name}: a torch.nn.Sequential or ModuleList expected, given {given}; for one module, "
            f"however its owner calls it, {name}(torch.nn.ModuleList([module])) changes it"
        )
    if type(net).forward not in (torch.nn.Sequential.forward, Chain.forward):
        raise ArgumentError(
            f"{name}: {type(net).__name__} has a forward of its own; a torch.nn.Sequential expected"
        )
    made = Chain(OrderedDict(net._modules))  # a module that comes twice, too
    copy_state(net, made)
    if isinstance(net, Chain):
        made.every, made.window, made.units = net.every, net.window, net.units
    return made


def copy_state(net: Module, made: Module) -> None:
    """Give a container the mode of another with the same modules, and copies of its hooks.

    The hooks of a sharded one gather its units, which others have to find. Pieces of a model that
    was split keep its keys.
    """
    made.training = net.training
    every = vars(net).items()
    kept = {k: v for k, v in every if "_hook" in k or k.startswith("_linop_") or k == "no_sync"}
    made.__dict__.update({key: copy(one) for key, one in kept.items()})


def _checkpointed(modules: Sequence[Any], x: Tensor) -> Tensor:
    about = partial(contexts, modules)
    y: Tensor = _torch_s(_run, modules, x, use_reentrant=False, context_fn=about)
    return y


def contexts(modules: Sequence[Any]) -> tuple[Any, Any]:
    """Contexts of the forward of modules, and of each that is computed again in backward."""
    first, again = checkpoint_context()
    return first, _Again(modules, again)


class _Again(ExitStack):
    """The context `outer`, in which buffers of modules keep their values. It can be entered again,
    as by a second backward of one graph."""

    def __init__(self, modules: Sequence[Any], outer: Any) -> None:
        super().__init__()
        self._buffers, self._outer = [x for module in modules for x in module.buffers()], outer

    def __enter__(self) -> _Again:
        self.enter_context(self._outer)
        self.enter_context(buffers_kept(self._buffers))
        return self


def _run(modules: Sequence[Any], x: Tensor) -> Tensor:
    for module in modules:
        x = module(x)
    return x
