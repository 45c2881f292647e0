"""Functions that take parts of tensors, and that put parts together: not along the cut."""

from __future__ import annotations

from typing import Any

import torch

from linop.strategies.tensor.following.along import dims_of, refuse_along
from linop.strategies.tensor.following.cuts import Cut, Refused
from linop.strategies.tensor.following.elementwise import broadcast
from linop.strategies.tensor.following.function_call import FunctionCall
from linop.strategies.tensor.following.sizes import Varied

_FUSED = (
    "its parts are not in this worker's block. Of a projection of several parts, as of queries, "
    "keys and values, or gate and up, give packed= in the plan"
)


def divided(number: int, default: int, loses: bool = False) -> Any:
    """A rule for parts along a dimension: chunk, split, narrow, and select, which loses it."""

    def rule(call: FunctionCall) -> Cut:
        x, cut = call.cut_of()
        (dim,) = dims_of(call.given(number, "dim", default=default), x.ndim)[:1]
        if dim == cut.dim:
            refuse_along(cut, x.ndim, _FUSED)
        return cut.at(cut.dim - (dim < cut.dim)) if loses else cut

    return rule


def iterated(call: FunctionCall) -> Cut:
    return divided(9, 0, loses=True)(call)  # type: ignore[no-any-return]


def indexed(call: FunctionCall) -> Cut:
    """x[…]."""
    x, cut = call.cut_of()
    return _indexed(call, x, cut, call.given(1, "idx"))


def assigned(call: FunctionCall) -> None:
    """x[…] = y: of the same blocks, or of what is the same for all of them."""
    x, value = call.given(0), call.given(2)
    cut = call.layout_of(x)
    if not isinstance(cut, Cut):
        raise Refused("in place of a whole tensor")
    part = _indexed(call, x, cut, call.given(1))
    if isinstance(value, torch.Tensor):
        selected = x.detach()[call.given(1)]

        def layout_of(y: Any) -> Any:
            return part if y is selected else call.layout_of(y)

        inner = FunctionCall("copy", call.function, (), {}, layout_of, call.workers, call.index)
        broadcast(inner, [selected, value])
    call.result  # noqa: B018  # computed


def _indexed(call: FunctionCall, x: Any, cut: Cut, index: Any) -> Cut:
    items = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(i, torch.Tensor) and isinstance(call.layout_of(i), Cut) for i in items):
        raise Refused("by indices that are split")
    used = sum(_covers(i) for i in items)
    if not any(i is Ellipsis for i in items):
        items.append(Ellipsis)
    at = next(k for k, i in enumerate(items) if i is Ellipsis)
    items[at : at + 1] = [slice(None)] * (x.ndim - used)
    return cut.at(_place_of(x, cut, items))


def _covers(item: Any) -> int:
    """The number of dimensions that an index is of."""
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    is_mask = isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8)
    return item.ndim if is_mask else 1


def _place_of(x: Any, cut: Cut, items: list[Any]) -> int:
    """The dimension of the result that is cut."""
    dim, behind, made = 0, 0, 0
    advanced: list[tuple[int, Any]] = []
    place = -1
    for number, item in enumerate(items):
        covered = _covers(item)
        if dim <= cut.dim < dim + covered:
            if not (isinstance(item, slice) and _is_all(item, cut)):
                refuse_along(cut, x.ndim, _FUSED)
            place, behind = made, len(advanced)
        if isinstance(item, torch.Tensor | list) and covered:
            advanced.append((number, item))
        elif isinstance(item, slice) or item is None or isinstance(item, bool):
            made += 1
        dim += covered
    if not advanced:
        return place
    numbers = [number for number, _ in advanced]
    adjacent = numbers == list(range(numbers[0], numbers[-1] + 1))
    adjacent = adjacent and all(
        not isinstance(items[n], int) or isinstance(items[n], bool) for n in range(len(items))
    )
    shapes = [_index_shape(item) for _, item in advanced]
    count = len(torch.broadcast_shapes(*shapes))
    if adjacent:
        return place + count if behind else place
    if any(isinstance(i, int) and not isinstance(i, bool) for i in items):
        raise Refused("by indices and numbers together; index in two steps")
    return place + count


