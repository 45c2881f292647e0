"""Sums over the taps of a sliding window: the inner loop of convolutions and stencils.

The result is cut into tiles that fit a core's cache. For each tile, the part of the padded argument
that it needs is copied into a small buffer; then each tap is one product or sum of NumPy's, on
contiguous memory: the tile has the rows of the buffer, so that a shift is an offset into flat
memory, and the columns between its rows hold what nobody reads. Which elements are where in the
padded argument is decided by `linop.local_operators.sliding` and `linop.stencils`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from typing import Any, NamedTuple

import numpy as np
import scipy

from linop.caching import cached_property
from linop.spaces.array_modules import Namespace
from linop.spaces.partition import balanced
from linop.spaces.scalars import sparse_dtype

Index = tuple[Any, ...]
Shape = tuple[int, ...]
Sums = Callable[[Sequence[Any]], list[Any]]
"""A function of a list of arrays: the list of its results."""

TILE = 256 * 1024
"""Bytes of a tile's buffer; there are three. At 512 x 512 in float64, on a core with 512 KiB of
cache, buffers of 192 to 384 KiB took the same time within 5 %, 64 KiB 1.6 times as long."""
OVERLAP = 4
"""A tile is at least as many times as wide as the window reaches: what is read twice is less."""


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive elements of one dimension: for k from 0 to `count` - 1, element ``at + k`` of the
    padded argument is element ``of + k stride`` of an array; `stride` is 1 or -1."""

    at: int
    of: int
    count: int
    stride: int = 1

    def within(self, start: int, stop: int) -> Run | None:
        """The part in `start` to `stop` of the padded argument, numbered from `start`; None if
        there is none."""
        first, last = max(self.at, start), min(self.at + self.count, stop)
        if first >= last:
            return None
        skipped = self.stride * (first - self.at)
        return Run(first - start, self.of + skipped, last - first, self.stride)


class Fill(NamedTuple):
    """A box of the padded argument, with a run for each dimension, from the array number
    `source`."""

    source: int
    runs: tuple[Run, ...]


@dataclass(frozen=True, eq=False)
class SlidingSums:
    """The linear map ``y[i] = sum_t weight_t[i] p[steps i + offset_t]`` of several arrays, of which
    the padded argument p is put together. What no array fills is zero.

    Attributes:
        sources: shapes of the arrays.
        fills: boxes of p; where two of them meet, the last one counts, so they should not.
        target: shape of y.
        steps: the stride of the window in each dimension.
        offsets: of the taps, numbers from 0.
        weights: a number of `dtype` for each tap, or an array of shape `target`.
        dtype: of all arrays. Sums of 16-bit and shorter floats are formed in float64.
    """

    sources: tuple[Shape, ...]
    fills: tuple[Fill, ...]
    target: Shape
    steps: Shape
    offsets: tuple[Shape, ...]
    weights: tuple[Any, ...]
    dtype: np.dtype[Any]

    @property
    def wide(self) -> np.dtype[Any]:
        """The dtype of sums."""
        return sparse_dtype(self.dtype)

    @cached_property
    def reach(self) -> Shape:
        """The extent of the window."""
        return tuple(max(column) + 1 for column in zip(*self.offsets, strict=True))

    def functions(self, namespace: Namespace) -> tuple[Sums, Sums]:
        """(forward, adjoint) for an array module, both of lists of arrays."""
        if not self.offsets or not all(self.target):
            return self._zeros(namespace, [self.target]), self._zeros(namespace, self.sources)
        tiling = _Tiling(self, namespace)
        if self.dtype.kind != "c":
            return tiling.forward, tiling.transpose

        def adjoint(ys: Sequence[Any]) -> list[Any]:
            return [x.conj() for x in tiling.transpose([y.conj() for y in ys])]

        return tiling.forward, adjoint

    def _zeros(self, namespace: Namespace, shapes: Sequence[Shape]) -> Sums:
        return lambda arrays: [namespace.module.zeros(shape, self.dtype) for shape in shapes]

    def matrix(self) -> scipy.sparse.csr_array:
        """The sparse matrix on the concatenated arrays: an entry for each product, zeros left
        out."""
        sizes = list(map(math.prod, self.sources))
        shape = math.prod(self.target), sum(sizes)
        if not self.offsets or 0 in shape:
            return scipy.sparse.csr_array(shape, dtype=self.wide)
        padded = np.full(_extent(self.target, self.steps, self.reach), -1)
        for source, runs in self.fills:
            first = sum(sizes[:source])
            array = np.arange(first, first + sizes[source]).reshape(self.sources[source])
            parts = [run.within(0, n) for run, n in zip(runs, padded.shape, strict=True)]
            if all(parts):
                of, at = _indices(parts)
                padded[at] = array[of]
        columns = [padded[_window(o, self.target, self.steps)].ravel() for o in self.offsets]
        weights = [np.broadcast_to(w, self.target).ravel() for w in self.weights]
        values, found = np.concatenate(weights).astype(self.wide), np.concatenate(columns)
        rows = np.tile(np.arange(shape[0]), len(self.offsets))
        kept = (found >= 0) & (values != 0)
        entries = values[kept], (rows[kept], found[kept])
        return scipy.sparse.csr_array(entries, shape)


