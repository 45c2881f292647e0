"""Windows as dimensions of their own: unfold and fold, in blocks of whole rows of windows."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from linop.layers.sliding import TransposedWindow, Window
from linop.strategies.space.call import Call, Gathered, dim_of, per_dim
from linop.strategies.space.cut_tensor import CutTensor
from linop.strategies.space.layout import REPLICATED, Axis, Layout
from linop.strategies.space.rules.sliding import outputs, padded_range
from linop.strategies.space.rules.views import as_copy, numbers


def unfold(call: Call, input: Any, dimension: int, size: int, step: int) -> Any:
    """Tensor.unfold: windows along a dimension, in balanced blocks of windows."""
    x = call.cut(input)
    d = dim_of(dimension, x.ndim)
    n = x.shape[d]
    if not 0 <= size <= n or step < 1:
        raise Gathered  # torch's error
    shape = [(n - size) // step + 1 if e == d else m for e, m in enumerate(x.shape)]
    bounds = {e: x.blocks.bounds[e] for e in x.blocks.cut if e != d}
    out = x.blocks.changed(shape, bounds=bounds)
    block = x.block
    if d in x.blocks.cut:
        out = call.grid.follow(out, shape)
        out = out.changed(bounds={e: c for e, c in bounds.items() if e in out.cut})

        def needed(_: int, a: int, b: int) -> tuple[int, int]:
            return a * step, (b - 1) * step + size

        source = x.blocks.changed(axes=out.axes, bounds=bounds)
        if d in out.cut:
            wanted = tuple(needed(0, a, b) if a < b else (0, 0) for a, b in out.bounds[d])
            source = source.changed(bounds={**bounds, d: wanted})
        block = call.to(x, source)
    made = out.changed((*out.shape, size))
    if 0 in call.local_shape(out):
        return call.wrap(call.grid.empty(made, block.dtype, block), made)
    return as_copy(call.wrap(block.unfold(d, size, step), made), x, d in x.blocks.cut)


def _rows(x: CutTensor) -> list[Axis]:
    """For each grid axis the dimension that it cuts of (batch, channels, rows, columns), with
    blocks of whole rows: they are one after the other in an image's flat order."""
    axes: list[Axis] = []
    for axis in x.blocks.axes:
        kept = axis if axis in (0, 2) else REPLICATED
        if axis == 3 and 2 not in x.blocks.cut:
            kept = 2
        axes.append(kept)
    return axes


def im2col(
    call: Call, input: Any, kernel_size: Any, dilation: Any, padding: Any, stride: Any
) -> Any:
    """torch.nn.functional.unfold: the windows of images, of which each is a column of the result;
    columns are cut where rows of windows are."""
    x = call.cut(input)
    settings = kernel_size, dilation, padding, stride
    if x.ndim == 3:
        return im2col(call, x.unsqueeze(0), *settings).squeeze(0)
    size, spread, pads, steps = (per_dim(value, 2) for value in settings)
    window = Window(size, steps, tuple((p, p) for p in pads), spread)
    extents = outputs(window, x.shape[2:])
    channels = x.shape[1] * size[0] * size[1]
    axes = _rows(x)
    bounds = {0: x.blocks.bounds[0]} if 0 in axes else {}
    out = x.blocks.changed((x.shape[0], channels, *extents), axes, bounds)
    out = call.grid.follow(out, out.shape).changed(bounds=bounds)

    block, rest = padded_range(call, x, out, 2, window.inputs, window.pads)
    flat = _flattened(out)
    if 0 in call.local_shape(flat):
        return call.wrap(call.grid.empty(flat, block.dtype, block), flat)
    return call.wrap(F.unfold(block, size, spread, tuple(p for p, _ in rest), steps), flat)


def _flattened(layout: Layout) -> Layout:
    """The layout of (batch, channels, rows · columns), of one of (batch, channels, rows, columns)
    whose columns are whole."""
    batch, channels, rows, columns = layout.shape
    bounds = {d: layout.bounds[d] for d in layout.cut}
    if 2 in bounds:
        bounds[2] = tuple((a * columns, b * columns) for a, b in bounds[2])
    return layout.changed((batch, channels, rows * columns), bounds=bounds)


