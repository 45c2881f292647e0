"""Functions that take parts of tensors, put them together, and pad them: in balanced blocks of the
result, where it is cut along such a dimension."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from linop.operators.padding import edges
from linop.strategies.space.call import Call, Gathered, Refused, dim_of
from linop.strategies.space.cut_tensor import CutTensor
from linop.strategies.space.layout import REPLICATED, Layout, even
from linop.strategies.space.rules.views import as_copy, reordered


def numbers(given: tuple[Any, ...]) -> tuple[int, ...]:
    """Numbers that are given one by one, or as one sequence."""
    if len(given) == 1 and isinstance(given[0], list | tuple | torch.Size):
        given = tuple(given[0])
    return tuple(int(n) for n in given)


def part(call: Call, x: Any, ranges: Mapping[int, tuple[int, int, int]]) -> Any:
    """x[start:stop:step] in some dimensions, none empty; where one is cut, in balanced blocks."""
    x = call.cut(x)
    shape = list(x.shape)
    for d, (a, b, s) in ranges.items():
        shape[d] = max(0, -(-(b - a) // s))
    moving = [d for d in x.blocks.cut if d in ranges and (ranges[d] != (0, x.shape[d], 1))]
    if not moving:
        where = tuple(
            slice(*ranges[d]) if d in ranges and d not in x.blocks.cut else slice(None)
            for d in range(x.ndim)
        )
        bounds = {d: x.blocks.bounds[d] for d in x.blocks.cut}
        result = call.wrap(x.block[where], x.blocks.changed(shape, bounds=bounds))
        return as_copy(result, x, False)
    kept = x.blocks.changed(axes=[REPLICATED if d in moving else d for d in x.blocks.axes])
    out = call.grid.follow(kept.changed(shape, x.blocks.axes, {}), shape)
    keep = {d: x.blocks.bounds[d] for d in x.blocks.cut if d not in moving}
    out = out.changed(bounds={d: c for d, c in keep.items() if d in out.cut})
    needed = {}
    for d in out.cut:
        if d in moving:
            a, _, s = ranges[d]
            needed[d] = tuple(
                (a + i * s, a + (j - 1) * s + 1) if i < j else (0, 0) for i, j in out.bounds[d]
            )
        else:
            needed[d] = out.bounds[d]
    for d in moving:
        if d not in out.cut and shape[d]:
            a, _, s = ranges[d]
            needed[d] = ((a, a + (shape[d] - 1) * s + 1),)
    block = call.to(x, x.blocks.changed(axes=out.axes, bounds=needed))
    where = tuple(
        (slice(None, None, ranges[d][2]) if d in needed else slice(*ranges[d]))
        if d in ranges
        else slice(None)
        for d in range(x.ndim)
    )
    return as_copy(call.wrap(block[where], out), x, True)


def select(call: Call, input: Any, dim: int, index: int) -> Any:
    x = call.cut(input)
    d = dim_of(dim, x.ndim)
    i = int(index)
    if not -x.shape[d] <= i < x.shape[d]:
        raise IndexError(f"index {i} of dimension {d} of extent {x.shape[d]}")
    i %= x.shape[d]
    if d in x.blocks.cut:
        # The workers along the axis all get it.
        axes = [REPLICATED if axis == d else axis for axis in x.blocks.axes]
        target = x.blocks.changed(axes=axes, bounds={d: ((i, i + 1),)})
        block = call.to(x, target).select(d, 0)
    else:
        axes, block = list(x.blocks.axes), x.block.select(d, i)
    places = {e: e - (e > d) for e in range(x.ndim) if e != d}
    layout = x.blocks.changed(axes=axes)
    shape = [n for e, n in enumerate(x.shape) if e != d]
    return as_copy(call.wrap(block, layout.moved_dims(places, shape)), x, d in x.blocks.cut)


def narrow(call: Call, input: Any, dim: int, start: Any, length: int) -> Any:
    a, like = int(start), _like(input)
    torch.narrow(like, dim, a, length)
    a += like.shape[dim] if a < 0 else 0
    return part(call, input, {dim % input.ndim: (a, a + length, 1)})


def _like(x: Any) -> Tensor:
    """A tensor without memory: torch's own checks are made of it, and its own sizes."""
    return torch.empty(x.shape, device="meta")


