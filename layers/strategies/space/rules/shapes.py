"""Functions that give a tensor another shape, or other elements in it: views, permutations, parts,
pads. A cut goes with its dimension; where blocks do not fit the new shape, they are moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from linop.operators.padding import edges
from linop.strategies.space.call import Call, Gathered, Refused
from linop.strategies.space.cut_tensor import CutTensor
from linop.strategies.space.layout import REPLICATED, Axis, Layout, even
from linop.strategies.space.saving import saving


def numbers(given: tuple[Any, ...]) -> tuple[int, ...]:
    """Numbers that are given one by one, or as one sequence."""
    if len(given) == 1 and isinstance(given[0], list | tuple | torch.Size):
        given = tuple(given[0])
    return tuple(int(n) for n in given)


# Views


def reshaped(call: Call, input: Any, shape: Sequence[int]) -> Any:
    """A tensor in another shape."""
    x = call.cut(input)
    old = tuple(x.shape)
    new = _completed(old, shape)
    if old == new:
        return x
    if 0 in old:
        raise Gathered
    layout = x.blocks
    places: dict[int, tuple[int, Any, Any]] = {}
    # Of two dimensions that begin one, the longer: the other one has extent 1.
    for d in sorted(layout.cut, key=lambda d: -old[d]):
        found = _survives(call, layout, d, old, new)
        if found is not None and found[0] not in [e for e, _, _ in places.values()]:
            places[d] = found
    axes: list[Axis] = [
        d if d in places or not isinstance(d, int) else REPLICATED for d in layout.axes
    ]
    before = layout.changed(axes=axes, bounds={d: rows for d, (_, rows, _) in places.items()})
    moved = before != layout
    block = call.to(x, before)
    after = before.moved_dims({d: e for d, (e, _, _) in places.items()}, new)
    after = after.changed(bounds={e: cuts for e, _, cuts in places.values()})
    result = call.wrap(block.reshape(call.local_shape(after)), after)
    return _as_copy(result, x, moved)


def _as_copy(result: Any, x: CutTensor, moved: bool) -> Any:
    if isinstance(result, CutTensor):
        result.is_copy = moved or x.is_copy
    return result


def _completed(old: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    given = list(shape)
    if -1 in given:
        rest = prod(n for n in given if n != -1)
        given[given.index(-1)] = prod(old) // rest if rest else 0
    if prod(given) != prod(old):
        raise RuntimeError(f"shape '{list(shape)}' is invalid for input of size {prod(old)}")
    return tuple(given)


def _survives(
    call: Call, layout: Layout, d: int, old: Sequence[int], new: Sequence[int]
) -> tuple[int, Any, Any] | None:
    """The dimension of the new shape that is cut as dimension d of the old one is; the blocks of
    both, which hold the same elements; None, if there is none, for the elements of a block do not
    follow each other."""
    first, last, low, high = _group(d, old, new)
    if any(old[i] != 1 for i in range(first, d)):
        return None
    at = next((j for j in range(low, high) if new[j] != 1), None)
    if at is None:
        return None
    inner_old, inner_new = prod(old[d + 1 : last]), prod(new[at + 1 : high])
    rows = layout.bounds[d]
    if inner_old % inner_new == 0:
        ratio = inner_old // inner_new
        return at, rows, tuple((a * ratio, b * ratio) for a, b in rows)
    if inner_new % inner_old == 0:
        ratio = inner_new // inner_old
        if new[at] < len(rows):
            return None
        if any(a % ratio or b % ratio for a, b in rows):
            cuts = even(new[at], len(rows))
        else:
            cuts = tuple((a // ratio, b // ratio) for a, b in rows)
        return at, tuple((a * ratio, b * ratio) for a, b in cuts), cuts
    return None


def _group(d: int, old: Sequence[int], new: Sequence[int]) -> tuple[int, int, int, int]:
    """The smallest ranges of dimensions of both shapes, with d, that hold the same elements."""
    i = j = 0
    while True:
        first, low = i, j
        a, b = old[i] if i < len(old) else 1, new[j] if j < len(new) else 1
        i, j = i + 1, j + 1
        while a != b:
            if a < b:
                a, i = a * old[i], i + 1
            else:
                b, j = b * new[j], j + 1
        if d < i:
            while j < len(new) and new[j] == 1:
                j += 1
            return first, i, low, min(j, len(new))


def view(call: Call, input: Any, *shape: Any, **kwargs: Any) -> Any:
    """view, reshape."""
    if kwargs or (shape and isinstance(shape[0], torch.dtype)):
        shape = (kwargs["shape"],) if "shape" in kwargs else shape
        if "shape" not in kwargs:
            raise Gathered
    return reshaped(call, input, numbers(shape))


def view_as(call: Call, input: Any, other: Any) -> Any:
    return reshaped(call, input, tuple(other.shape))


def flatten(call: Call, input: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    shape = tuple(input.shape)
    if not shape:
        raise Gathered
    a, b = start_dim % len(shape), end_dim % len(shape)
    return reshaped(call, input, (*shape[:a], prod(shape[a : b + 1]), *shape[b + 1 :]))


def unflatten(call: Call, input: Any, dim: int, sizes: Any) -> Any:
    shape = tuple(input.shape)
    d = dim % len(shape)
    part = _completed((shape[d],), tuple(sizes))
    return reshaped(call, input, (*shape[:d], *part, *shape[d + 1 :]))


def squeeze(call: Call, input: Any, dim: Any = None) -> Any:
    shape = tuple(input.shape)
    dims = range(len(shape)) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {d % len(shape) for d in dims if shape[d] == 1}
    return reordered(call, input, [d for d in range(len(shape)) if d not in gone])


def unsqueeze(call: Call, input: Any, dim: int) -> Any:
    order: list[int | None] = [*range(input.ndim)]
    order.insert(dim % (input.ndim + 1), None)
    return reordered(call, input, order)


def reordered(call: Call, input: Any, order: Sequence[int | None]) -> Any:
    """A tensor with its dimensions in another order: None for a new one; those that are left out
    have extent 1."""
    x = call.cut(input)
    gone = [d for d in range(x.ndim) if d not in order]
    x = call.uncut(x, gone)
    shape = [1 if d is None else x.shape[d] for d in order]
    kept = [d for d in order if d is not None]
    block = x.block if isinstance(x, CutTensor) else x
    block = block.permute(*kept, *gone)
    block = block.reshape(block.shape[: len(kept)]) if gone else block
    for k, d in enumerate(order):
        if d is None:
            block = block.unsqueeze(k)
    places = {d: k for k, d in enumerate(order) if d is not None}
    return _as_copy(
        call.wrap(block, call.layout(x).moved_dims(places, shape)), input, x is not input
    )


def permute(call: Call, input: Any, *dims: Any, **kwargs: Any) -> Any:
    order = numbers(dims or (kwargs["dims"],))
    return reordered(call, input, [d % input.ndim for d in order])


def transpose(call: Call, input: Any, *dims: Any, **kwargs: Any) -> Any:
    """transpose, swapaxes, swapdims."""
    a, b = (d % input.ndim for d in (*dims, *kwargs.values()))
    order = list(range(input.ndim))
    order[a], order[b] = b, a
    return reordered(call, input, order)


def movedim(call: Call, input: Any, source: Any, destination: Any) -> Any:
    n = input.ndim
    of = [s % n for s in ([source] if isinstance(source, int) else source)]
    to = [d % n for d in ([destination] if isinstance(destination, int) else destination)]
    placed = dict(zip(to, of, strict=True))
    rest = iter([d for d in range(n) if d not in of])
    return reordered(call, input, [placed[k] if k in placed else next(rest) for k in range(n)])


def turned(call: Call, input: Any) -> Any:
    """T, mT, mH, t."""
    order = list(range(input.ndim))
    if call.name in ("mT", "mH", "adjoint"):
        order[-2:] = order[-1], order[-2]
    else:
        order.reverse()
    if call.name in ("mH", "H", "adjoint") and input.is_complex():
        raise Gathered
    return reordered(call, input, order)


def expand(call: Call, input: Any, *sizes: Any, **kwargs: Any) -> Any:
    x = call.cut(input)
    wanted = list(numbers(sizes or (kwargs["size"],)))
    ahead = len(wanted) - x.ndim
    for d, n in enumerate(x.shape):
        if wanted[ahead + d] == -1:
            wanted[ahead + d] = n
    stretched = [d for d in x.blocks.cut if x.shape[d] != wanted[ahead + d]]
    y = call.uncut(x, stretched)
    layout = call.layout(y).moved_dims({d: d + ahead for d in range(x.ndim)}, wanted)
    block = y.block if isinstance(y, CutTensor) else y
    return _as_copy(call.wrap(block.expand(call.local_shape(layout)), layout), x, y is not x)


def repeat(call: Call, input: Any, *sizes: Any) -> Any:
    """repeat, tile: along dimensions that are not cut."""
    x = call.cut(input)
    times = list(numbers(sizes))
    times = [1] * (x.ndim - len(times)) + times if call.name == "tile" else times
    ahead = len(times) - x.ndim
    y = call.uncut(x, [d for d in x.blocks.cut if times[ahead + d] != 1])
    shape = [n * (1 if d < 0 else x.shape[d]) for d, n in enumerate(times, start=-ahead)]
    layout = call.layout(y).moved_dims({d: d + ahead for d in range(x.ndim)}, shape)
    block = y.block if isinstance(y, CutTensor) else y
    return call.wrap(block.repeat(times), layout)


# Parts


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
        return _as_copy(result, x, False)
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
    return _as_copy(call.wrap(block[where], out), x, True)


def select(call: Call, input: Any, dim: int, index: int) -> Any:
    x = call.cut(input)
    d = dim % x.ndim
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
    return _as_copy(call.wrap(block, layout.moved_dims(places, shape)), x, d in x.blocks.cut)


def narrow(call: Call, input: Any, dim: int, start: Any, length: int) -> Any:
    n = input.shape[dim]
    a = int(start) % n if n else 0
    return part(call, input, {dim % input.ndim: (a, a + length, 1)})


def _pieces(call: Call, input: Any, d: int, sizes: Sequence[int]) -> tuple[Any, ...]:
    found, at = [], 0
    for size in sizes:
        found.append(part(call, input, {d: (at, at + size, 1)}))
        at += size
    return tuple(found)


def split(call: Call, input: Any, split_size: Any = None, dim: int = 0, **kwargs: Any) -> Any:
    """split, split_with_sizes."""
    size = next(iter(kwargs.values())) if split_size is None else split_size
    d = dim % input.ndim
    n = input.shape[d]
    if isinstance(size, int):
        size = [min(size, n - a) for a in range(0, n, size)]
    return _pieces(call, input, d, size)


def chunk(call: Call, input: Any, chunks: int, dim: int = 0) -> Any:
    n = input.shape[dim]
    return split(call, input, max(1, -(-n // chunks)), dim)


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
    if (here := saving()) is not None:
        here.changes(place.block)
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
    d = dim % first.ndim
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
    runs, local = {}, []
    for s, d in zip(by, along, strict=True):
        d %= x.ndim
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
    d = dim % x.ndim
    shape = [n * repeats if e == d else n for e, n in enumerate(x.shape)]
    bounds = {
        e: tuple((a * repeats, b * repeats) for a, b in x.blocks.bounds[e])
        if e == d
        else x.blocks.bounds[e]
        for e in x.blocks.cut
    }
    return call.wrap(x.block.repeat_interleave(repeats, d), x.blocks.changed(shape, bounds=bounds))
