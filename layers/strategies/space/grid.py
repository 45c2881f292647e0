"""The grid of workers of a spatial module, and the movements between layouts of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod

import torch
from torch import Tensor

from linop.backends import Backend
from linop.backends.autograd.bridge import bridge_of
from linop.backends.autograd.dtypes import numpy_dtype
from linop.backends.autograd.functions import add_dependency, apply
from linop.layers.agreement.input_agreement import Cache
from linop.normal_form.matching import Segment, same
from linop.operators.named_movement import collective
from linop.operators.operator import LinearOperator
from linop.spaces.decomposition import Bounds
from linop.spaces.partition import Partition
from linop.spaces.tensor import TensorSpace
from linop.strategies.space.halos import exchange
from linop.strategies.space.layout import COPIES, REPLICATED, Axis, Layout, Segments, even, whole
from linop.strategies.space.sums import sums

Function = Callable[[Tensor], Tensor]
_SMALL = 1 << 14
"""Elements up to which a tensor that has fewer rows than workers is computed by every worker: to
compute it takes less time than the messages of its halos."""
_CACHE_SIZE = 4096


class Grid:
    """Workers in a grid, of which each axis cuts one dimension of images.

    Args:
        backend: of these workers.
        extents: of the grid.
        dims: the dimension that each axis cuts.
    """

    def __init__(self, backend: Backend, extents: Sequence[int], dims: Sequence[int]) -> None:
        self.backend = backend
        self.partition = Partition(tuple(extents))
        self.extents = self.partition.shape
        self.dims = tuple(dims)
        self.at = self.partition.coordinates(backend.worker or 0)
        self._functions = Cache[Function](_CACHE_SIZE)

    def __deepcopy__(self, memo: object) -> Grid:
        return self

    # Layouts

    def whole(self, shape: Sequence[int]) -> Layout:
        """The layout of a tensor that every worker has."""
        return whole(shape, len(self.extents))

    def images(self, shape: Sequence[int]) -> Layout:
        """The layout of the module's inputs: balanced blocks."""
        layout = self.whole(shape)
        return self.follow(layout.changed(axes=self.dims), shape)

    def follow(self, layout: Layout, shape: Sequence[int]) -> Layout:
        """The balanced blocks of a result that is cut along the same dimensions. Where it has fewer
        indices than there are workers along an axis, the last of these idle; or all compute it, if
        it is small."""
        axes = [
            REPLICATED if isinstance(axis, int) and self._is_small(shape, axis, k) else axis
            for k, axis in enumerate(layout.axes)
        ]
        bounds = {
            d: even(shape[d], self.extents[k]) for k, d in enumerate(axes) if isinstance(d, int)
        }
        return layout.changed(shape, axes, bounds)

    def _is_small(self, shape: Sequence[int], d: int, k: int) -> bool:
        parts = self.extents[k]
        return parts > 1 and (shape[d] <= 1 or (shape[d] < parts and prod(shape) <= _SMALL))

    def range_of(self, layout: Layout, d: int) -> tuple[int, int]:
        """(start, stop) of this worker's block along a dimension."""
        k = layout.axis_of(d)
        return layout.bounds[d][0 if k is None else self.at[k]]

    def local_shape(self, layout: Layout) -> tuple[int, ...]:
        """The shape of this worker's block."""
        ranges = [self.range_of(layout, d) for d in range(len(layout.shape))]
        return tuple(b - a for a, b in ranges)

    def shape_on(self, layout: Layout, worker: int) -> tuple[int, ...]:
        """The shape of a worker's block."""
        at = self.partition.coordinates(worker)
        axes = [layout.axis_of(d) for d in range(len(layout.shape))]
        cuts = [
            bounds[0 if k is None else at[k]] for k, bounds in zip(axes, layout.bounds, strict=True)
        ]
        return tuple(b - a for a, b in cuts)

    def space(self, layout: Layout, dtype: torch.dtype) -> TensorSpace:
        """The tensor space of a layout."""
        bounds: dict[int, Bounds] = dict(enumerate(layout.bounds))
        kind = numpy_dtype(dtype)
        return TensorSpace(layout.shape, self.partition, kind, layout.axes, bounds=bounds)

    # Movements

    def move(self, x: Tensor, source: Layout, target: Layout, segments: Segments = ()) -> Tensor:
        """This worker's block of the target layout. Collective, unless nothing moves.

        Args:
            x: this worker's block of the source layout.
            segments: an index map of some dimensions, as of padding.
        """
        if source == target and not segments:
            return x
        if x.dtype is torch.bool:
            return self.move(x.to(torch.uint8), source, target, segments).bool()
        key = source, target, segments, x.dtype, x.requires_grad and torch.is_grad_enabled()
        function = self._functions.get(key)
        if function is None:
            function = self._functions.keep(key, self._function(*key))
        return function(x)

    def _function(
        self, source: Layout, target: Layout, segments: Segments, dtype: torch.dtype, graph: bool
    ) -> Function:
        is_here = not segments and all(
            a is REPLICATED
            or (a == b and isinstance(a, int) and source.bounds[a] == target.bounds[a])
            for a, b in zip(source.axes, target.axes, strict=True)
        )
        same = is_here and self.local_shape(source) == self.local_shape(target)
        if is_here and not graph:
            return _itself if same else partial(_part, self._slices(source, target))
        strips = exchange(self, source, target, segments)
        if strips is not None:
            return strips
        op = self.operator(source, target, segments, dtype)
        if op is None:
            return _itself
        if not graph:
            bridge_of(op, self.backend)  # collective, now
            return partial(_without_graph, op, self.backend)
        if is_here and all(
            b is COPIES or a == b for a, b in zip(source.axes, target.axes, strict=True)
        ):
            bridge_of(op.H, self.backend)
            axes = target.axes if source.is_whole and not target.cut else None
            return partial(_copies, op.H, self.backend, axes)
        bridge_of(op, self.backend)
        return partial(apply, op, backend=self.backend)

    def operator(
        self, source: Layout, target: Layout, segments: Segments, dtype: torch.dtype
    ) -> LinearOperator | None:
        """The movement between two layouts; None if every block stays where it is."""
        X, Y = self.space(source, dtype), self.space(target, dtype)
        runs = {d: [Segment(*run) for run in each] for d, each in segments}
        # Blocks that overlap, as those with halos in another dimension, stay apart.
        links = [
            same(n, k, k)
            for k, (n, a) in enumerate(zip(self.extents, source.axes, strict=True))
            if isinstance(a, int)
            and a == target.axes[k]
            and a not in runs
            and source.bounds[a] == target.bounds[a]
        ]
        op = collective("M", "", X, Y, links, runs or None)
        return None if op.movement().still else op

    def _slices(self, source: Layout, target: Layout) -> tuple[slice, ...]:
        """The place of this worker's block of the target in that of the source."""
        starts = [self.range_of(source, d)[0] for d in range(len(source.shape))]
        ranges = [self.range_of(target, d) for d in range(len(source.shape))]
        return tuple(slice(a - s, b - s) for (a, b), s in zip(ranges, starts, strict=True))

    def empty(self, layout: Layout, dtype: torch.dtype, *tied: Tensor | None) -> Tensor:
        """This worker's block of a result, of no elements; its backward runs through the tied
        tensors, as on workers whose block has elements."""
        used = [x for x in tied if x is not None]
        result = used[0].new_zeros(self.local_shape(layout), dtype=dtype)
        return add_dependency(result, *[x for x in used if x.requires_grad])


def _itself(x: Tensor) -> Tensor:
    return x


def _part(where: tuple[slice, ...], x: Tensor) -> Tensor:
    return x[where]


def _without_graph(op: LinearOperator, backend: Backend, x: Tensor) -> Tensor:
    with torch.no_grad():
        return apply(op, x, backend)  # type: ignore[no-any-return]


def _copies(
    adjoint: LinearOperator, backend: Backend, axes: tuple[Axis, ...] | None, x: Tensor
) -> Tensor:
    """E: replicated to independent copies. Nothing moves, and no memory is written: the copy is a
    view, whose gradient is E.H applied to that of the copies; of parameters, together.

    Args:
        axes: of the layout of the copies, if they are copies of a whole tensor.
    """
    if axes is not None and x.is_leaf and (here := sums()) is not None:
        return here.copy(x, axes, adjoint)
    copy = x.view_as(x)
    copy.register_hook(partial(apply, adjoint, backend=backend))
    return copy
