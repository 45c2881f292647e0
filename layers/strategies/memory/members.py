"""Modules in a `torch.nn.ModuleList`, which their owner calls one by one with arguments of its own,
and of each of which autograd keeps less: `checkpointed` and `offloaded` say what, as of chains.

Members stay the objects that they are, with their classes, hooks and names; each has a `forward` of
its own, which is copied and pickled with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.checkpoint import checkpoint as _torch_s

from linop.errors import ArgumentError
from linop.strategies.data.sharded.calls import is_gathered
from linop.strategies.data.sharded.unit import Unit
from linop.strategies.memory.chain import Offloadable, contexts, copy_state
from linop.strategies.memory.window import Series, Window
from linop.strategies.pipelines.stages.stateless import reading


class Members(Offloadable, torch.nn.ModuleList):
    """A list of modules of which autograd keeps less; the window is of members."""

    def checkpoint(self) -> None:
        """Compute every member again in backward."""
        for saving in self._savings():
            saving.again = True

    def save_in(self, window: Window) -> None:
        """Move what members save, but for those in the window."""
        self.window = window
        series = Series(window)
        for number, saving in enumerate(self._savings()):
            saving.series, saving.number = series, number

    def _savings(self) -> list[_Saving]:
        found = []
        for module in self:
            saving = vars(module).get("forward")
            if not isinstance(saving, _Saving):
                saving = _Saving(module)
                module.forward = saving
            found.append(saving)
        return found

    def extra_repr(self) -> str:
        again = any(getattr(vars(one).get("forward"), "again", False) for one in self)
        return self._described("checkpointed" if again else "")


class _Saving:
    """The forward of a member.

    Attributes:
        again: True: it is computed again in backward.
        series, number: of members whose saved tensors are moved, and the place among them.
    """

    again = False
    series: Series | None = None
    number = 0

    def __init__(self, module: Module) -> None:
        self._module = module
        self._own: Any = vars(module).get("forward")  # a forward of somebody else, of this object

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        module, own = self._module, self._own
        plain = partial(type(module).forward, module) if own is None else own
        if not torch.is_grad_enabled():
            return plain(*inputs, **named)
        saving: AbstractContextManager[Any] = nullcontext()
        if self.series is not None:
            saving = self.series.saving(self.number, module)
        with saving:
            return self._again(plain, inputs, named) if self.again else plain(*inputs, **named)

    def _again(self, plain: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:
        for key, one in [*enumerate(inputs), *named.items()]:
            if type(one).__name__.endswith("Cache"):
                raise ArgumentError(
                    f"checkpoint: {type(self._module).__name__} is called with a "
                    f"{type(one).__name__} ({key!r}), to which it would add keys again when it is "
                    f"computed again; without caches expected: use_cache=False, of transformers "
                    f"in the model's configuration"
                )

        # Whole parameters of shards are gathered again: kept here, they would not be given up.
        named_before = self._module.named_parameters()
        before = {name: p for name, p in named_before if not is_gathered(p)}
        units = _gathered_by(self._module)

        def call(*every: Any) -> Any:
            count = len(inputs)
            for unit in units:
                unit.used()
            with _reading(self._module, before):
                return plain(*every[:count], **dict(zip(named, every[count:], strict=True)))

        # By position, torch keeps tensors as autograd does: they can be moved.
        every = *inputs, *named.values()
        about = partial(contexts, [self._module])
        return _torch_s(call, *every, use_reentrant=False, context_fn=about)


def _gathered_by(module: Module) -> list[Unit]:
    """Units that have gathered a module's own parameters for its forward. Their hooks are around
    that, and not around what is computed again."""
    hooks = module._forward_pre_hooks.values()
    units = {one: None for one in map(_owner, hooks) if isinstance(one, Unit)}
    return [
        unit
        for unit in units
        if any(
            is_gathered(owner._parameters.get(name))
            for member in unit.members
            for owner, name in member.places
        )
    ]


def _owner(hook: Any) -> Any:
    return getattr(hook, "__self__", None)


def _reading(module: Module, before: Mapping[str, Tensor]) -> AbstractContextManager[Any]:
    """Context in which a module has the parameters of its forward, if these were others than its
    own, as in `torch.func.functional_call`. Those that `fully_shard` gathers are its own."""
    others = {}
    for name, p in module.named_parameters():
        was = before.get(name, p)
        if was is not p and isinstance(p, torch.nn.Parameter) and was.shape == p.shape:
            others[name] = was
    return reading(module, others) if others else nullcontext()


def members(net: torch.nn.ModuleList, name: str) -> Members:
    """The list of the same modules, with copies of its hooks, and with what is said of it already.

    Raises:
        ArgumentError: it is of another class than torch's, or has a member of two places, or one
            that is none.
    """
    if type(net) not in (torch.nn.ModuleList, Members):
        raise ArgumentError(
            f"{name}: {type(net).__name__} is a ModuleList with methods of its own; a plain one "
            f"expected: {name}(torch.nn.ModuleList([*net])) changes its members"
        )
    if isinstance(net, Members):
        return net
    made = Members()
    made._modules = copy(net._modules)
    copy_state(net, made)
    return made
