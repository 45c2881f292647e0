"""Base class of tensor-parallel modules: a `linop.layers.Layer` over one axis of a mesh, with
conversions between layouts instead of partitions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from linop.backends import use
from linop.backends.autograd.recompute import is_replaying
from linop.errors import ArgumentError, LinopError, PartitionError, name_layer
from linop.layers.agreement.metadata import call_metadata
from linop.layers.agreement.naming import path_of
from linop.layers.layer import Bound, Call, Function, Layer, Settled
from linop.layers.parameters.weights import hold
from linop.spaces.decomposition import COPIES, Axis
from linop.spaces.partition import Partition, balanced
from linop.spaces.tensor import TensorSpace
from linop.strategies.mesh import Axis as MeshAxis
from linop.strategies.tensor.calls import Calls
from linop.strategies.tensor.following.cuts import Followed
from linop.strategies.tensor.layouts import Layout, between, in_words
from linop.strategies.tensor.types import Types

_CACHE_SIZE = 32
"""Input signatures for which a module caches its functions."""


class ParallelLayer(Layer):
    """Base class of modules whose workers are those of an axis. Collective among them.

    Args:
        axis: the axis.
        inputs: layout of each input.
        output: layout of the output.
    """

    pieces = 0
    """Number of virtual workers that each worker computes as
    (`linop.strategies.tensor.modules.pieces`); 0: its work is not cut."""
    in_pieces = False
    """True if it can be cut, or computes the same bits on any number of workers."""

    def __init__(self, axis: MeshAxis, inputs: Sequence[Layout], output: Layout) -> None:
        with use(axis.backend):
            super().__init__([axis.partition] * len(inputs), axis.partition)
        self.axis, self.layouts, self.output_layout = axis, tuple(inputs), output
        self.calls: Calls | None = None
        self._in_a_call = False
        self._known = Settled(_CACHE_SIZE)

    def axes(self, number: int, ndim: int) -> Sequence[Axis]:
        return [_in_range(self._name, self.layouts[number], ndim)]

    def output_axes(self, grid: Partition, ndim: int) -> Sequence[Axis]:
        return [_in_range(self._name, self.output_layout, ndim)]

    def cut_into(self, pieces: int) -> None:
        """Compute as so many virtual workers. Before the first call.

        Raises:
            ArgumentError: it cannot be.
        """
        if COPIES in self.layouts or self.output_layout is COPIES:
            raise ArgumentError(
                f"{self._name}: from {in_words(self.layouts[0])} to "
                f"{in_words(self.output_layout)}. Gradients of what several modules use are added "
                f"before they are summed over workers, in another order than over shards: let each "
                f"module have an input that is split, as by ColwiseParallel(1), without "
                f"PrepareModuleInput"
            )
        if not self.in_pieces:
            raise ArgumentError(
                f"{self._name}: a module of this kind is not cut into shards; docs/exact_sums.md "
                f"lists those that are"
            )
        self.pieces = pieces

    def converted(
        self,
        X: TensorSpace,
        layout: Layout,
        sizes: Sequence[int] | None = None,
        of: int | None = None,
    ) -> tuple[TensorSpace, Function]:
        """The same global tensor in another layout, and the function to a worker's block of it from
        that of X. Collective.

        Args:
            sizes: lengths of the blocks of a dimension; by default those of X, where it is split
                along that already, or balanced.
            of: the number of the input that it is applied to, as in `Layer.moved`.
        """
        layout = _in_range(self._name, layout, X.ndim)
        cut = None
        if isinstance(layout, int):
            kept = [b - a for a, b in X.bounds[layout]] if layout in X.axes else None
            given = kept if sizes is None else sizes
            cut = None if given is None else {layout: given}
        Y = TensorSpace(X.global_shape, X.partition, X.dtype, [layout], X.name, sizes=cut)
        return Y, self.moved(between, X, Y, of=of)

    def hold_cut(
        self,
        name: str,
        whole: Tensor,
        layout: Layout,
        sizes: Sequence[int] | None = None,
        grid: Partition | None = None,
    ) -> None:
        """Register this worker's block of a parameter; None for an absent one, and on workers that
        are not in the grid.

        Args:
            whole: the sequential module's.
            sizes: lengths of the blocks; balanced by default.
            grid: the workers that have blocks, by default all.
        """
        if whole is None:
            self.register_parameter(name, None)
            return
        cut = {layout: sizes} if isinstance(layout, int) and sizes is not None else None
        here = self.inputs[0] if grid is None else grid
        hold(self, name, TensorSpace(whole.shape, here, axes=[layout], sizes=cut), whole)

    def parameter_layout(self, name: str) -> Layout | None:
        """Layout of a parameter; None where it is held by some workers only."""
        space = self.spaces[name]
        whole = space.partition.shape == self.axis.partition.shape
        return space.axes[0] if whole else None

    def forward(self, *tensors: Tensor | None) -> Tensor:
        """This worker's block of the output. See `Layer`."""
        if torch.compiler.is_compiling():
            return super().forward(*tensors)
        types = None if self.calls is None else self.calls.types
        if types is None:
            return super().forward(*tensors)
        try:
            types.check(self.layouts, tensors)
        except LinopError as error:
            name_layer(error, path_of(self), self._name)
            raise
        with types.suspended():
            result = super().forward(*tensors)
        types.mark(result, self._followed(types, result))
        return result

    def _followed(self, types: Types, result: Tensor) -> Followed:
        """The layout of a result, with the blocks of all workers."""
        layout = self.output_layout
        space: Any = self.__dict__.get("_output_space")
        if not isinstance(layout, int):
            return layout
        dim = layout % result.ndim
        whole = space.global_shape[dim]
        bounds = space.bounds[dim]
        shared = self.axis.size // len(bounds)  # workers that have the same block
        sizes = [b - a for a, b in bounds for _ in range(shared)]
        return types.cut(dim, result.ndim, sizes, whole)

    def _function(self, tensors: Sequence[Tensor | None]) -> Bound:
        bound = self._bound_to(tensors)
        self.__dict__["_output_space"] = getattr(bound.function, "output", None)
        return bound

    def _bound_to(self, tensors: Sequence[Tensor | None]) -> Bound:
        # The workers agreed on the call of the whole net, from which this one follows.
        calls = self.calls
        if not is_replaying():  # which follows the first computation
            # torch's Module.__setattr__ takes 1 µs
            self.__dict__["_in_a_call"] = calls is not None and calls.running
        total = None if calls is None else calls.total
        if total is None or self._agreement.debug or not self._in_a_call:
            return super()._function(tensors)
        own = tuple(
            [(n, p.shape, p.dtype, p.device) for n, p in self._parameters.items() if p is not None]
        )
        given = call_metadata(tensors, self.training, own)
        last = self._known.last
        if last is None or last.total != total or last.given != given:
            key = total, given
            last = self._known.get(key)
            if last is None:
                call = Call(given, None, total, self._new_function(given, {}))
                last = self._known.keep(key, call)
            self._known.last = last
        return last.bound

    def extra_repr(self) -> str:
        ins = ", ".join(map(in_words, self.layouts))
        return f"{self.axis.name} of {self.axis.size}, {ins} → {in_words(self.output_layout)}"