class _Weighted(NamedTuple):
    """Taps of one weight: a number, or the number of the tap, in each tile an array."""

    number: Any
    tap: int
    views: tuple[Any, ...]
    """Indices of the buffer: what the taps read."""


class _Tile(NamedTuple):
    """One tile.

    Attributes:
        out: its index in the result.
        inner: the index of its elements in a buffer.
        clear: the buffer has elements that the tile before filled, and this one does not.
        fills: (number of the array, index in it, index in the buffer) of each box.
        weights: by number of tap, an array, and where it is zero (None: nowhere).
    """

    out: Index
    inner: Index
    clear: bool
    fills: list[tuple[int, Index, Index]]
    weights: dict[int, tuple[Any, Any]]


class _Tiling:
    """The two loops of `SlidingSums`, for an array module."""

    def __init__(self, sums: SlidingSums, namespace: Namespace) -> None:
        self.sums, self.module, self.put = sums, namespace.module, namespace.put
        whole = namespace.module is not np  # a device wants few operations, and large ones
        self.shape = sums.target if whole else _tile_shape(sums)
        self.buffer = _extent(self.shape, sums.steps, sums.reach)
        self.flat = all(step == 1 for step in sums.steps)
        self.groups = self._groups()
        self.tiles = list(self._tiles())

    def _groups(self) -> list[_Weighted]:
        """Taps of one finite weight together: of equal numbers, or of one array. Ones last, since
        they are added to what is there."""
        alike: dict[Any, list[int]] = {}
        for k, weight in enumerate(self.sums.weights):
            key: Any = (k,)
            if np.isfinite(weight).all():
                key = _place(weight) if np.ndim(weight) else self.sums.wide.type(weight)
            alike.setdefault(key, []).append(k)
        views = [self._view(offset) for offset in self.sums.offsets]
        groups = [
            _Weighted(None if isinstance(w, tuple) else w, taps[0], tuple(views[k] for k in taps))
            for w, taps in alike.items()
        ]
        return sorted(groups, key=lambda group: group.number in _UNIT)

    def _view(self, offset: Shape) -> Any:
        if not self.flat:
            return _window(offset, self.shape, self.sums.steps)
        start = _flat(offset, self.buffer)
        return slice(start, start + self.length)

    @cached_property
    def length(self) -> int:
        """The number of elements of flat memory from the first of a tile to its last."""
        return _flat(tuple(n - 1 for n in self.shape), self.buffer) + 1

    def _tiles(self) -> Iterator[_Tile]:
        before: list[Index] | None = None
        cuts = [_cuts(n, m) for n, m in zip(self.sums.target, self.shape, strict=True)]
        varying = [group for group in self.groups if group.number is None]
        for box in product(*cuts):
            out = (*(slice(a, b) for a, b in box), ...)
            inner = (*(slice(0, b - a) for a, b in box), ...)
            starts = [a * step for (a, _), step in zip(box, self.sums.steps, strict=True)]
            fills = list(self._fills(starts))
            filled = [at for _, _, at in fills]
            weights = {g.tap: self._weight(g, out, inner, filled) for g in varying}
            yield _Tile(out, inner, filled != before, fills, weights)
            before = filled

    def _fills(self, starts: Sequence[int]) -> Iterator[tuple[int, Index, Index]]:
        for source, runs in self.sums.fills:
            ends = zip(runs, starts, self.buffer, strict=True)
            parts = [run.within(a, a + n) for run, a, n in ends]
            if all(parts):
                yield source, *_indices(parts)

    def _weight(
        self, group: _Weighted, out: Index, inner: Index, filled: Sequence[Index]
    ) -> tuple[Any, Any]:
        """The weights of a tile, in memory as the taps' views, and where they are zero."""
        weights = np.broadcast_to(self.sums.weights[group.tap], self.sums.target)[out]
        full, view = self._pair(np)
        full[...] = 0
        full[inner] = weights
        if not np.isfinite(weights).all():  # padding multiplies nothing
            there = np.zeros(self.buffer, bool)
            for at in filled:
                there[at] = True
            view[~(there.reshape(-1) if self.flat else there)[group.views[0]]] = 0
        zeros = None if self.sums.wide.kind in "iu" or weights.all() else self.put(view == 0)
        return self.put(view.copy()), zeros

    def _pair(self, module: Any) -> tuple[Any, Any]:
        """A buffer for a tile's elements: as an array, and as the taps' views."""
        if not self.flat:
            made = module.empty(self.shape, self.sums.wide)
            return made, made
        made = module.empty(self.buffer, self.sums.wide)
        return made, made.reshape(-1)[: self.length]

    def _padded(self) -> tuple[Any, Any]:
        """The buffer for a part of the padded argument: as an array, and as taps index it."""
        made = self.module.empty(self.buffer, self.sums.wide)
        return made, made.reshape(-1) if self.flat else made

    def forward(self, arrays: Sequence[Any]) -> list[Any]:
        """The list of the result y."""
        given = [x.astype(self.sums.wide, copy=False) for x in arrays]
        y = self.module.empty(self.sums.target, self.sums.wide)
        padded, read = self._padded()
        (full, total), (_, scratch) = self._pair(self.module), self._pair(self.module)
        with np.errstate(over="ignore", invalid="ignore"):  # of what lies between rows
            for tile in self.tiles:
                if tile.clear:
                    padded[...] = 0
                for source, of, at in tile.fills:
                    padded[at] = given[source][of]
                self._sum(read, total, scratch, tile)
                y[tile.out] = full[tile.inner]
        return [y.astype(self.sums.dtype, copy=False)]

    def _sum(self, read: Any, total: Any, scratch: Any, tile: _Tile) -> None:
        """Set `total` to the sum over all taps."""
        add, first = self.module.add, True
        for number, tap, views in self.groups:
            if not first and number in _UNIT:
                combine = add if number == 1 else self.module.subtract
                for view in views:
                    combine(total, read[view], out=total)
                continue
            into = total if first else scratch
            x = read[views[0]]
            if len(views) > 1:
                x = add(x, read[views[1]], out=into)
            for view in views[2:]:
                add(x, read[view], out=x)
            self._multiplied(x, number, tile.weights.get(tap), into)
            if not first:
                add(total, scratch, out=total)
            first = False

    def _multiplied(self, x: Any, number: Any, weights: Any, into: Any) -> None:
        if weights is None:
            self.module.multiply(x, number, out=into)
            return
        factor, zeros = weights
        if zeros is not None:  # 0 times infinity or NaN, which does not depend on them
            x = self.module.where(zeros, self.put(np.zeros((), self.sums.wide)), x)
        self.module.multiply(x, factor, out=into)

    def transpose(self, arrays: Sequence[Any]) -> list[Any]:
        """The arrays x that the transposed map gives for the list of y."""
        (y,) = (y.astype(self.sums.wide, copy=False) for y in arrays)
        returns, zeroed = self._returns
        xs = [
            (self.module.zeros if zero else self.module.empty)(shape, self.sums.wide)
            for shape, zero in zip(self.sums.sources, zeroed, strict=True)
        ]
        padded, sums = self._padded()
        (full, given), (_, scratch) = self._pair(self.module), self._pair(self.module)
        inner = None
        for tile, parts in zip(self.tiles, returns, strict=True):
            if tile.inner != inner:
                full[...], inner = 0, tile.inner
            full[inner] = y[tile.out]
            self._spread(given, sums, scratch, tile)
            for fresh, source, of, at in parts:
                part = xs[source][of]
                if fresh:
                    part[...] = padded[at]
                else:
                    self.module.add(part, padded[at], out=part)
        return [x.astype(self.sums.dtype, copy=False) for x in xs]

    @cached_property
    def _returns(self) -> tuple[list[list[tuple[bool, int, Index, Index]]], list[bool]]:
        """Of each tile, what the transposed map does with the buffer: (True to set and False to
        add, number of the array, index in it, index in the buffer) of each box; and of each array,
        whether it has elements that no box sets first."""
        seen = [np.zeros(shape, bool) for shape in self.sums.sources]
        zeroed = [False] * len(seen)
        returns: list[list[tuple[bool, int, Index, Index]]] = []
        for tile in self.tiles:
            parts: list[tuple[bool, int, Index, Index]] = []
            for source, of, at in tile.fills:
                for fresh, own, there in _fresh_and_seen(seen[source][of], of, at):
                    parts.append((bool(fresh), source, own, there))
                    zeroed[source] |= fresh is None
                seen[source][of] = True
            returns.append(parts)
        return returns, [zero or not s.all() for zero, s in zip(zeroed, seen, strict=True)]

    def _spread(self, given: Any, sums: Any, scratch: Any, tile: _Tile) -> None:
        """Set what the taps read to the sum of a tile of y, times the weights."""
        for k, (number, tap, views) in enumerate(self.groups):
            begun = not k and self.flat and number != -1  # set one view, and clear the rest alone
            first = sums[views[0]]
            if begun:
                sums[: views[0].start] = 0
                sums[views[0].stop :] = 0
            elif not k:
                sums[...] = 0
            factor, combine = given, self.module.subtract if number == -1 else self.module.add
            if number not in _UNIT:
                factor = first if begun and len(views) == 1 else scratch
                self._multiplied(given, number, tile.weights.get(tap), factor)
            if begun and factor is not first:
                first[...] = factor
            for view in views[1:] if begun else views:
                part = sums[view]
                combine(part, factor, out=part)


