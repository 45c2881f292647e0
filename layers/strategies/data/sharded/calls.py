"""One forward of a unit: whole parameters, given up after it and gathered again in backward.

What torch's graph keeps for backward is a reference to a whole parameter, not its memory. All other
tensors go through the hooks that were there before, such as those of checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from linop.backends.autograd.saved import saved, taken
from linop.errors import ArgumentError

if TYPE_CHECKING:
    from linop.strategies.data.sharded.unit import Unit


_WHERE = "a module under fully_shard"


class _Saved(NamedTuple):
    """Placeholder that the graph keeps for backward in place of a view of a whole parameter."""

    call: Call
    number: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int | torch.SymInt
    dtype: Any
    conjugate: bool
    negative: bool


class _Outer(NamedTuple):
    """Another tensor, as the hooks around this forward have packed it."""

    unpack: Callable[[Any], Tensor]
    packed: Any


class Call:
    """One forward of a unit.

    Args:
        copies: the whole parameters, as G gives them.

    Attributes:
        whole: in their shapes; None while they are given up.
        saved: True if backward needs some of them.
        before: function that gives the call before this one in the same forward of the model, as
            long as it lives.
    """

    def __init__(self, unit: Unit, copies: Sequence[Tensor]) -> None:
        self.unit = unit
        self.saved = False
        self.before: Callable[[], Call | None] = lambda: None
        self.put(copies)
        self._requires = [copy.requires_grad for copy in copies]  # those of frozen shards, too
        if copies[0].grad_fn is not None:
            # Before G.H: all that computes with the parameters has run.
            copies[0].grad_fn.register_prehook(self._forget)

    def put(self, copies: Sequence[Tensor]) -> None:
        """Have whole parameters, of the shards as they are."""
        self.versions = self.unit.versions()
        self.whole: Sequence[Tensor] | None = copies
        self._places = _places(copies)
        for copy in copies:
            _mark(copy)

    def _forget(self, gradients: Any) -> None:
        del gradients
        self.whole = None
        self.unit.rest()
        if self.unit.prefetch:
            self.unit.passes.in_backward = True

    def again(self) -> Sequence[Tensor]:
        """The whole parameters in backward, gathered again if they were given up. Collective
        then."""
        if self.whole is None:
            if self.unit.versions() != self.versions:
                raise ArgumentError(
                    f"fully_shard: parameters of {self.unit.name} changed between forward and "
                    f"backward; update them after it"
                )
            self.whole = self.unit.gathered(again=True)
            if self.unit.prefetch:
                self.unit.passes.gather_before(self)
        return self.whole

    def leaves(self) -> list[Tensor]:
        """The whole parameters, for a forward that is computed again in backward: its values alone
        are used, and the gradients are those of the first."""
        made, whole = [], self.again()
        self._places = _places(whole)
        for shard, tensor, requires in zip(self.unit.shards, whole, self._requires, strict=True):
            leaf = tensor.detach().requires_grad_(requires)
            _mark(leaf)
            if shard.requires_grad:
                leaf.register_hook(_lost)
            made.append(leaf)
        return made

    def hooks(self) -> Any:
        """Context of a forward whose graph keeps references to whole parameters."""
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        return saved_tensors_hooks(partial(self._packed, outer), _unpacked)

    def _packed(self, outer: Any, tensor: Tensor) -> Any:
        k = self._places.get(tensor.untyped_storage().data_ptr())
        if k is None or self.whole is None:
            return saved(tensor, _WHERE) if outer is None else _Outer(outer[1], outer[0](tensor))
        self.saved = True
        lazy = tensor.dtype, tensor.is_conj(), tensor.is_neg()
        return _Saved(self, k, tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), *lazy)


def is_gathered(parameter: Tensor | None) -> bool:
    """True of a whole parameter, whose memory is a call's to give up."""
    return hasattr(parameter, "_linop_gathered")


def _mark(whole: Any) -> None:
    whole._linop_gathered = True


def _places(tensors: Sequence[Tensor]) -> dict[int, int]:
    """Numbers of tensors, by the address of their memory."""
    return {t.untyped_storage().data_ptr(): k for k, t in enumerate(tensors) if t.numel()}


def _unpacked(kept: Any) -> Tensor:
    if isinstance(kept, _Outer):
        return kept.unpack(kept.packed)
    if not isinstance(kept, _Saved):
        return taken(kept)
    return _view(kept.call.again()[kept.number], kept)


def _view(whole: Tensor, saved: _Saved) -> Tensor:
    """A view of a whole parameter: of its memory, for that of a complex one may be of its parts."""
    if saved.dtype == whole.dtype:
        view = whole.as_strided(saved.size, saved.stride, saved.offset)
    else:
        view = torch.empty(0, dtype=saved.dtype, device=whole.device)
        view.set_(whole.untyped_storage(), saved.offset, saved.size, saved.stride)
    view = view.conj() if saved.conjugate else view
    return torch._neg_view(view) if saved.negative else view


def _lost(gradient: Tensor) -> None:
    raise ArgumentError(
        "fully_shard: gradients of sharded parameters are computed by torch's reentrant "
        "checkpointing, and would be lost; use checkpoint(..., use_reentrant=False)"
    )