def _pieces(call: Call, input: Any, dim: int, like: Sequence[Tensor]) -> tuple[Any, ...]:
    """Parts along a dimension, one after the other, of the extents of torch's own."""
    d, found, at = dim % input.ndim, [], 0
    for size in [one.shape[d] for one in like]:
        found.append(part(call, input, {d: (at, at + size, 1)}))
        at += size
    return tuple(found)


def split(call: Call, input: Any, split_size: Any = None, dim: int = 0, **kwargs: Any) -> Any:
    """split, split_with_sizes."""
    size = next(iter(kwargs.values())) if split_size is None else split_size
    return _pieces(call, input, dim, torch.split(_like(input), size, dim))


def chunk(call: Call, input: Any, chunks: int, dim: int = 0) -> Any:
    return _pieces(call, input, dim, torch.chunk(_like(input), chunks, dim))


def unbind(call: Call, input: Any, dim: int = 0) -> Any:
    return tuple(select(call, input, dim, k) for k in range(input.shape[dim]))


def getitem(call: Call, input: Any, index: Any) -> Any:
    """x[…], by numbers, slices, None and …; by tensors of whole tensors."""
    if not isinstance(input, CutTensor):
        raise Gathered
    items = list(index) if isinstance(index, tuple) else [index]
    if any(not (i is None or i is Ellipsis or isinstance(i, int | slice)) for i in items) or any(
        isinstance(i, bool) for i in items
    ):
        raise Gathered
    used = sum(i is not None and i is not Ellipsis for i in items)
    if Ellipsis not in items:
        items.append(Ellipsis)
    at = items.index(Ellipsis)
    items[at : at + 1] = [slice(None)] * (input.ndim - used)
    ranges, d = {}, 0
    for item in items:
        if isinstance(item, slice):
            r = item.indices(input.shape[d])
            if r != (0, input.shape[d], 1):
                ranges[d] = (r[0], max(r[0], r[1]), r[2])
        d += item is not None
    x: Any = part(call, input, ranges) if ranges else input
    d = 0
    for item in items:
        if item is None:
            x, d = x.unsqueeze(d), d + 1
        elif isinstance(item, int):
            x = x.select(d, item)
        else:
            d += 1
    return reordered(call, x, range(x.ndim)) if x is input else x


def setitem(call: Call, input: Any, index: Any, value: Any) -> Any:
    """x[…] = y, where a part is taken that is not of cut dimensions."""
    from linop.strategies.space.rules.elementwise import operand, target_in_place

    if not isinstance(input, CutTensor):
        value = value.whole() if isinstance(value, CutTensor) else value
        return call.function(input, index, value)
    layout = target_in_place(input)
    place = getitem(Call(call.grid, "__getitem__", call.function), input, index)
    if not isinstance(place, CutTensor) or place.is_copy or place.blocks.cut == ():
        raise Refused(
            f"of a part along a dimension that is cut ({layout.cut}); write it without changing "
            f"the tensor, as by torch.where or torch.cat"
        )
    if isinstance(value, Tensor):
        value = operand(call, value, place.blocks)
    place.block.copy_(value) if isinstance(value, Tensor) else place.block.fill_(value)


# Parts that are put together


