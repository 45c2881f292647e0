"""Functions along some dimensions, of which each worker has to have the whole: where they are cut,
they are gathered on the workers that share them."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

from linop.strategies.space.call import Call, Gathered, dims_of
from linop.strategies.space.layout import Layout


def along(number: int, default: Any, *names: str) -> Any:
    """A rule for a function along the dimensions in an argument; its result may have other extents
    there, or lack them.

    Args:
        number: position of the argument.
        default: its value if it is not given.
        names: of the argument; "dim".
    """

    def rule(call: Call, input: Any, *args: Any, **kwargs: Any) -> Any:
        x = call.cut(input)
        others = [y for y in (*args, *kwargs.values()) if isinstance(y, Tensor)]
        if others:
            raise Gathered
        dim = args[number - 1] if len(args) >= number else default
        for name in names or ("dim",):
            dim = kwargs.get(name, dim)
        if dim is None:
            raise Gathered
        dims = dims_of(dim, x.ndim)
        x = call.uncut(x, dims)
        if call.layout(x).is_whole:
            return call.function(x, *args, **kwargs)
        result = call.function(x.block, *args, **kwargs)
        return tree_map(lambda y: _wrapped(call, y, x.blocks, dims), result)

    return rule


def _wrapped(call: Call, y: Any, layout: Layout, dims: tuple[int, ...]) -> Any:
    if not isinstance(y, Tensor):
        return y
    if y.ndim == len(layout.shape):
        shape = [y.shape[d] if d in dims else n for d, n in enumerate(layout.shape)]
        return call.wrap(y, layout.changed(shape))
    left = [d for d in range(len(layout.shape)) if d not in dims]
    if y.ndim != len(left):
        raise Gathered
    places = {d: k for k, d in enumerate(left)}
    return call.wrap(y, layout.moved_dims(places, [layout.shape[d] for d in left]))


def channels(number: int) -> Any:
    """A rule for a function that mixes dimension 1 of its first argument, and keeps the others."""

    def rule(call: Call, input: Any, *args: Any, **kwargs: Any) -> Any:
        x = call.uncut(call.cut(input), (number,))
        if call.layout(x).is_whole:
            return call.function(x, *args, **kwargs)
        return call.wrap(call.function(x.block, *args, **kwargs), x.blocks)

    return rule