def laid_out_as(Y: TensorSpace, function: Function) -> Function:
    """The function of a module, which says the space of its output."""
    function.output = Y  # type: ignore[attr-defined]
    return function


class Redistribute(ParallelLayer):
    """A tensor in another layout.

    Args:
        axis: the axis.
        source, target: layouts.
        heads: parts of equal length of a dimension that is cut, which stay whole.
    """

    floating = False
    in_pieces = True

    def __init__(
        self, axis: MeshAxis, source: Layout, target: Layout, heads: int | None = None
    ) -> None:
        super().__init__(axis, [source], target)
        self.heads = heads

    def bind(self, *inputs: TensorSpace) -> Function:
        Y, convert = self.converted(inputs[0], self.output_layout, self._sizes_of(inputs[0]), of=0)
        return laid_out_as(Y, partial(_applied, convert))  # which others share

    def _sizes_of(self, X: TensorSpace) -> Sequence[int] | None:
        """Lengths of the blocks, of whole heads."""
        target, heads = self.output_layout, self.heads
        if heads is None or not isinstance(target, int):
            return None
        _in_range(self._name, target, X.ndim)
        n = X.global_shape[target]
        if n % heads:
            raise PartitionError(
                f"{self._name}: {n} features along dimension {target}, and heads={heads}: as many "
                f"for each expected"
            )
        return [k * (n // heads) for k in balanced(heads, self.axis.size)]


def _applied(function: Function, x: Tensor) -> Tensor:
    y: Tensor = function(x)
    # Another tensor, also where nothing moves: the argument keeps its layout for its other uses.
    return x.view_as(x) if y is x else y


def _in_range(name: str, layout: Layout, ndim: int) -> Layout:
    if not isinstance(layout, int):
        return layout
    if not -ndim <= layout < ndim:
        raise PartitionError(
            f"{name}: a tensor of {ndim} dimensions, which is to be split along dimension {layout}"
        )
    return layout % ndim
