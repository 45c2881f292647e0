"""Layouts that a distributed transform passes through, each with other dimensions whole.

A *slab* route makes all dimensions whole that are still to be transformed, in one repartition among
all workers. A *pencil* route makes one whole at a time, by repartitions within lines of workers
(Takahashi, "An Implementation of Parallel 3-D FFT with 2-D Decomposition", 2009; Dalcin, Mortensen
and Keyes, "Fast parallel multidimensional FFT using advanced MPI", 2019). Which is better is
decided in `linop.fourier.transform`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np

from linop.errors import PartitionError
from linop.normal_form.matching import Segment, same
from linop.operators.named_movement import collective
from linop.operators.operator import TensorOperator
from linop.spaces.blocks import axes_of_copies, is_tiled
from linop.spaces.decomposition import Axis, Bounds
from linop.spaces.partition import Partition, balanced
from linop.spaces.tensor import TensorSpace

Cuts = tuple[tuple[int, ...], ...]
"""For each tensor dimension, the grid axes of the first layout that cut it, the outermost first."""
Way = Literal["slab", "pencil"]


class Layouts:
    """The layouts of a tensor in which each grid axis that cuts a dimension of X may cut another
    one. Copies and replicas stay as they are.

    Args:
        X: the first layout.
        modes: for dimensions that are shortened to their lowest frequencies once they are
            transformed, the number of these.
        fixed: dimensions that no other grid axis may cut than in X.

    Raises:
        PartitionError: the blocks of X overlap, or leave gaps.
    """

    def __init__(
        self,
        X: TensorSpace,
        modes: Mapping[int, int] | None = None,
        fixed: Collection[int] = (),
    ) -> None:
        if not is_tiled(X):
            raise PartitionError(
                f"fft: the blocks of {X!r} overlap, or leave elements out; repartition it first"
            )
        self.X = X
        self.modes = modes or {}
        self.fixed = fixed
        grid = X.partition.shape
        self.kept = tuple(k for k, axis in enumerate(X.axes) if not isinstance(axis, int))
        held = {axis: (k,) for k, axis in enumerate(X.axes) if isinstance(axis, int)}
        self.first: Cuts = tuple(
            tuple(k for k in held.get(d, ()) if grid[k] > 1) for d in range(X.ndim)
        )
        self.start = self.first
        """The layout that routes begin in."""

    def space(self, cuts: Cuts, done: Collection[int] = ()) -> TensorSpace:
        """The tensor in a layout, on the workers of X. Of grid axes that cut dimensions of X, and
        none here, only the first worker holds a block.

        Args:
            done: the dimensions that are transformed, and shortened.
        """
        X, dims = self.X, [d for d, axes in enumerate(cuts) if axes]
        shape = tuple(self._length(d) if d in done else n for d, n in enumerate(X.global_shape))
        if cuts == self.first and shape == X.global_shape:
            return X
        used = [k for d in dims for k in cuts[d]]
        idle = [k for k in range(X.partition.ndim) if k not in used and k not in self.kept]
        grid = X.partition.grid.transpose(*idle, *self.kept, *used)[(0,) * len(idle)]
        extents = [X.partition.shape[k] for k in self.kept] + [self.count(cuts[d]) for d in dims]
        roles: list[Axis] = [*(X.axes[k] for k in self.kept), *dims]
        bounds = {d: self._bounds(d, cuts[d], shape[d]) for d in dims}
        partition = Partition.of_grid(np.reshape(grid, extents))
        return TensorSpace(shape, partition, X.dtype, roles, X.name, bounds=bounds, memory=X.memory)

    def move(self, S: TensorSpace, T: TensorSpace) -> TensorOperator:
        """The repartition between two layouts, each copy by itself, of the lowest frequencies of
        dimensions that are shorter in T."""
        grid = self.X.partition.shape
        copies = axes_of_copies(self.X)
        links = [same(grid[k], self._place(S, k), self._place(T, k)) for k in copies]
        pairs = enumerate(zip(S.global_shape, T.global_shape, strict=True))
        low = {d: lowest(n, m) for d, (n, m) in pairs if n != m}
        return collective("P", f"{S.partition}→{T.partition}", S, T, links, low)

    def _place(self, space: TensorSpace, axis: int) -> int:
        """The axis of a layout's grid that is an axis of X's grid which cuts nothing."""
        return axis if space is self.X else self.kept.index(axis)

    def route(self, way: Way, dims: Sequence[int]) -> Iterator[tuple[Cuts, tuple[int, ...]]]:
        """The layouts of a transform along `dims`, each with the dimensions that are transformed
        in it."""
        cuts, left = self.start, list(dims)
        while True:
            whole = tuple(d for d in left if not cuts[d])
            left = [d for d in left if cuts[d]]
            yield cuts, whole
            if not left:
                return
            cuts = self._freed(cuts, left, left[-1:] if way == "pencil" else left)

    def _freed(self, cuts: Cuts, left: Sequence[int], freed: Sequence[int]) -> Cuts:
        """The layout in which the dimensions `freed` are whole: their grid axes cut dimensions that
        are not `left` to transform; if all are, others of these; and none if there is no other."""
        others = [d for d in range(len(cuts)) if d not in left and d not in self.fixed]
        if not others:
            freed = freed if len(freed) < len(left) else freed[1:] or freed
            others = [d for d in left if d not in freed]
        made = [() if d in freed else axes for d, axes in enumerate(cuts)]
        for axis in (k for d in freed for k in cuts[d]):
            if others:
                best = min(others, key=lambda d: self._excess(d, (*made[d], axis)))
                made[best] = (*made[best], axis)
        return tuple(made)

    def _excess(self, d: int, axes: tuple[int, ...]) -> float:
        """The length of the longest block of a dimension over that of the mean one."""
        n, count = self._length(d), self.count(axes)
        return -(-n // count) * count / n if n else 1.0

    def _length(self, d: int) -> int:
        """The length of a dimension that is transformed."""
        return self.modes.get(d, self.X.global_shape[d])

    def _bounds(self, d: int, axes: tuple[int, ...], length: int) -> Bounds:
        """The blocks of a dimension: those that X has, if the same axis cuts it, each cut by the
        other axes; else balanced ones."""
        own = self.first[d]
        nested = bool(own) and axes[:1] == own and length == self.X.global_shape[d]
        outer = self.X.bounds[d] if nested else ((0, length),)
        inner = self.count(axes) // len(outer)
        cuts: list[tuple[int, int]] = []
        for low, high in outer:
            for size in balanced(high - low, inner):
                cuts.append((low, low + size))
                low += size
        return tuple(cuts)

    def count(self, axes: Sequence[int]) -> int:
        """The number of blocks that grid axes make."""
        return math.prod(self.X.partition.shape[k] for k in axes)


def lowest(n: int, m: int) -> list[Segment]:
    """The m lowest frequencies of n, in the order of a transform of length m: 0, 1, …, -2, -1."""
    negative = m // 2
    parts = [Segment(0, 0, m - negative), Segment(m - negative, n - negative, negative)]
    return [part for part in parts if part.length]