def _index_shape(item: Any) -> tuple[int, ...]:
    if isinstance(item, torch.Tensor):
        return (1,) if item.dtype in (torch.bool, torch.uint8) else tuple(item.shape)
    return tuple(torch.as_tensor(item).shape)


def _is_all(item: slice, cut: Cut) -> bool:
    """True if a slice is of all of the dimension that is cut, on every worker."""
    start, stop, step = item.start, item.stop, item.step
    if isinstance(start, Varied) or isinstance(step, Varied):
        return False
    ends = stop is None or stop == 2**63 - 1
    if isinstance(stop, Varied):
        ends = stop.values == cut.sizes
    elif isinstance(stop, int) and not ends:
        ends = stop >= max(*cut.sizes, cut.whole)
    return start in (None, 0) and step in (None, 1) and ends


def joined(call: FunctionCall) -> Cut:
    """cat: of tensors that are all cut in the same way."""
    tensors, cut = _all_cut(call)
    ndim = tensors[0].ndim
    (dim,) = dims_of(call.given(1, "dim", "axis", default=0), ndim)
    if dim == cut.dim:
        refuse_along(cut, ndim, "parts of several tensors would be one block")
    return cut


def stacked(call: FunctionCall) -> Cut:
    tensors, cut = _all_cut(call)
    dim = call.given(1, "dim", default=0) % (tensors[0].ndim + 1)
    return cut.at(cut.dim + (dim <= cut.dim))


def _all_cut(call: FunctionCall) -> tuple[list[Any], Cut]:
    given = call.given(0, "tensors")
    tensors = [x for x in given if x.ndim > 1 or x.numel()]  # torch ignores shape (0,)
    layouts = [call.layout_of(x) for x in tensors]
    cut = next(one for one in layouts if isinstance(one, Cut))
    for x, layout in zip(tensors, layouts, strict=True):
        if not isinstance(layout, Cut):
            raise Refused(
                "of whole tensors and ones that are split; one layout expected (a tensor that was "
                "made outside of calls is whole, unless it is in a cache where a split one was)"
            )
        if (layout.dim - x.ndim, layout.sizes) != (cut.dim - tensors[0].ndim, cut.sizes):
            raise Refused("of tensors that are split in several ways; one layout expected")
    return tensors, cut


def selected(call: FunctionCall) -> Cut:
    """index_select: by indices that all workers have."""
    x, cut = call.cut_of()
    (dim,) = dims_of(call.given(1, "dim"), x.ndim)
    if dim == cut.dim:
        refuse_along(cut, x.ndim, _FUSED)
    return cut


def gathered(call: FunctionCall) -> Cut:
    """gather, scatter and take_along_dim: by indices and sources that are cut alike."""
    x = call.given(0, "input", "self")
    named = "indices" if call.name == "take_along_dim" else "index"
    number = (1, 2) if call.name == "take_along_dim" else (2, 1)
    index, dim = call.given(number[0], named), call.given(number[1], "dim")
    cut = call.layout_of(x)
    tensors = [x, index, *(y for y in call.tensors if y is not x and y is not index)]
    if not isinstance(cut, Cut) or not isinstance(dim, int):
        raise Refused("of a whole tensor")
    if dim % x.ndim == cut.dim:
        refuse_along(cut, x.ndim)
    for y in tensors:
        theirs = call.layout_of(y)
        if not isinstance(theirs, Cut) or (theirs.dim, theirs.sizes) != (cut.dim, cut.sizes):
            raise Refused("by indices or values that are not split as the tensor is")
    return cut


def put(call: FunctionCall) -> Cut:
    """index_copy and index_add: of a source that is cut alike, at indices that all workers have, as
    keys and values are put into a cache of fixed length."""
    x, source = call.given(0, "input", "self"), call.given(3, "source", "tensor")
    cut, dim = call.layout_of(x), call.given(1, "dim")
    theirs = call.layout_of(source)
    if not isinstance(cut, Cut):
        raise Refused("into a whole tensor")
    if dim % x.ndim == cut.dim:
        refuse_along(cut, x.ndim)
    if not isinstance(theirs, Cut) or (theirs.dim, theirs.sizes) != (cut.dim, cut.sizes):
        raise Refused("of a source that is not split as the tensor is")
    if isinstance(call.layout_of(call.given(2, "index")), Cut):
        raise Refused("at indices that are split")
    return cut