def cat(call: Call, tensors: Any, dim: int = 0, **kwargs: Any) -> Any:
    """cat, concat, concatenate."""
    if kwargs.get("out") is not None:
        raise Gathered
    dim = kwargs.get("axis", dim)
    parts = [x for x in tensors if not (x.ndim == 1 and x.shape[0] == 0)]
    first = next((x for x in parts if isinstance(x, CutTensor)), None)
    if first is None or any(x.ndim != first.ndim for x in parts):
        raise Gathered
    d = dim_of(dim, first.ndim)
    n = sum(x.shape[d] for x in parts)
    shape = [n if e == d else m for e, m in enumerate(first.shape)]
    for x in parts:
        if any(a != b for e, (a, b) in enumerate(zip(x.shape, shape, strict=True)) if e != d):
            raise Gathered  # torch's error
    dtype = parts[0].dtype
    for x in parts:
        dtype = torch.promote_types(dtype, x.dtype)
    out = first.blocks.changed(shape, bounds={e: first.blocks.bounds[e] for e in first.blocks.cut})
    if d in first.blocks.cut:
        k = first.blocks.axes.index(d)
        out = out.changed(bounds={d: even(n, call.grid.extents[k])})
    blocks, at = [], 0
    for x in parts:
        m = x.shape[d]
        bounds = {e: out.bounds[e] for e in out.cut}
        if d in out.cut:
            bounds[d] = tuple(
                (min(max(a - at, 0), m), min(max(b - at, 0), m)) for a, b in out.bounds[d]
            )
        target = call.grid.whole(x.shape).changed(axes=out.axes, bounds=bounds)
        blocks.append(call.to(x, target).to(dtype))
        at += m
    return call.wrap(torch.cat(blocks, d), out)


def stack(call: Call, tensors: Any, dim: int = 0, **kwargs: Any) -> Any:
    parts = [x.unsqueeze(dim) for x in tensors]
    return torch.cat(parts, dim)


# Pads


def pad(
    call: Call, input: Any, pad: Sequence[int], mode: str = "constant", value: Any = None
) -> Any:
    """pad: of each mode; negative widths cut off."""
    x = call.cut(input)
    flat = tuple(int(p) for p in pad)
    count = len(flat) // 2
    pairs = [(0, 0)] * (x.ndim - count) + [
        (flat[2 * j], flat[2 * j + 1]) for j in reversed(range(count))
    ]
    cut = [d for d in x.blocks.cut if pairs[d] != (0, 0)]
    if mode != "constant":
        # torch's own checks of the widths, and of the number of dimensions.
        F.pad(torch.empty(x.shape, device="meta"), list(flat), mode)
    if not cut:
        shape = [n + a + b for n, (a, b) in zip(x.shape, pairs, strict=True)]
        if 0 in x.block.shape:
            layout = x.blocks.changed(shape)
            return call.wrap(call.grid.empty(layout, x.block.dtype, x.block), layout)
        result = F.pad(x.block, list(flat), mode, value)
        return call.wrap(result, x.blocks.changed(shape))
    shape = [
        n + a + b if d in cut else n
        for d, (n, (a, b)) in enumerate(zip(x.shape, pairs, strict=True))
    ]
    if min(shape) < 1:
        raise Gathered
    out = call.grid.follow(x.blocks.changed(shape, x.blocks.axes, {}), shape)
    keep = {d: x.blocks.bounds[d] for d in x.blocks.cut if d not in cut and d in out.cut}
    out = out.changed(bounds=keep)
    if any(d not in out.cut for d in cut):
        raise Gathered
    kind: Any = "zeros" if mode == "constant" else mode
    widths = [pairs[d] if d in cut else (0, 0) for d in range(x.ndim)]
    runs = edges(tuple(x.shape), widths, kind)
    segments = tuple((d, tuple((s.at, s.of, s.length) for s in runs[d])) for d in cut)
    block = call.to(x, out, segments)
    if mode == "constant" and value:
        block = _filled(call, block, out, widths, x.shape, value)
    rest = [(0, 0) if d in cut else pair for d, pair in enumerate(pairs)]
    result = call.wrap(block, out)
    if any(pair != (0, 0) for pair in rest):
        flat = tuple(w for pair in reversed(rest[x.ndim - count :]) for w in pair)
        return F.pad(result, flat, mode, value)
    return result


def _filled(
    call: Call, block: Tensor, out: Layout, widths: Any, shape: Sequence[int], value: float
) -> Tensor:
    """The block with another constant than 0 in its padding."""
    outside = torch.zeros((), dtype=torch.bool, device=block.device)
    for d, (left, _) in enumerate(widths):
        a, b = call.grid.range_of(out, d)
        index = torch.arange(a - left, b - left, device=block.device)
        outside = outside[..., None] | ((index < 0) | (index >= shape[d]))
    return block.masked_fill(outside, value)


