"""Functions that give a tensor another shape: views, permutations, expansions. A cut goes with its
dimension; where blocks do not fit the new shape, they are moved."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from linop.spaces.decomposition import in_multiples
from linop.strategies.space.call import Call, Gathered, dim_of
from linop.strategies.space.cut_tensor import CutTensor
from linop.strategies.space.layout import REPLICATED, Axis, Layout


def numbers(given: tuple[Any, ...]) -> tuple[int, ...]:
    """Numbers that are given one by one, or as one sequence."""
    if len(given) == 1 and isinstance(given[0], list | tuple | torch.Size):
        given = tuple(given[0])
    return tuple(int(n) for n in given)


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
    return as_copy(result, x, moved)


def as_copy(result: Any, x: CutTensor, moved: bool) -> Any:
    """A result that is a view in torch, marked where it is a copy here."""
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
        cuts = in_multiples(rows, new[at], ratio)
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
    a, b = dim_of(start_dim, len(shape)), dim_of(end_dim, len(shape))
    if a > b:
        raise RuntimeError(f"flatten: start_dim={start_dim} comes after end_dim={end_dim}")
    return reshaped(call, input, (*shape[:a], prod(shape[a : b + 1]), *shape[b + 1 :]))


def unflatten(call: Call, input: Any, dim: int, sizes: Any) -> Any:
    shape = tuple(input.shape)
    part = torch.unflatten(torch.empty(shape, device="meta"), dim, tuple(sizes)).shape
    return reshaped(call, input, tuple(part))


def squeeze(call: Call, input: Any, dim: Any = None) -> Any:
    shape = tuple(input.shape)
    dims = range(len(shape)) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {d for d in (dim_of(d, len(shape)) for d in dims) if shape[d] == 1}
    return reordered(call, input, [d for d in range(len(shape)) if d not in gone])


def unsqueeze(call: Call, input: Any, dim: int) -> Any:
    order: list[int | None] = [*range(input.ndim)]
    order.insert(dim_of(dim, input.ndim + 1), None)
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
    return as_copy(
        call.wrap(block, call.layout(x).moved_dims(places, shape)), input, x is not input
    )


def permute(call: Call, input: Any, *dims: Any, **kwargs: Any) -> Any:
    order = numbers(dims or (kwargs["dims"],))
    return reordered(call, input, [dim_of(d, input.ndim) for d in order])


def transpose(call: Call, input: Any, *dims: Any, **kwargs: Any) -> Any:
    """transpose, swapaxes, swapdims."""
    a, b = (dim_of(d, input.ndim) for d in (*dims, *kwargs.values()))
    order = list(range(input.ndim))
    order[a], order[b] = b, a
    return reordered(call, input, order)


def movedim(call: Call, input: Any, source: Any, destination: Any) -> Any:
    n = input.ndim
    of = [dim_of(s, n) for s in ([source] if isinstance(source, int) else source)]
    to = [dim_of(d, n) for d in ([destination] if isinstance(destination, int) else destination)]
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
        input = input.conj()
    return reordered(call, input, order)


def parts(call: Call, input: Any) -> Any:
    """view_as_real: real and imaginary parts as a new last dimension."""
    x = call.cut(input)
    return as_copy(call.wrap(call.function(x.block), x.blocks.changed((*x.shape, 2))), x, False)


def of_parts(call: Call, input: Any) -> Any:
    """view_as_complex: of real and imaginary parts, the last dimension."""
    x = call.uncut(call.cut(input), (input.ndim - 1,))
    if not isinstance(x, CutTensor):
        return call.function(x)
    layout = x.blocks.moved_dims({d: d for d in range(x.ndim - 1)}, x.shape[:-1])
    return as_copy(call.wrap(call.function(x.block), layout), x, x is not input)


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
    return as_copy(call.wrap(block.expand(call.local_shape(layout)), layout), x, y is not x)


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
