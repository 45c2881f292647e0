"""Interpolation: each worker gets the input that its block of the output needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from linop.layers.resample import Tap, combined, interpolation, needed_inputs
from linop.strategies.space.call import Call, Gathered
from linop.strategies.space.rules.sliding import padded_range


def interpolate(
    call: Call,
    input: Any,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: Any = None,
    recompute_scale_factor: Any = None,
    antialias: bool = False,
) -> Any:
    """interpolate, of all modes."""
    x = call.cut(input)
    settings = size, scale_factor, mode, align_corners, recompute_scale_factor, antialias
    # Of one channel of one sample: torch's own sizes, also where there is none.
    one = F.interpolate(torch.empty((1, 1, *x.shape[2:]), device="meta"), *settings)
    shape = (*x.shape[:2], *one.shape[2:])
    if mode == "area":
        return getattr(F, f"adaptive_avg_pool{x.ndim - 2}d")(x, shape[2:])
    if not x.is_floating_point():
        raise Gathered
    out = call.grid.follow(call.layout(x), shape)
    ndim = x.ndim - 2
    factors: list[float | None] = [None] * ndim
    if scale_factor is not None and not recompute_scale_factor:
        given = scale_factor if isinstance(scale_factor, Sequence) else [scale_factor] * ndim
        factors = [float(f) for f in given]
    wide = torch.float64 if x.dtype is torch.float64 else torch.float32
    align = bool(align_corners)
    pairs = list(zip(x.shape[2:], shape[2:], factors, strict=True))
    if antialias:
        taps = [_smooth(mode, align, *pair, wide) for pair in pairs]
    else:
        taps = [
            interpolation(mode, align, j, n, shape[2:], factor, wide)
            for j, (n, _, factor) in enumerate(pairs)
        ]
        is_whole = all(f is None or f * n == m for n, m, f in pairs)
        whole = _by_torch(call, x, out, mode, align_corners, shape) if is_whole else None
        if whole is not None:
            return whole

    def needed(j: int, n: int, a: int, b: int) -> tuple[int, int]:
        return needed_inputs(taps[j], a, b)

    block, _ = padded_range(call, x, out, 2, needed)
    if 0 in call.local_shape(out):
        return call.wrap(call.grid.empty(out, block.dtype, block), out)
    for j in reversed(range(ndim)):  # the last dimension first, as torch does
        a, b = call.grid.range_of(out, 2 + j)
        start = needed(j, x.shape[2 + j], a, b)[0] if 2 + j in out.cut else 0
        mine = [
            Tap(
                (t.indices[a:b] - start).to(block.device),
                None if t.weight is None else t.weight[a:b].to(block.device),
            )
            for t in taps[j]
        ]
        block = combined(block, 2 + j, mine)
    return call.wrap(block.to(x.dtype), out)


def _by_torch(
    call: Call, x: Any, out: Any, mode: str, align_corners: Any, shape: Sequence[int]
) -> Any:
    """By torch's own function on a block with some rows beside it, of which the result is cropped:
    where every extent grows by a whole number, and coordinates are those of centres. None
    elsewhere."""
    ratios = [m // n for n, m in zip(x.shape[2:], shape[2:], strict=True)]
    if align_corners or any(
        r < 1 or r * n != m for r, n, m in zip(ratios, x.shape[2:], shape[2:], strict=True)
    ):
        return None
    ndim = len(ratios)
    halo = 0 if mode.startswith("nearest") else 2 if mode == "bicubic" else 1

    def needed(j: int, n: int, a: int, b: int) -> tuple[int, int]:
        r = ratios[j]
        return max(a // r - halo, 0), min(-(-b // r) + halo, n)

    block, _ = padded_range(call, x, out, 2, needed)
    if 0 in call.local_shape(out):
        return call.wrap(call.grid.empty(out, block.dtype, block), out)
    result = F.interpolate(
        block, scale_factor=[float(r) for r in ratios], mode=mode, align_corners=align_corners
    )
    crop = []
    for j in range(ndim):
        a, b = call.grid.range_of(out, 2 + j)
        start = needed(j, x.shape[2 + j], a, b)[0] * ratios[j] if 2 + j in out.cut else 0
        crop.append(slice(a - start, b - start))
    if any(c.start or c.stop != m for c, m in zip(crop, result.shape[2:], strict=True)):
        result = result[(slice(None), slice(None), *crop)]
    return call.wrap(result, out)


def _smooth(mode: str, align: bool, n: int, m: int, factor: float | None, dtype: Any) -> list[Tap]:
    """Terms of the outputs along a dimension with antialiasing, as in ATen's UpSampleKernel.cpp:
    a filter as wide as an output is in the input, at least one element."""
    if align:
        ratio = (n - 1) / (m - 1) if m > 1 else 0.0
    else:
        ratio = n / m if factor is None else 1 / factor
    wide = max(ratio, 1.0)
    support = (2 if mode == "bicubic" else 1) * wide
    centre = torch.tensor(ratio, dtype=dtype) * (torch.arange(m, dtype=dtype) + 0.5)
    first = (centre - support + 0.5).trunc().clamp(min=0)
    count = (centre + support + 0.5).trunc().clamp(max=n) - first
    taps, total = [], torch.zeros(m, dtype=dtype)
    for k in range(int(count.max())):
        t = ((first + k - centre + 0.5) / wide).abs()
        weight = _keys(t) if mode == "bicubic" else (1 - t).clamp(min=0)
        weight = torch.where(k < count, weight, 0)
        total = total + weight
        taps.append((first.long() + k, weight))
    total = torch.where(total == 0, 1, total)
    return [Tap(i.clamp(max=n - 1), w / total) for i, w in taps]


def _keys(t: torch.Tensor) -> torch.Tensor:
    """Keys' cubic filter at distances, with a = -0.5."""
    near = (1.5 * t - 2.5) * t * t + 1
    far = ((-0.5 * t + 2.5) * t - 4) * t + 2
    return torch.where(t < 1, near, torch.where(t < 2, far, 0))
