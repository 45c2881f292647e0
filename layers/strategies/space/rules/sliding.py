"""Convolutions, transposed convolutions and pools: the output is cut into balanced blocks, each
worker gets the input that its block needs (paper, appendix B), and torch computes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from linop.layers.sliding import (
    TransposedWindow,
    Window,
    adaptive_range,
    average,
    conv_padding,
    cropped,
    largest,
    of_windows,
    pool_window,
)
from linop.strategies.space.call import Call, Gathered, per_dim
from linop.strategies.space.layout import Layout

Pads = Sequence[tuple[int, int]]


def outputs(window: Window, n: Sequence[int]) -> tuple[int, ...]:
    """Extents of the output of a kernel.

    Raises:
        RuntimeError: it would be empty, as torch's.
    """
    found = window.output(n)
    if min(found) < 1:
        raise RuntimeError(f"{window} for an input of {tuple(n)}: the output would be empty")
    return found


def batched(call: Call, rule: Any, x: Any, ndim: int, *args: Any, **kwargs: Any) -> Any:
    """The result for an input without batch; None if it has one."""
    if x.ndim != ndim + 1:
        return None
    return rule(call, x.unsqueeze(0), *args, **kwargs).squeeze(0)


def padded_range(
    call: Call, x: Any, out: Layout, first: int, needed: Any, pads: Pads = ((0, 0),) * 3
) -> tuple[Tensor, list[tuple[int, int]]]:
    """This worker's block of the input of a kernel, zeros of the padding included where a dimension
    is cut; and the padding that is left to do in the others.

    Args:
        out: the layout of the output.
        first: the first dimension of space.
        needed: gives the range of the padded input that a range of outputs needs: a function of the
            dimension of space, its extent, and the range.
        pads: (left, right) of each dimension of space; by default there is no padding.
    """
    source = call.layout(x)
    shape, left = list(source.shape), []
    bounds = {d: out.bounds[d] for d in out.cut if d < first}
    segments: list[Any] = []
    for j, (n, (before, after)) in enumerate(zip(source.shape[first:], pads, strict=False)):
        d = first + j
        if d not in out.cut:
            left.append((before, after))
            continue
        left.append((0, 0))
        shape[d] = n + before + after
        bounds[d] = tuple(needed(j, n, a, b) if a < b else (0, 0) for a, b in out.bounds[d])
        if before or after:
            segments.append((d, ((before, 0, n),)))
    target = source.changed(shape, out.axes, bounds)
    return call.to(x, target, tuple(segments)), left


def conv(
    call: Call,
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    """conv1d, conv2d, conv3d."""
    x = call.cut(input)
    ndim = weight.ndim - 2
    one = batched(call, conv, x, ndim, weight, bias, stride, padding, dilation, groups)
    if one is not None:
        return one
    size = tuple(weight.shape[2:])
    steps, spread = per_dim(stride, ndim), per_dim(dilation, ndim)
    pads = conv_padding(call.name, padding, size, spread)
    window = Window(size, steps, pads, spread)
    x = call.uncut(x, (1,))
    if x.shape[1] != weight.shape[1] * groups:
        raise RuntimeError(
            f"{call.name}: weight of shape {tuple(weight.shape)} with groups={groups}, and an "
            f"input of shape {tuple(x.shape)}: {weight.shape[1] * groups} channels expected"
        )
    extents = outputs(window, x.shape[2:])
    out = call.grid.follow(call.layout(x), (x.shape[0], weight.shape[0], *extents))
    block, rest = padded_range(call, x, out, 2, window.inputs, pads)
    w, b = call.beside(weight, out), call.beside(bias, out)
    mine = call.local_shape(out)
    if 0 in mine:
        return call.wrap(call.grid.empty(out, block.dtype, block, w, b), out)
    if any(before != after for before, after in rest):
        block, rest = F.pad(block, _flat(rest)), [(0, 0)] * ndim
    result = call.function(block, w, b, steps, [p for p, _ in rest], spread, groups)
    return call.wrap(result, out)


def _flat(pads: Pads) -> list[int]:
    return [width for pair in reversed(list(pads)) for width in pair]


def conv_transpose(
    call: Call,
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    """conv_transpose1d, conv_transpose2d, conv_transpose3d: output o gets input i by the kernel's
    element j, o = i·stride − padding + j·dilation."""
    x = call.cut(input)
    ndim = weight.ndim - 2
    settings = stride, padding, output_padding, groups, dilation
    one = batched(call, conv_transpose, x, ndim, weight, bias, *settings)
    if one is not None:
        return one
    kernel = TransposedWindow(
        tuple(weight.shape[2:]),
        *(per_dim(value, ndim) for value in (stride, padding, output_padding, dilation)),
    )
    x = call.uncut(x, (1,))
    n = x.shape[2:]
    extents = kernel.output(n)
    more = zip(kernel.output_padding, kernel.stride, kernel.dilation, strict=True)
    if min(extents) < 1 or any(q >= max(s, d) for q, s, d in more):
        raise Gathered  # torch's error
    shape = (x.shape[0], weight.shape[1] * groups, *extents)
    out = call.grid.follow(call.layout(x), shape)
    block, _ = padded_range(call, x, out, 2, kernel.inputs)
    w, b = call.beside(weight, out), call.beside(bias, out)
    if 0 in call.local_shape(out):
        return call.wrap(call.grid.empty(out, block.dtype, block, w, b), out)
    # Locally there is no padding: what is not of this block is cut off.
    crops = []
    for j in range(ndim):
        cut = call.grid.range_of(out, 2 + j)
        begin = kernel.inputs(j, n[j], *cut)[0] if 2 + j in out.cut else 0
        crops.append(kernel.crop(j, begin, block.shape[2 + j], *cut))
    extra = [more for more, _ in crops]
    result = call.function(block, w, b, kernel.stride, 0, extra, groups, kernel.dilation)
    return call.wrap(cropped(result, [where for _, where in crops]), out)


# Pools


def _pooled(call: Call, x: Any, settings: Any, fill: float, pool: Any) -> Any:
    """A pool over the last dimensions.

    Args:
        settings: kernel, stride, padding and dilation, a tuple of each, and `ceil_mode`.
        fill: value of the padding.
        pool: function of this worker's padded block, the window, the range of its outputs by
            dimension, and the extents of x.
    """
    first = x.ndim - len(settings[0])
    n = x.shape[first:]
    window = pool_window(n, *settings)
    out = call.grid.follow(call.layout(x), (*x.shape[:first], *outputs(window, n)))
    block, _ = padded_range(call, x, out, first, lambda *row: window.inside(*row)[0])
    if 0 in call.local_shape(out):
        return call.wrap(call.grid.empty(out, block.dtype, block), out)
    where = [call.grid.range_of(out, first + j) for j in range(len(n))]
    flat = _flat([window.inside(j, n[j], *cut)[1] for j, cut in enumerate(where)])
    padded = F.pad(block, flat, value=fill) if any(flat) else block
    return call.wrap(pool(padded, window, where, n), out)


def max_pool(
    call: Call,
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """max_pool1d, max_pool2d, max_pool3d."""
    x = call.cut(input)
    if return_indices:
        raise Gathered
    ndim = int(call.name[8])
    size = per_dim(kernel_size, ndim)
    steps = per_dim(stride, ndim) if stride not in (None, []) else size
    settings = size, steps, per_dim(padding, ndim), per_dim(dilation, ndim), ceil_mode
    function = getattr(F, f"max_pool{ndim}d")

    def pool(block: Tensor, *_: Any) -> Tensor:
        return function(block, size, steps, 0, settings[3])  # type: ignore[no-any-return]

    return _pooled(call, x, settings, -torch.inf, pool)


def avg_pool(
    call: Call,
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    """avg_pool1d, avg_pool2d, avg_pool3d."""
    x = call.cut(input)
    ndim = int(call.name[8])
    size = per_dim(kernel_size, ndim)
    steps = per_dim(stride, ndim) if stride not in (None, [], ()) else size
    pads = per_dim(padding, ndim)
    if any(2 * p > k for p, k in zip(pads, size, strict=True)):
        raise Gathered  # torch's error
    settings = size, steps, pads, (1,) * ndim, ceil_mode

    def pool(block: Tensor, window: Window, where: Any, n: Any) -> Tensor:
        choices = count_include_pad, divisor_override
        return average(call.function, window, where, n, *choices)(block)

    return _pooled(call, x, settings, 0.0, pool)


def adaptive_pool(call: Call, input: Any, output_size: Any, return_indices: bool = False) -> Any:
    """adaptive_avg_pool and adaptive_max_pool: output o of m is of the inputs from ⌊o·n/m⌋ to
    ⌈(o+1)·n/m⌉."""
    x = call.cut(input)
    if return_indices:
        raise Gathered
    ndim = int(call.name[-2])
    first = x.ndim - ndim
    n = x.shape[first:]
    given = (output_size,) * ndim if isinstance(output_size, int) else tuple(output_size)
    given = given * ndim if len(given) == 1 else given
    m = [a if b is None else b for a, b in zip(n, given, strict=True)]
    if "avg" in call.name and all(k == 1 for k in m):
        from linop.strategies.space.rules.reductions import mean

        return mean(call, x, tuple(range(first, x.ndim)), True)
    if min(m) < 1:
        raise Gathered
    out = call.grid.follow(call.layout(x), (*x.shape[:first], *m))

    def needed(j: int, extent: int, a: int, b: int) -> tuple[int, int]:
        return adaptive_range(extent, m[j], a, b)

    block, _ = padded_range(call, x, out, first, needed)
    if 0 in call.local_shape(out):
        return call.wrap(call.grid.empty(out, block.dtype, block), out)
    where = [call.grid.range_of(out, first + j) for j in range(ndim)]
    kind = "avg" if "avg" in call.name else "max"
    if all(p % q == 0 for p, q in zip(n, m, strict=True)):
        size = [p // q for p, q in zip(n, m, strict=True)]
        return call.wrap(getattr(F, f"{kind}_pool{ndim}d")(block, size), out)
    # One dimension after the other, the last one first: of equal maxima the first one's in the
    # order of rows then gets the gradient, as in torch.
    for j in reversed(range(ndim)):
        begin = needed(j, n[j], *where[j])[0] if first + j in out.cut else 0
        windows = [needed(j, n[j], o, o + 1) for o in range(*where[j])]
        windows = [(a - begin, b - begin) for a, b in windows]
        block = of_windows(block, first + j, windows, torch.mean if kind == "avg" else largest)
    return call.wrap(block, out)