def _fresh_and_seen(seen: Any, of: Index, at: Index) -> Iterator[tuple[bool | None, Index, Index]]:
    """A box in parts: (True where its elements are seen for the first time, False where again, None
    for a mixture; index in the array, index in the buffer). Tiles follow one another along the
    first dimension, so that rows are the one or the other.

    Args:
        seen: of each element of the box, whether it was seen.
    """
    if not seen.any() or seen.all():
        yield not seen.any(), of, at
        return
    lines = seen.reshape(len(seen), -1)
    known = lines.all(axis=1)
    if of[0].step != 1 or (lines.any(axis=1) != known).any():
        yield None, of, at
        return
    starts = [0, *(np.flatnonzero(known[1:] != known[:-1]) + 1).tolist(), len(known)]
    for a, b in pairwise(starts):
        own, there = (slice(one.start + a, one.start + b, 1) for one in (of[0], at[0]))
        yield not known[a], (own, *of[1:]), (there, *at[1:])


_UNIT = (1, -1)
"""Weights that multiply nothing."""


def _place(array: Any) -> tuple[Any, ...]:
    """The memory of an array, which tells whether another is the same one."""
    return array.__array_interface__["data"][0], array.shape, array.strides, array.dtype


def _tile_shape(sums: SlidingSums) -> Shape:
    """The target's shape, halved until a buffer has at most `TILE` bytes; rows as long as can
    be."""
    tile = list(sums.target)
    strided = any(step > 1 for step in sums.steps)  # most of the buffer is not read, then
    most = TILE * (2 if strided else 1) // sums.wide.itemsize
    while math.prod(_extent(tile, sums.steps, sums.reach)) > most:
        wide = [m * s > OVERLAP * r for m, s, r in zip(tile, sums.steps, sums.reach, strict=True)]
        free = [d for d, m in enumerate(tile) if m > 1 and wide[d]]
        if not free:
            break
        chosen = max([d for d in free if d + 1 < len(tile)] or free, key=lambda d: tile[d])
        tile[chosen] = -(-tile[chosen] // 2)
    return tuple(tile)


def _cuts(n: int, most: int) -> list[tuple[int, int]]:
    """Ranges of at most `most` of n elements."""
    stops = list(accumulate(balanced(n, -(-n // most))))
    return list(zip([0, *stops[:-1]], stops, strict=True))


def _extent(shape: Sequence[int], steps: Shape, reach: Shape) -> Shape:
    """The extent of the padded argument that a result of this shape needs."""
    return tuple((n - 1) * s + r for n, s, r in zip(shape, steps, reach, strict=True))


def _window(offset: Shape, shape: Shape, steps: Shape) -> Index:
    """The index of what a tap reads of the padded argument."""
    ends = zip(offset, shape, steps, strict=True)
    return (*(slice(o, o + (n - 1) * s + 1, s) for o, n, s in ends), ...)


def _flat(at: Shape, shape: Shape) -> int:
    """The position of an element of an array in C order."""
    position = 0
    for k, n in zip(at, shape, strict=True):
        position = position * n + k
    return position


def _indices(runs: Any) -> tuple[Index, Index]:
    """NumPy's indices of runs: in the array, and in the padded argument."""
    of, at = [], []
    for run in runs:
        stop = run.of + run.stride * run.count
        of.append(slice(run.of, None if stop < 0 else stop, run.stride))
        at.append(slice(run.at, run.at + run.count))
    return (*of, ...), (*at, ...)
