"""Whole parameters of a unit that a schedule's actions gather, give up and gather again, and the
gradients on them, which one application of G.H sums for many forwards and backwards.

They are leaves of the graphs of these forwards, which keep references to them and not their memory
(`linop.strategies.data.sharded.calls`); so gradients are added on each worker alone until `reduce`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from weakref import WeakMethod

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from linop.backends.autograd.dtypes import summed_dtype
from linop.strategies.data.sharded.calls import Call

if TYPE_CHECKING:
    from linop.strategies.data.sharded.unit import Unit


class Held:
    """Leaves for the whole parameters of a unit. Collective: it gathers them.

    Attributes:
        leaves: in the order of the unit's members; without memory between `release` and `gather`.
        call: the forwards with them.
    """

    def __init__(self, unit: Unit) -> None:
        with torch.enable_grad():
            copies = unit.copies()
        # Whole numbers have no gradients.
        self._edges = [get_gradient_edge(x) if x.requires_grad else None for x in copies]
        pairs = zip(copies, unit.shards, strict=True)
        self.leaves = [copy.detach().requires_grad_(p.requires_grad) for copy, p in pairs]
        self.call = Call(unit, self.leaves)
        self._sums: dict[int, Tensor] = {}
        """Gradients of half precision, added in single precision."""
        for k, leaf in enumerate(self.leaves):
            if leaf.requires_grad and summed_dtype(leaf.dtype) != leaf.dtype:
                leaf.register_post_accumulate_grad_hook(self._hook(k))

    def _hook(self, k: int) -> Callable[[Tensor], None]:
        """A hook of a leaf. Python's collector does not see that a leaf holds its hooks: one that
        held this object, which has the leaf, would keep both for ever."""
        known = WeakMethod(self._add)

        def hook(leaf: Tensor) -> None:
            if (add := known()) is not None:
                add(k, leaf)

        return hook

    def _add(self, k: int, leaf: Tensor) -> None:
        assert leaf.grad is not None
        grad, leaf.grad = leaf.grad.to(summed_dtype(leaf.dtype)), None
        self._sums[k] = self._sums[k] + grad if k in self._sums else grad

    def _gradient(self, k: int) -> Tensor | None:
        return self._sums.pop(k, self.leaves[k].grad)

    @property
    def parameters(self) -> Sequence[Tensor]:
        """The tensors that modules have while none of them computes."""
        return self.leaves if self.call.whole is not None else self.call.unit.shards

    def gather(self) -> None:
        """Gather anew what was given up. Collective."""
        for leaf, whole in zip(self.leaves, self.call.unit.gathered(), strict=True):
            leaf.data = whole
        self.call.put(self.leaves)

    def release(self) -> None:
        """Give the memory of the whole parameters up, and not their gradients."""
        self.call.whole = None
        for leaf in self.leaves:
            leaf.data = leaf.new_empty(0)

    def reduce(self) -> None:
        """Add G.H of the gradients on the whole parameters to those of the shards. Collective; no
        message if there are none."""
        found = [(edge, self._gradient(k)) for k, edge in enumerate(self._edges)]
        given = [(edge, grad) for edge, grad in found if edge is not None and grad is not None]
        for leaf in self.leaves:
            leaf.grad = None
        if given:
            edges, gradients = zip(*given, strict=True)
            torch.autograd.backward(edges, gradients, retain_graph=True)
