"""Outputs of a projection of several parts, as of queries, keys and values: a tensor in which this
worker has some features of each part, one part after the other.

A program takes it apart by the numbers of the sequential module (``qkv[..., :n]``,
``qkv.split(n, -1)``, ``qkv.view(b, s, 3, heads, width)``): `Packed` gives the worker's features of
that part. It is a tensor like any other until then: functions element by element keep the parts;
every other function is refused. It needs nobody who follows a call, so it works in later calls, and
in what `torch.utils.checkpoint` computes again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from linop.errors import PartitionError
from linop.spaces.partition import balanced
from linop.strategies.tensor.following.cuts import Cut
from linop.strategies.tensor.following.rules import SAFE, is_elementwise
from linop.strategies.tensor.following.sizes import plain

Parts = tuple[tuple[int, ...], ...]
"""Lengths of the blocks of each part, by worker."""


def in_parts(y: Tensor, parts: Parts, index: int) -> Packed:
    """A tensor whose last dimension has this worker's features of each part.

    Args:
        index: of this worker.
    """
    packed: Packed = y.as_subclass(Packed)
    packed.parts, packed.me = parts, index
    return packed


class Packed(torch.Tensor):
    """See `in_parts`."""

    parts: Parts
    me: int

    @classmethod
    def __torch_function__(
        cls,
        function: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """See torch's "Extending torch"."""
        del types
        args, kwargs = (*args,), dict(kwargs or {})
        name = _name(function)
        x = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, Packed))
        with torch._C.DisableTorchFunctionSubclass():
            if name in SAFE or name in _ASKING:
                return function(*args, **kwargs)
            taken = _TAKEN.get(name)
            if taken is not None:
                return taken(x, *tree_map(plain, args[1:]), **tree_map(plain, kwargs))
            if name in _KEEPING or (is_elementwise(name) and _is_alone(x, args, kwargs)):
                return _kept(x, function(*args, **kwargs))
        raise PartitionError(
            f"{name} of the output of a projection of {len(x.parts)} parts (packed=), of shape "
            f"{tuple(x.shape)}, of which each worker has some features: take the parts first "
            f"(split, chunk, a slice, or unflatten), or leave the projection whole with "
            f"output_layouts=linop.REPLICATED and without packed="
        )


def layout_of_part(x: Any) -> Cut | None:
    """The layout of what was taken from a `Packed`, or of one; None of another tensor."""
    if isinstance(x, Packed):
        sizes = tuple(map(sum, zip(*x.parts, strict=True)))
        return Cut(x.ndim - 1, sizes, sum(sizes), x.me)
    return getattr(x, "_linop_cut", None)


def _name(function: Any) -> str:
    name = getattr(function, "__name__", "")
    if name == "__get__":
        return str(getattr(getattr(function, "__self__", None), "__name__", name))
    return str(name)


_ASKING = frozenset("__repr__ __format__ backward register_hook retain_grad requires_grad_".split())
_KEEPING = frozenset("detach clone contiguous to double float half bfloat16 type_as".split())


def _is_alone(x: Packed, args: Any, kwargs: Any) -> bool:
    """True if all other tensors have one element, or this one's shape."""
    others = [y for y in tree_leaves((args, kwargs)) if isinstance(y, torch.Tensor)]
    return all(y.numel() == 1 or (isinstance(y, Packed) and y.parts == x.parts) for y in others)


def _kept(x: Packed, result: Any) -> Any:
    def again(y: Any) -> Any:
        same = isinstance(y, torch.Tensor) and y.shape[-1:] == x.shape[-1:]
        return in_parts(y.as_subclass(torch.Tensor), x.parts, x.me) if same else y

    return tree_map(again, result)


def _widths(x: Packed) -> list[int]:
    return [sum(part) for part in x.parts]