def roll(call: Call, input: Any, shifts: Any, dims: Any = None) -> Any:
    """roll: shifts around the ends."""
    x = call.cut(input)
    if dims is None:
        raise Gathered
    by = [shifts] if isinstance(shifts, int) else list(shifts)
    along = [dims] if isinstance(dims, int) else list(dims)
    runs: dict[int, Any] = {}
    local: list[tuple[int, int]] = []
    for s, d in zip(by, along, strict=True):
        d = dim_of(d, x.ndim)
        n = x.shape[d]
        s = s % n if n else 0
        if d in runs or d in [e for _, e in local]:
            raise Gathered
        if d in x.blocks.cut:
            runs[d] = tuple(r for r in ((s, 0, n - s), (0, n - s, s)) if r[2])
        else:
            local.append((s, d))
    block = call.to(x, x.blocks, tuple(sorted(runs.items()))) if runs else x.block
    if local:
        block = block.roll([s for s, _ in local], [d for _, d in local])
    return call.wrap(block, x.blocks)


def pixel_shuffle(call: Call, input: Any, upscale_factor: int) -> Any:
    """pixel_shuffle: channels to pixels; blocks grow."""
    x = call.uncut(call.cut(input), (input.ndim - 3,))
    if call.layout(x).is_whole:
        return call.function(x, upscale_factor)
    r, n = upscale_factor, x.ndim
    shape = (*x.shape[:-3], x.shape[-3] // (r * r), x.shape[-2] * r, x.shape[-1] * r)
    bounds = {
        d: tuple((a * r, b * r) for a, b in x.blocks.bounds[d])
        if d >= n - 2
        else x.blocks.bounds[d]
        for d in x.blocks.cut
    }
    layout = x.blocks.changed(shape, bounds=bounds)
    if 0 in x.block.shape:
        return call.wrap(call.grid.empty(layout, x.block.dtype, x.block), layout)
    return call.wrap(call.function(x.block, r), layout)


def pixel_unshuffle(call: Call, input: Any, downscale_factor: int) -> Any:
    """pixel_unshuffle: pixels to channels; blocks begin at multiples of the factor."""
    r, n = downscale_factor, input.ndim
    x = call.uncut(call.cut(input), (n - 3,))
    if call.layout(x).is_whole or x.shape[-2] % r or x.shape[-1] % r:
        raise Gathered
    shape = (*x.shape[:-3], x.shape[-3] * r * r, x.shape[-2] // r, x.shape[-1] // r)
    cuts = {d: x.blocks.bounds[d] for d in x.blocks.cut if d < n - 2}
    rows = dict(cuts)
    for d in x.blocks.cut:
        if d >= n - 2:
            cuts[d] = even(shape[d], len(x.blocks.bounds[d]))
            rows[d] = tuple((a * r, b * r) for a, b in cuts[d])
    block = call.to(x, x.blocks.changed(bounds=rows))
    layout = x.blocks.changed(shape, bounds=cuts)
    if 0 in call.local_shape(layout):
        return call.wrap(call.grid.empty(layout, block.dtype, block), layout)
    return call.wrap(call.function(block, r), layout)


def repeat_interleave(call: Call, input: Any, repeats: Any, dim: Any = None, **kwargs: Any) -> Any:
    """repeat_interleave: of each element of a dimension as many."""
    x = call.cut(input)
    if dim is None or not isinstance(repeats, int) or kwargs:
        raise Gathered
    d = dim_of(dim, x.ndim)
    shape = [n * repeats if e == d else n for e, n in enumerate(x.shape)]
    bounds = {
        e: tuple((a * repeats, b * repeats) for a, b in x.blocks.bounds[e])
        if e == d
        else x.blocks.bounds[e]
        for e in x.blocks.cut
    }
    return call.wrap(x.block.repeat_interleave(repeats, d), x.blocks.changed(shape, bounds=bounds))
