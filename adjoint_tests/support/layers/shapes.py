"""Modules that give tensors another shape, and softmax, beside torch's. Needs torch.

Ranks import this module, and no test.
"""

from __future__ import annotations

from math import prod
from typing import Any

from hypothesis import strategies as st

from linop import Partition
from linop.spaces.partition import balanced
from support.layers.cases import Case, cut, grids


def _lengths(case_shape: tuple[int, ...], P: Partition, seed: int, d: int) -> list[int]:
    return [b - a for a, b in cut(case_shape, P, seed).bounds[d]]


def _stays(lengths: list[int], n: int, parts: int, factor: int) -> list[int]:
    """Lengths of blocks in multiples of a factor: those given, if they are as many and such; else
    balanced ones. Divided by the factor."""
    stops = [sum(lengths[: k + 1]) for k in range(len(lengths))]
    if len(lengths) == parts and factor and all(stop % factor == 0 for stop in stops):
        return [length // factor for length in lengths]
    return list(balanced(n // factor if factor else n, parts))


@st.composite
def flattenings(draw: Any, most: int) -> Case:
    """Flattening any dimensions, on grids of at most so many workers."""
    ndim = draw(st.integers(2, 5))
    shape = tuple(draw(st.integers(1, 5)) for _ in range(ndim))
    start = draw(st.integers(0, ndim - 1))
    end = draw(st.integers(start, ndim - 1))
    seed = draw(st.integers(0, 99))
    P_x = draw(grids(most, draw(st.integers(1, ndim))))
    left = ndim - (end - start)
    P_y = draw(st.none() | grids(most, draw(st.integers(1, left))))
    whole = P_x.ndim == ndim  # negative dimensions are those of the grid
    given = (
        (start - ndim if whole and draw(st.booleans()) else start),
        draw(st.sampled_from([end, end - ndim] if whole or P_y or end == ndim - 1 else [end])),
    )
    grid = P_y or _joined(P_x, start, end)
    first = next((d for d in range(start, end + 1) if shape[d] != 1), start)
    inner = prod(shape[first + 1 : end + 1])
    sizes = {}
    for k, parts in enumerate(grid.shape):
        d = first if k == start else k if k < start else k + end - start
        lengths = _stays(_lengths(shape, P_x, seed, d), shape[d], parts, 1)
        sizes[k] = [n * (inner if k == start else 1) for n in lengths]
    return Case("Flatten", (P_x,), shape, given, {}, {"P_y": P_y}, grid, sizes=sizes, seed=seed)


def _joined(P: Partition, start: int, end: int) -> Partition:
    if start >= P.ndim:
        return P
    joined = prod(P.shape[start : end + 1])
    return Partition((*P.shape[:start], joined, *P.shape[end + 1 :]), P.workers)


@st.composite
def unflattenings(draw: Any, most: int) -> Case:
    """One dimension as several, on grids of at most so many workers."""
    before = [draw(st.integers(1, 3)) for _ in range(draw(st.integers(0, 2)))]
    parts = [draw(st.integers(1, 4)) for _ in range(draw(st.integers(1, 3)))]
    after = [draw(st.integers(1, 3)) for _ in range(draw(st.integers(0, 2)))]
    shape, d = (*before, prod(parts), *after), len(before)
    P_x = draw(grids(most, draw(st.integers(1, len(shape)))))
    seed = draw(st.integers(0, 99))
    first = next((k for k, n in enumerate(parts) if n != 1), 0)
    grid = P_x.shape
    if d < P_x.ndim:
        ones = [1] * (len(parts) - 1)
        grid = *grid[:d], *ones[:first], grid[d], *ones[first:], *grid[d + 1 :]
    given = list(parts)
    if draw(st.booleans()):
        given[draw(st.integers(first, len(parts) - 1))] = -1
        first_given = next(k for k, n in enumerate(given) if n != 1)
        if first_given != first:
            given = list(parts)
    sizes, inner = {}, prod(parts[first + 1 :])
    for k, count in enumerate(grid):
        if d <= k < d + len(parts):
            if k == d + first:
                sizes[k] = _stays(_lengths(shape, P_x, seed, d), shape[d], count, inner)
        else:
            of = k if k < d else k - len(parts) + 1
            sizes[k] = _lengths(shape, P_x, seed, of)
    dim = d - len(shape) if P_x.ndim == len(shape) and draw(st.booleans()) else d
    output = Partition(grid, P_x.workers)
    arguments = (dim, tuple(given))
    return Case("Unflatten", (P_x,), shape, arguments, output=output, sizes=sizes, seed=seed)


@st.composite
def shuffles(draw: Any, most: int) -> Case:
    """Shuffles of pixels and channels, on grids of at most so many workers."""
    kind = draw(st.sampled_from(["PixelShuffle", "PixelUnshuffle", "ChannelShuffle"]))
    r, seed = draw(st.integers(1, 3)), draw(st.integers(0, 99))
    n = [draw(st.integers(1, 4)) for _ in range(4)]
    factors = {"PixelShuffle": (r * r, 1, 1), "PixelUnshuffle": (1, r, r)}.get(kind, (r, 1, 1))
    shape = (n[0], *(a * b for a, b in zip(n[1:], factors, strict=True)))
    P_x = draw(grids(most, draw(st.integers(1, 4))))
    if kind == "ChannelShuffle":
        return Case(kind, (P_x,), shape, (r,), kept=4, seed=seed)
    grown = {"PixelShuffle": (1, r, r), "PixelUnshuffle": (r * r, 1, 1)}[kind]
    sizes = {}
    for d in range(1, P_x.ndim):
        lengths = _lengths(shape, P_x, seed, d)
        stays = _stays(lengths, shape[d], len(lengths), factors[d - 1])
        sizes[d] = [k * grown[d - 1] for k in stays]
    return Case(kind, (P_x,), shape, (r,), kept=1, sizes=sizes, seed=seed)


@st.composite
def softmaxes(draw: Any, most: int) -> Case:
    """Softmax and its kin along any dimension, on grids of at most so many workers."""
    ndim = draw(st.integers(1, 4))
    kind = draw(st.sampled_from(["Softmax", "LogSoftmax", "Softmin", "Softmax2d"][: 3 + ndim // 4]))
    shape = tuple(draw(st.integers(1, 5)) for _ in range(ndim))
    dim = () if kind == "Softmax2d" else (draw(st.integers(-ndim, ndim - 1)),)
    P_x = draw(grids(most, draw(st.integers(1, ndim))))
    seed = draw(st.integers(0, 99))
    return Case(kind, (P_x,), shape, dim, kept=ndim, seed=seed)


@st.composite
def activations(draw: Any, most: int) -> Case:
    """Gates and PReLU, on grids of at most so many workers."""
    ndim, seed = draw(st.integers(1, 4)), draw(st.integers(0, 99))
    shape = [draw(st.integers(1, 5)) for _ in range(ndim)]
    P_x = draw(grids(most, draw(st.integers(1, ndim))))
    if draw(st.booleans()):
        several = ndim > 1 and draw(st.booleans())
        given = (shape[1] if several else 1, 0.3)
        return Case("PReLU", (P_x,), tuple(shape), given, kept=ndim, seed=seed)
    d = draw(st.integers(0, ndim - 1))
    shape[d] *= 2
    cuts = {e: _lengths(tuple(shape), P_x, seed, e) for e in range(P_x.ndim) if e != d}
    dim = draw(st.sampled_from([d, d - ndim]))
    return Case("GLU", (P_x,), tuple(shape), (dim,), sizes=cuts, seed=seed)
