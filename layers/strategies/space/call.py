"""One call of a torch function on cut tensors, as rules see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from linop.strategies.space.cut_tensor import CutTensor, wrapped
from linop.strategies.space.grid import Grid
from linop.strategies.space.layout import COPIES, REPLICATED, Axis, Layout


class Gathered(Exception):
    """Raised by a rule that leaves the call to torch, on whole tensors; before anything moves."""


class Refused(Exception):
    """A call that cannot be computed of cut tensors: the reason, and the cure."""


class Call:
    """A function of torch, and the workers.

    Args:
        grid: of the cut tensors.
        name: of the function.
        function: torch's.
    """

    def __init__(self, grid: Grid, name: str, function: Callable[..., Any]) -> None:
        self.grid, self.name, self.function = grid, name, function

    def layout(self, x: Tensor) -> Layout:
        """The layout of an argument; a plain tensor is whole."""
        return x.blocks if isinstance(x, CutTensor) else self.grid.whole(x.shape)

    def wrap(self, block: Tensor, layout: Layout) -> Any:
        """The result whose block this is."""
        return wrapped(block, layout, self.grid)

    def cut(self, x: Any) -> CutTensor:
        """An argument, where it is the one that has to be cut.

        Raises:
            Gathered: it is whole, and another argument is cut.
        """
        if not isinstance(x, CutTensor):
            raise Gathered
        return x

    def to(self, x: Tensor, target: Layout, segments: Any = ()) -> Tensor:
        """This worker's block of an argument in a layout."""
        if not isinstance(x, CutTensor):
            return self.grid.move(x, self.layout(x), target, segments)
        return self.grid.move(x.block, x.blocks, target, segments)

    def uncut(self, x: Any, dims: Sequence[int]) -> Any:
        """A tensor that is not cut in some dimensions: they are gathered on the workers that share
        them."""
        layout = self.layout(x)
        if not {*layout.cut} & {*dims}:
            return x
        axes = [REPLICATED if axis in dims else axis for axis in layout.axes]
        target = layout.changed(axes=axes)
        return self.wrap(self.to(x, target), target)

    def beside(
        self, x: Tensor | None, layout: Layout, dims: Mapping[int, int] | None = None
    ) -> Any:
        """This worker's block of an argument that is used with blocks of a layout, such as a
        parameter.

        Args:
            x: the argument, which may be cut or whole; None gives None.
            dims: for dimensions of the layout, that of the argument which is along it. The others
                are cut in the layout alone: of the argument each worker has a copy.
        """
        if x is None:
            return None
        return self.to(x, self.target(x, layout, dims or {}))

    def target(self, x: Tensor, layout: Layout, dims: Mapping[int, int]) -> Layout:
        """The layout that `beside` moves to."""
        shape = tuple(x.shape)
        axes: list[Axis] = []
        bounds = {}
        for axis in layout.axes:
            if isinstance(axis, int):
                own = dims.get(axis)
                if own is not None:
                    bounds[own] = layout.bounds[axis]
                axes.append(COPIES if own is None else own)
            else:
                axes.append(axis)
        return self.grid.whole(shape).changed(axes=axes, bounds=bounds)

    def total(self, block: Tensor, layout: Layout) -> tuple[Tensor, Layout]:
        """Sums over the workers that have copies of a layout, and its layout, which those then
        have alike."""
        axes = [REPLICATED if axis is COPIES else axis for axis in layout.axes]
        target = layout.changed(axes=axes)
        return self.grid.move(block, layout, target), target

    def reduced(self, layout: Layout, dims: Sequence[int]) -> Layout:
        """The layout of sums of blocks over some dimensions, which are kept with extent 1: where
        they are cut, workers have terms of the sum."""
        shape = [1 if d in dims else n for d, n in enumerate(layout.shape)]
        axes = [COPIES if axis in dims else axis for axis in layout.axes]
        return layout.changed(shape, axes, dict.fromkeys(dims, ((0, 1),)))

    def sums(self, block: Tensor, layout: Layout, dims: Sequence[int]) -> tuple[Tensor, Layout]:
        """Sums over some dimensions, which are kept with extent 1, and their layout."""
        return self.total(block.sum(tuple(dims), keepdim=True), self.reduced(layout, dims))

    def local_shape(self, layout: Layout) -> tuple[int, ...]:
        return self.grid.local_shape(layout)


def _is_flat(args: Any, kwargs: Any) -> bool:
    return not any(isinstance(x, list | tuple | dict) for x in (*args, *kwargs.values()))


def leaves(args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """All arguments of a call, also those in lists, tuples and dicts."""
    if _is_flat(args, kwargs):  # torch's walk through a tree takes longer than most rules
        return [*args, *kwargs.values()]
    return tree_leaves((args, kwargs))


def mapped(function: Callable[[Any], Any], args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Arguments of a call, each by a function."""
    if _is_flat(args, kwargs):
        return tuple(map(function, args)), {key: function(x) for key, x in kwargs.items()}
    found: tuple[Any, Any] = tree_map(function, (args, kwargs))
    return found


def dims_of(dim: Any, ndim: int) -> tuple[int, ...]:
    """Dimensions from 0; all, for None or none."""
    if dim is None or (isinstance(dim, tuple | list) and not dim):
        return tuple(range(ndim))
    given = dim if isinstance(dim, tuple | list | torch.Size) else (dim,)
    found = sorted(dim_of(d, ndim) for d in given)
    if len({*found}) < len(found):
        raise RuntimeError(f"dim={dim!r}: a dimension appears twice")
    return tuple(found)


def dim_of(dim: int, ndim: int) -> int:
    """A dimension from 0.

    Raises:
        IndexError: there is none of that number, in torch's words.
    """
    if not -ndim <= dim < ndim:
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-ndim}, {ndim - 1}], but got "
            f"{dim})"
        )
    return dim % ndim


def count(shape: Sequence[int], dims: Sequence[int]) -> int:
    """Number of elements along some dimensions."""
    return prod(shape[d] for d in dims)


def per_dim(value: Any, ndim: int) -> tuple[int, ...]:
    """One number for each dimension."""
    if isinstance(value, int):
        return (value,) * ndim
    given = tuple(int(v) for v in value)
    return given * ndim if len(given) == 1 else given