def _between(x: Packed, begin: int, end: int) -> Any:
    """Features of the sequential output from one place to another, which are parts.

    Raises:
        PartitionError: they are not.
    """
    whole = [*accumulate(_widths(x), initial=0)]
    mine = [*accumulate((part[x.me] for part in x.parts), initial=0)]
    for ends in (whole, mine):  # numbers of the program, or of this worker's tensor
        if begin in ends and end in ends and begin < end:
            first, last = ends.index(begin), len(ends) - 1 - ends[::-1].index(end)
            part = x.as_subclass(torch.Tensor).narrow(-1, mine[first], mine[last] - mine[first])
            if last - first > 1:
                return in_parts(part, x.parts[first:last], x.me)
            return _cut(part, part.ndim - 1, x.parts[first], x.me)
    raise PartitionError(
        f"features {begin} to {end} of the output of a projection whose parts (packed=) are "
        f"{', '.join(map(str, _widths(x)))} features long: each worker has some features of each "
        f"part, so that whole parts expected; give packed= as the program takes them"
    )


def _cut(part: Tensor, dim: int, sizes: Sequence[int], index: int) -> Tensor:
    """A part, which says how it is cut."""
    part._linop_cut = Cut(dim, tuple(sizes), sum(sizes), index)  # type: ignore[attr-defined]
    return part


def _is_last(x: Packed, dim: Any) -> bool:
    return isinstance(dim, int) and dim % x.ndim == x.ndim - 1


def _other(x: Packed, dim: Any, name: str) -> None:
    raise PartitionError(
        f"{name} along dimension {dim} of the output of a projection of {len(x.parts)} parts "
        f"(packed=), of shape {tuple(x.shape)}: take the parts first, along the last dimension"
    )


def _split(x: Packed, split_size: Any = None, dim: Any = 0, **named: Any) -> Any:
    lengths = named.get("split_size_or_sections", named.get("split_sizes", split_size))
    if not _is_last(x, dim):
        _other(x, dim, "split")
    if isinstance(lengths, int):
        whole = sum(_widths(x))
        whole = whole if lengths in _steps(_widths(x)) else x.shape[-1]
        lengths = [min(lengths, whole - at) for at in range(0, whole, lengths)]
    ends = [*accumulate(lengths, initial=0)]
    return tuple(_between(x, a, b) for a, b in pairwise(ends))


def _steps(widths: Sequence[int]) -> set[int]:
    """Lengths of equal steps along parts."""
    return {sum(widths[:k]) for k in range(1, len(widths) + 1)}