def col2im(
    call: Call,
    input: Any,
    output_size: Any,
    kernel_size: Any,
    dilation: Any,
    padding: Any,
    stride: Any,
) -> Any:
    """torch.nn.functional.fold: sums of windows, in blocks of rows of the images."""
    x = call.cut(input)
    if x.ndim == 2:
        given = output_size, kernel_size, dilation, padding, stride
        return col2im(call, x.unsqueeze(0), *given).squeeze(0)
    size, spread, pads, steps = (
        per_dim(value, 2) for value in (kernel_size, dilation, padding, stride)
    )
    n = per_dim(output_size, 2)
    rows, columns = outputs(Window(size, steps, tuple((p, p) for p in pads), spread), n)
    x = call.uncut(x, (1,))
    if x.shape[2] != rows * columns or x.shape[1] % (size[0] * size[1]):
        raise Gathered  # torch's error
    if not isinstance(x, CutTensor):
        return call.function(x, n, size, spread, pads, steps)
    shape = (x.shape[0], x.shape[1] // (size[0] * size[1]), *n)
    bounds = {0: x.blocks.bounds[0]} if 0 in x.blocks.cut else {}
    out = call.grid.follow(x.blocks.changed(shape, bounds=bounds), shape).changed(bounds=bounds)
    kernel = TransposedWindow(size, steps, pads, (0, 0), spread)
    wanted = dict(bounds)
    if 2 in out.cut:
        ranges = (kernel.inputs(0, rows, *cut) for cut in out.bounds[2])
        wanted[2] = tuple((a * columns, b * columns) for a, b in ranges)
    block = call.to(x, x.blocks.changed(axes=out.axes, bounds=wanted))
    if 0 in call.local_shape(out):
        return call.wrap(call.grid.empty(out, block.dtype, block), out)
    a, b = call.grid.range_of(out, 2)
    first, last = kernel.inputs(0, rows, a, b) if 2 in out.cut else (0, rows)
    begin = first * steps[0] - pads[0]
    height = (last - first - 1) * steps[0] + kernel.reach(0) + 1
    result = F.fold(block, (height, n[1]), size, spread, (0, pads[1]), steps)
    # Rows of others are cut off; those that no window has are zeros.
    block = F.pad(result, (0, 0, begin - a, b - begin - height))
    return _cut_again(call, call.wrap(block, out))


def _cut_again(call: Call, x: Any) -> Any:
    """Images, also cut along the axes of the grid along which they are whole: nothing moves."""
    layout = call.layout(x)
    axes = [
        d if axis is REPLICATED and d < 4 and d not in layout.cut else axis
        for axis, d in zip(layout.axes, call.grid.dims, strict=True)
    ]
    bounds = {d: layout.bounds[d] for d in layout.cut}
    target = call.grid.follow(layout.changed(axes=axes), layout.shape).changed(bounds=bounds)
    return call.wrap(call.to(x, target), target)


_SIDES = {"fliplr": (1,), "flipud": (0,)}


def flip(call: Call, input: Any, *dims: Any, **kwargs: Any) -> Any:
    """flip, fliplr, flipud: blocks change places, and each is turned."""
    x = call.cut(input)
    given = _SIDES.get(call.name) or numbers(dims or (kwargs["dims"],))
    turned = {dim_of(d, x.ndim) for d in given}
    layout = x.blocks
    mirrored = {
        d: tuple((layout.shape[d] - b, layout.shape[d] - a) for a, b in layout.bounds[d])
        if d in turned
        else layout.bounds[d]
        for d in layout.cut
    }
    block = call.to(x, layout.changed(bounds=mirrored))
    return call.wrap(torch.flip(block, sorted(turned)), layout)


def grid_sample(
    call: Call, input: Any, grid: Any, mode: int, padding: int, align_corners: bool
) -> Any:
    """grid_sampler: the points are cut as they are given, or as the images; the images come to all
    of them, as any point may be in any of them."""
    points, images = call.layout(grid), call.layout(input)
    n = len(images.shape)
    axes: list[Axis] = []
    bounds = {}
    for mine, theirs in zip(points.axes, images.axes, strict=True):
        found: Axis = REPLICATED
        if isinstance(mine, int) and mine < n - 1:
            found = mine + 1 if mine else 0
            cuts = points.bounds[mine]
        elif isinstance(theirs, int) and theirs != 1:
            found = theirs
            cuts = ()
        if isinstance(found, int) and found not in axes:
            axes.append(found)
            bounds[found] = cuts
        else:
            axes.append(REPLICATED)
    shape = (images.shape[0], images.shape[1], *points.shape[1:-1])
    out = call.grid.follow(call.grid.whole(shape).changed(axes=axes, bounds=bounds), shape)
    kept = {d: c for d, c in bounds.items() if c and d in out.cut}
    out = out.changed(bounds={**{d: out.bounds[d] for d in out.cut}, **kept})
    if out.is_whole:
        raise Gathered
    places = {d: d - 1 if d else 0 for d in range(n)}
    where = call.beside(grid, out, places)
    block = call.beside(input, out, {0: 0})
    if 0 in call.local_shape(out):
        return call.wrap(call.grid.empty(out, block.dtype, block, where), out)
    return call.wrap(call.function(block, where, mode, padding, align_corners), out)
