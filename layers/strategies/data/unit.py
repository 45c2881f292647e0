"""Units: parameters that are gathered together for a module's forward, and again in backward.

The parameters of a unit are G θ, copies that an all-gather makes of shards; the gradients on the
shards are G.H of those on the copies, a reduce-scatter. Both are applications of one operator in
torch's graph; there is no code for backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from linop.backends.autograd.bridge import bridge_of
from linop.backends.autograd.dtypes import numpy_dtype
from linop.backends.autograd.functions import apply
from linop.errors import ArgumentError
from linop.operators.algebra import direct_sum
from linop.operators.collectives import all_gather
from linop.spaces.partition import Partition
from linop.spaces.tensor import TensorSpace
from linop.strategies.mesh import Axis

Tensor = Any
"""torch is not typed here."""


class Member(NamedTuple):
    """A parameter of a unit.

    Attributes:
        name: in the module of the unit.
        places: modules and attributes that have it: several if it is shared.
        shape: of the whole parameter.
        space: the whole parameter in blocks of rows.
    """

    name: str
    places: Sequence[tuple[Any, str]]
    shape: tuple[int, ...]
    space: TensorSpace


class _Saved(NamedTuple):
    """Placeholder that the graph keeps for backward in place of a view of a whole parameter."""

    call: _Call
    number: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Call:
    """One forward of a unit: its parameters, gathered."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.versions = unit.versions()
        copies = unit.copies()
        self.whole: Sequence[Tensor] | None = unit.shaped(copies)
        self.places = {t.untyped_storage().data_ptr(): k for k, t in enumerate(copies) if t.numel()}
        if copies[0].grad_fn is not None:
            # Before G.H: all that computes with the parameters has run.
            copies[0].grad_fn.register_prehook(self._forget)

    def _forget(self, gradients: Any) -> None:
        del gradients
        self.whole = None

    def again(self, number: int) -> Tensor:
        """A whole parameter in backward, gathered again if it was given up. Collective then."""
        if self.whole is None:
            if self.unit.versions() != self.versions:
                raise ArgumentError(
                    f"fully_shard: parameters of {self.unit.name} changed between forward and "
                    f"backward; update them after it"
                )
            self.whole = self.unit.gathered()
        return self.whole[number]


class Unit:
    """Parameters that are gathered together. Constructed by all workers of the axis."""

    def __init__(self, name: str, members: Sequence[Member], axis: Axis) -> None:
        self.name, self.members, self.axis = name, members, axis
        self.reshards = False
        """True: whole parameters are given up after forward."""
        self.operator = direct_sum(*(all_gather(member.space) for member in members))
        self._bridge = bridge_of(self.operator, axis.backend)
        self._names = [member.space.region(axis.index).name for member in members]
        self.shards: list[Tensor] = []
        self._open: list[tuple[_Call, Any]] = []

    def versions(self) -> list[int]:
        """Numbers that change when a shard does."""
        return [shard._version for shard in self.shards]

    def copies(self) -> list[Tensor]:
        """G of the shards. Collective; recorded in torch's graph."""
        if not torch.is_grad_enabled():
            return [*self._bridge.run([shard.detach() for shard in self.shards])]
        backend = self.axis.backend
        if len(self.shards) == 1:
            return [apply(self.operator, self.shards[0], backend, self.name)]
        given = dict(zip(self._names, self.shards, strict=True))
        return [*apply(self.operator, given, backend, self.name).values()]

    def shaped(self, copies: Sequence[Tensor]) -> list[Tensor]:
        """Copies as parameters: those without dimensions have one in G."""
        return [t if m.shape else t[0] for t, m in zip(copies, self.members, strict=True)]

    def gathered(self) -> list[Tensor]:
        """The whole parameters, without a graph. Collective."""
        with torch.no_grad():
            return self.shaped(self.copies())

    def enter(self, *unused: Any) -> None:
        """Before forward: put the whole parameters in place."""
        del unused
        call = _Call(self)
        assert call.whole is not None
        self.put(call.whole)
        context = None
        if self.reshards and torch.is_grad_enabled():
            context = saved_tensors_hooks(partial(_packed, call), _unpacked)
            context.__enter__()
        self._open.append((call, context))

    def leave(self, *unused: Any) -> None:
        """After forward: put the shards in place."""
        del unused
        if not self._open:
            return  # forward's collective failed
        call, context = self._open.pop()
        if context is not None:
            context.__exit__(None, None, None)
        call.whole = None  # the graph has what it needs
        outer = self._open[-1][0].whole if self._open else None
        self.put(self.shards if outer is None else outer)

    def put(self, tensors: Sequence[Tensor]) -> None:
        """Put tensors where the modules have their parameters."""
        for member, tensor in zip(self.members, tensors, strict=True):
            for module, name in member.places:
                module._parameters[name] = tensor


def _packed(call: _Call, tensor: Tensor) -> Any:
    """A saved tensor as the graph keeps it; a view of a whole parameter as `_Saved`."""
    k = call.places.get(tensor.untyped_storage().data_ptr())
    if k is None or call.whole is None:
        return tensor
    return _Saved(call, k, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())


def _unpacked(saved: Any) -> Tensor:
    if not isinstance(saved, _Saved):
        return saved
    whole = saved.call.again(saved.number)
    return whole.as_strided(saved.size, saved.stride, saved.offset)


def units_of(
    name: str,
    parameters: Mapping[str, Tensor],
    places: Mapping[Any, Sequence[tuple[Any, str]]],
    axis: Axis,
) -> list[tuple[Unit, list[Tensor]]]:
    """Units of parameters, one for each dtype, with their parameters; without shards yet.
    Collective.

    Args:
        name: of all, for errors.
        places: by parameter.
    """
    group, made = Partition((axis.size,)), []
    for dtype in dict.fromkeys(p.dtype for p in parameters.values()):
        some = {key: p for key, p in parameters.items() if p.dtype is dtype}
        members = []
        for k, (key, p) in enumerate(some.items()):
            shape = tuple(p.shape)
            space = TensorSpace(shape or (1,), group, numpy_dtype(dtype), [0], f"p{k}")
            members.append(Member(key, places.get(p, ()), shape, space))
        made.append((Unit(name, members, axis), [*some.values()]))
    return made


def rows(member: Member, whole: Tensor, axis: Axis) -> Tensor:
    """View of this worker's rows of a whole tensor."""
    own = whole.detach() if member.shape else whole.detach().reshape(1)
    return own[member.space.slices(axis.index)]
