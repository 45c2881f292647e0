"""Sums over dimensions, and functions that are reductions of reductions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from linop.strategies.space.call import Call, Gathered, count, dims_of
from linop.strategies.space.cut_tensor import CutTensor
from linop.strategies.space.layout import REPLICATED, Layout


def kept(call: Call, block: Tensor, layout: Layout, dims: Sequence[int], keepdim: bool) -> Any:
    """The result of a reduction over dimensions, which have extent 1, and are dropped unless
    `keepdim`."""
    if keepdim:
        return call.wrap(block, layout)
    left = [d for d in range(len(layout.shape)) if d not in dims]
    shape = [layout.shape[d] for d in left]
    block = block.reshape([block.shape[d] for d in left])
    return call.wrap(block, layout.moved_dims({d: k for k, d in enumerate(left)}, shape))


def total(
    call: Call,
    input: Any,
    dim: Any = None,
    keepdim: bool = False,
    dtype: Any = None,
    axis: Any = None,
) -> Any:
    """sum."""
    x = call.cut(input)
    dims = dims_of(dim if axis is None else axis, x.ndim)
    block = x.block
    if dtype is not None:
        block = block.to(dtype)
    elif not (block.is_floating_point() or block.is_complex()):
        block = block.to(torch.int64)
    sums, layout = call.sums(block, x.blocks, dims)
    return kept(call, sums, layout, dims, keepdim)


def mean(
    call: Call,
    input: Any,
    dim: Any = None,
    keepdim: bool = False,
    dtype: Any = None,
    axis: Any = None,
) -> Any:
    """mean."""
    x = call.cut(input)
    dims = dims_of(dim if axis is None else axis, x.ndim)
    if dtype is None and not (x.block.is_floating_point() or x.block.is_complex()):
        raise Gathered  # torch's error
    block = x.block if dtype is None else x.block.to(dtype)
    sums, layout = call.sums(block, x.blocks, dims)
    return kept(call, sums / count(x.shape, dims), layout, dims, keepdim)


def variance(call: Call, input: Any, *args: Any, **kwargs: Any) -> Any:
    """var, std, var_mean, std_mean: by the sum of squared differences from the mean."""
    x = call.cut(input)
    given = dict(kwargs)
    positional = list(args)
    dim: Any = given.pop("dim", given.pop("axis", None))
    correction: Any = given.pop("correction", 1)
    if positional and isinstance(positional[0], bool):  # var(unbiased)
        correction = int(positional.pop(0))
    elif positional:
        dim = positional.pop(0)
        if positional:
            correction = int(positional.pop(0))
    if "unbiased" in given:
        correction = int(given.pop("unbiased"))
    keepdim = bool(positional.pop(0)) if positional else bool(given.pop("keepdim", False))
    if given or positional:
        raise Gathered
    correction = 1 if correction is None else correction
    dims = dims_of(dim, x.ndim)
    n = count(x.shape, dims)
    sums, layout = call.sums(x.block, x.blocks, dims)
    middle = sums / n
    centered = x.block - call.grid.move(middle, layout, call.reduced(x.blocks, dims))
    square = centered.square() if not centered.is_complex() else torch.view_as_real(centered)
    square = square if not centered.is_complex() else square.square().sum(-1)
    squares, layout = call.sums(square, x.blocks, dims)
    result = squares / max(n - correction, 0)
    if call.name.startswith("std"):
        result = result.sqrt()
    first = kept(call, result, layout, dims, keepdim)
    if call.name.endswith("_mean"):
        return first, kept(call, middle, layout, dims, keepdim)
    return first


def nested(call: Call, x: Any, dims: Sequence[int], keepdim: bool, function: Any) -> Any:
    """A reduction of the results of blocks, which are gathered.

    Args:
        function: reduces a tensor over dimensions, and keeps them.
    """
    layout = x.blocks
    for d in dims:
        k = layout.axis_of(d)
        if k is not None and any(a == b for a, b in layout.bounds[d]):
            x = call.uncut(x, (d,))  # a worker has nothing to reduce
            if not isinstance(x, CutTensor):
                return kept(
                    call,
                    function(x, dims),
                    call.grid.whole([1 if e in dims else n for e, n in enumerate(x.shape)]),
                    dims,
                    keepdim,
                )
            layout = x.blocks
    part = function(x.block, dims)
    parts = len([d for d in dims if layout.axis_of(d) is not None])
    shape = [
        1 if d in dims and layout.axis_of(d) is None else len(layout.bounds[d]) if d in dims else n
        for d, n in enumerate(layout.shape)
    ]
    ones = {
        d: tuple((j, j + 1) for j in range(len(layout.bounds[d])))
        for d in dims
        if layout.axis_of(d) is not None
    }
    here = layout.changed(shape, bounds=ones)
    axes = [REPLICATED if axis in dims else axis for axis in here.axes]
    there = here.changed(axes=axes)
    gathered = call.grid.move(part, here, there)
    result = function(gathered, dims) if parts else gathered
    shape = [1 if d in dims else n for d, n in enumerate(layout.shape)]
    return kept(call, result, there.changed(shape), dims, keepdim)


def extreme(call: Call, input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """amax, amin, logsumexp, any, all."""
    x = call.cut(input)
    dims = dims_of(dim, x.ndim)

    def function(block: Tensor, dims: Sequence[int]) -> Tensor:
        if call.name in ("any", "all"):
            for d in dims:
                block = call.function(block, d, True)
            return block
        return call.function(block, tuple(dims), True)  # type: ignore[no-any-return]

    return nested(call, x, dims, keepdim, function)


def norm(
    call: Call, input: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Any:
    """vector_norm: the norm of the norms of blocks."""
    x = call.cut(input)
    if dtype is not None or ord == 0:
        raise Gathered
    dims = dims_of(dim, x.ndim)

    def function(block: Tensor, dims: Sequence[int]) -> Any:
        return torch.linalg.vector_norm(block, ord, tuple(dims), True)

    return nested(call, x, dims, keepdim, function)


def torch_norm(
    call: Call,
    input: Any,
    p: Any = "fro",
    dim: Any = None,
    keepdim: bool = False,
    out: Any = None,
    dtype: Any = None,
) -> Any:
    """torch.norm, of vectors."""
    if out is not None or p == "nuc":
        raise Gathered
    return norm(call, input, 2 if p in ("fro", None) else p, dim, keepdim, dtype)


def most(call: Call, input: Any, *args: Any, **kwargs: Any) -> Any:
    """max and min: of two tensors, of all elements, or along a dimension."""
    from linop.strategies.space.rules.along import along
    from linop.strategies.space.rules.elementwise import elementwise

    x = call.cut(input) if not args and "other" not in kwargs else input
    other = args[0] if args else kwargs.get("other", kwargs.get("dim"))
    if isinstance(other, Tensor):
        return elementwise(call, x, *args, **kwargs)
    if other is not None:
        return along(1, None)(call, call.cut(x), *args, **kwargs)
    function = torch.amax if call.name == "max" else torch.amin

    def reduce(block: Tensor, dims: Sequence[int]) -> Any:
        return function(block, tuple(dims), True)

    return nested(call, x, dims_of(None, x.ndim), False, reduce)