def _chunk(x: Packed, chunks: int, dim: int = 0) -> Any:
    if not _is_last(x, dim):
        _other(x, dim, "chunk")
    whole = sum(_widths(x))
    return _split(x, -(-whole // chunks), -1)


def _tensor_split(x: Packed, indices_or_sections: Any = None, dim: int = 0, **named: Any) -> Any:
    given = named.get("indices", named.get("sections", indices_or_sections))
    if not _is_last(x, dim):
        _other(x, dim, "tensor_split")
    given = given.tolist() if isinstance(given, torch.Tensor) else given
    parts, whole = {*accumulate(_widths(x), initial=0)}, sum(_widths(x))
    if isinstance(given, int):
        given = [*accumulate(balanced(whole, given))][:-1]
    ends = [n + whole if n < 0 else n for n in given]
    if not parts.issuperset(ends):  # numbers of this worker's tensor
        whole = x.shape[-1]
        ends = [n + whole if n < 0 else n for n in given]
    return tuple(_between(x, a, b) for a, b in pairwise([0, *ends, whole]))


def _glu(x: Packed, dim: int = -1) -> Any:
    """A part, times what the other one opens of it."""
    if not _is_last(x, dim) or len(x.parts) != 2 or x.parts[0] != x.parts[1]:
        _other(x, dim, "glu")
    y = torch.nn.functional.glu(x.as_subclass(torch.Tensor), -1)
    return _cut(y, y.ndim - 1, x.parts[0], x.me)


def _narrow(x: Packed, dim: int, start: int, length: int) -> Any:
    if not _is_last(x, dim):
        _other(x, dim, "narrow")
    return _between(x, start, start + length)


def _item(x: Packed, index: Any) -> Any:
    items = list(index) if isinstance(index, tuple) else [index]
    if not all(i is Ellipsis or isinstance(i, slice) for i in items):
        _other(x, index, "__getitem__")
    used = sum(i is not Ellipsis for i in items)
    at = next((k for k, i in enumerate(items) if i is Ellipsis), len(items))
    items[at : at + 1] = [slice(None)] * (x.ndim - used)
    last = items[-1]
    if last.step not in (None, 1):
        _other(x, index, "__getitem__")
    whole = sum(_widths(x))
    begin, end, _ = last.indices(whole)
    if last == slice(None):
        part: Any = x
    else:
        part = _between(x, begin, end)
    if all(i == slice(None) for i in items[:-1]):
        return part
    others = part.as_subclass(torch.Tensor)[(*items[:-1], slice(None))]
    if isinstance(part, Packed):
        return in_parts(others, part.parts, x.me)
    cut: Cut = part._linop_cut
    return _cut(others, cut.dim, cut.sizes, cut.index)


def _unflatten(x: Packed, dim: int, sizes: Sequence[int]) -> Any:
    if not _is_last(x, dim):
        _other(x, dim, "unflatten")
    return _view(x, *x.shape[:-1], *sizes)


def _view(x: Packed, *shape: Any, **named: Any) -> Any:
    """view and reshape: parts as a dimension of their own."""
    shape = tuple(named.get("shape", named.get("size", shape)))
    if len(shape) == 1 and isinstance(shape[0], tuple | list):
        shape = tuple(shape[0])
    widths = _widths(x)
    if len({*widths}) == 1 and all(isinstance(n, int) for n in shape):
        for width in widths[0], x.parts[0][x.me]:  # by numbers of the program, or of this worker
            made = _apart(x, shape, width)
            if made is not None:
                return made
    full = _resolved(shape, x.numel())
    if full and full[-1] == x.shape[-1]:  # other dimensions alone
        return in_parts(x.as_subclass(torch.Tensor).reshape(full), x.parts, x.me)
    raise PartitionError(
        f"a view as {shape} of the output of a projection of parts (packed=) that are "
        f"{', '.join(map(str, widths))} features long, of shape {tuple(x.shape)} on this worker: "
        f"(…, {len(x.parts)}, heads, width) expected, with heads= in the plan for whole heads; "
        f"parts of other lengths are taken by split or slices"
    )


def _apart(x: Packed, shape: Sequence[int], width: int) -> Tensor | None:
    """The view as (…, parts, features of each, …); None if the shape is no such one.

    Args:
        width: features of a part, in the shape's numbers.
    """
    count, rows = len(x.parts), prod(x.shape[:-1])
    full = _resolved(shape, rows * count * width) or ()
    for k, n in enumerate(full):
        ends = prod(full[:k]) == rows and prod(full[k + 1 :]) == width
        if n == count and ends and full[k + 1 :]:
            inner, sizes = prod(full[k + 2 :]), x.parts[0]
            if any(size % inner for size in sizes):
                return None
            local = *full[: k + 1], sizes[x.me] // inner, *full[k + 2 :]
            y = x.as_subclass(torch.Tensor).reshape(local)
            return _cut(y, k + 1, [size // inner for size in sizes], x.me)
    return None


def _resolved(shape: Sequence[int], count: int) -> tuple[int, ...] | None:
    """A shape of so many elements, without -1; None if there is none."""
    known = prod(n for n in shape if n != -1)
    if -1 not in shape:
        return tuple(shape) if known == count else None
    if not known or count % known or shape.count(-1) > 1:
        return None
    return tuple(count // known if n == -1 else n for n in shape)


_TAKEN: Mapping[str, Any] = {
    **dict.fromkeys(("split", "split_with_sizes", "unsafe_split"), _split),
    **dict.fromkeys(("chunk", "unsafe_chunk"), _chunk),
    "tensor_split": _tensor_split,
    "glu": _glu,
    "narrow": _narrow,
    "__getitem__": _item,
    "unflatten": _unflatten,
    **dict.fromkeys(("view", "reshape"), _view),
}
