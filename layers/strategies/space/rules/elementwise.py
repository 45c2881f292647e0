"""Functions element by element, in broadcasts: the result is cut as the arguments are, which are
moved to one layout where theirs differ."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from linop.strategies.space.call import Call, Gathered, Refused, leaves, mapped
from linop.strategies.space.cut_tensor import CutTensor
from linop.strategies.space.layout import COPIES, REPLICATED, Axis, Layout


def elementwise(call: Call, *args: Any, **kwargs: Any) -> Any:
    """A function of tensors that are broadcast."""
    if kwargs.get("out") is not None:
        raise Gathered
    tensors = [x for x in leaves(args, kwargs) if isinstance(x, Tensor)]
    name = call.name
    in_place = (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE
    in_place = in_place or bool(kwargs.get("inplace"))
    if in_place and not isinstance(args[0], CutTensor):
        # A whole tensor, which every worker changes by the whole of the others.
        args, kwargs = mapped(lambda x: x.whole() if isinstance(x, CutTensor) else x, args, kwargs)
        return call.function(*args, **kwargs)
    target = target_in_place(args[0]) if in_place else broadcast(call, tensors)
    args, kwargs = mapped(lambda x: _operand(call, x, target), args, kwargs)
    result = call.function(*args, **kwargs)
    if in_place:
        return tensors[0]
    if isinstance(result, Tensor):
        return call.wrap(result, target)
    return tree_map(lambda y: call.wrap(y, target) if isinstance(y, Tensor) else y, result)


_IN_PLACE = frozenset(
    f"__i{name}__"
    for name in "add sub mul truediv div floordiv mod pow and or xor lshift rshift".split()
)


def target_in_place(x: Any) -> Layout:
    """The layout of a tensor that is changed in place: its own.

    Raises:
        Refused: the change would be lost.
    """
    if x.is_copy:
        raise Refused(
            "changes a view in place, whose blocks had to be moved, so that they are a copy here; "
            "write it without changing its argument"
        )
    layout: Layout = x.blocks
    return layout


def broadcast(call: Call, tensors: list[Any]) -> Layout:
    """The layout of a broadcast: each grid axis cuts what it cuts in the first argument that it
    cuts."""
    layouts = [call.layout(x) for x in tensors]
    shape = tuple(torch.broadcast_shapes(*(one.shape for one in layouts)))
    axes: list[Axis] = []
    bounds = {}
    for k in range(len(call.grid.extents)):
        found: Axis = REPLICATED
        for one in layouts:
            d = one.axes[k]
            if not isinstance(d, int):
                continue
            at = d + len(shape) - len(one.shape)
            if one.shape[d] == shape[at] and at not in axes:
                found = at
                bounds[at] = one.bounds[d]
                break
        axes.append(found)
    return call.grid.whole(shape).changed(axes=axes, bounds=bounds)


def _operand(call: Call, x: Any, target: Layout) -> Any:
    return operand(call, x, target) if isinstance(x, Tensor) else x


def operand(call: Call, x: Tensor, target: Layout) -> Tensor:
    """This worker's block of an argument of a broadcast."""
    shape = tuple(x.shape)
    ahead = len(target.shape) - len(shape)
    axes: list[Axis] = []
    bounds = {}
    for axis in target.axes:
        if not isinstance(axis, int):
            axes.append(axis)
            continue
        d = axis - ahead
        if d >= 0 and shape[d] == target.shape[axis]:
            axes.append(d)
            bounds[d] = target.bounds[axis]
        else:
            axes.append(COPIES)
    return call.to(x, call.grid.whole(shape).changed(axes=axes, bounds=bounds))


def prelu(call: Call, input: Any, weight: Any) -> Any:
    """prelu: a slope for each channel."""
    x = call.cut(input)
    if weight.numel() > 1 and x.ndim > 1:
        x = call.uncut(x, (1,))
    if not isinstance(x, CutTensor):
        return call.function(x, weight)
    return call.wrap(call.function(x.block, call.beside(weight, x.blocks)), x.blocks)
