"""The layout of a tensor that is cut: which dimension, and the blocks of all workers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from linop.spaces.decomposition import COPIES, REPLICATED, Role
from linop.strategies.tensor.following.sizes import Refused, length


@dataclass(frozen=True)
class Cut:
    """A dimension that is cut.

    Attributes:
        dim: the dimension, from 0.
        sizes: lengths of the blocks, by worker.
        whole: length of the whole dimension; less than the sum of `sizes` where workers share
            blocks.
        index: of this worker.
    """

    dim: int
    sizes: tuple[int, ...]
    whole: int
    index: int

    @property
    def length(self) -> Any:
        """Length of this worker's block, a number that carries those of all."""
        return length(self.sizes, self.whole, self.index)

    @property
    def is_shared(self) -> bool:
        """True if workers hold the same block."""
        return sum(self.sizes) != self.whole

    def at(self, dim: int) -> Cut:
        """The same blocks along another dimension."""
        return replace(self, dim=dim)


__all__ = ["Cut", "Followed", "Refused", "in_words", "strides"]

Followed = Role | Cut | None
"""Layout of a tensor: `REPLICATED`, `COPIES`, a cut; None where some workers hold it only."""


def in_words(layout: Followed, ndim: int) -> str:
    """A layout for errors."""
    if layout is None:
        return "different on each worker"
    if layout is REPLICATED:
        return "whole on all workers (REPLICATED)"
    if layout is COPIES:
        return "a copy on each (COPIES)"
    assert isinstance(layout, Cut)
    return f"split along dimension {layout.dim - ndim}"


def strides(x: Any, cut: Cut) -> tuple[Any, ...]:
    """Strides of a tensor that is cut, of all workers: those beyond the cut grow with it."""
    inner, mine = x.stride(cut.dim), cut.sizes[cut.index]

    def along(dim: int) -> Any:
        stride = x.stride(dim)
        beyond = dim != cut.dim and stride >= inner * mine > 0 and (mine == 1 or stride > inner)
        return stride // mine * cut.length if beyond else stride

    return tuple(along(dim) for dim in range(x.ndim))
