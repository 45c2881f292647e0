"""Generalized, unbalanced halo exchange (paper, section 3, equations 10 to 12, and appendix B).

The output of a sliding kernel is balanced over the workers; `halo_geometry` derives which input
each of them needs for its part, and `halo_exchange` moves it there, one dimension at a time.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from linop.errors import PartitionError, ShapeError, expect
from linop.normal_form.matching import copies_apart, matching
from linop.operators.algebra import Known, Named
from linop.operators.collectives import out_of_place
from linop.operators.memory import allocate, clears, copies
from linop.operators.operator import Identity, LinearOperator, compose
from linop.provenance import remembered
from linop.spaces.partition import Partition, balanced
from linop.spaces.region import Region, Subset, as_subset, naturals
from linop.spaces.tensor import Bounds, TensorSpace, common_parts

PerDim = int | Sequence[int]
"""One number for all dimensions, or one for each."""


class HaloDim(NamedTuple):
    """What a worker needs in one dimension. All lengths are in elements.

    ``start:stop`` is the range of global input indices that its outputs need, without boundary
    padding. Of these it lacks `left_halo` before and `right_halo` after its own block; of its own
    block it does not need `left_unused` at the start and `right_unused` at the end; and its kernel
    reaches `left_padding` and `right_padding` beyond the tensor.
    """

    start: int
    stop: int
    left_halo: int
    right_halo: int
    left_padding: int
    right_padding: int
    left_unused: int
    right_unused: int


@dataclass(frozen=True)
class Kernel:
    """A sliding window along one dimension."""

    size: int
    stride: int
    padding: int
    dilation: int

    def outputs(self, n: int) -> int:
        """Output length for n inputs."""
        return (n + 2 * self.padding - self.dilation * (self.size - 1) - 1) // self.stride + 1

    def reach(self, first: int, last: int) -> tuple[int, int]:
        """Inputs that outputs first:last need, boundary padding included as indices outside."""
        start = first * self.stride - self.padding
        return start, start + (last - 1 - first) * self.stride + self.dilation * (self.size - 1) + 1


def halo_geometry(
    shape: int | Sequence[int],
    partition: Partition,
    kernel_size: PerDim,
    stride: PerDim = 1,
    padding: PerDim = 0,
    dilation: PerDim = 1,
) -> dict[int, tuple[HaloDim, ...]]:
    """What every worker needs of a tensor cut over a partition, by worker and dimension.

    Args:
        shape: of the global input.
        partition: grid axis k splits dimension k, input and output both balanced.
        kernel_size, stride, padding, dilation: of the sliding kernel, as in torch.nn: one number,
            or one per dimension.

    Raises:
        PartitionError: more grid axes than dimensions. ShapeError: the parameters do not fit the
            shape, or leave no output.
    """
    X = TensorSpace(shape, partition)
    kernels = _kernels(X.global_shape, kernel_size, stride, padding, dilation)
    geometry = _geometry(X, kernels)
    return {w: _of_worker(X, geometry, w) for w in partition.workers}


@remembered
def halo_exchange(
    X: TensorSpace,
    kernel_size: PerDim,
    stride: PerDim = 1,
    padding: PerDim = 0,
    dilation: PerDim = 1,
    *,
    in_place: bool = False,
) -> LinearOperator:
    """H: every worker gets what its part of a sliding kernel's output needs (equation 11).

    One dimension at a time, so that corners arrive. Boundary padding is not communicated, and not
    part of the result: it is the local kernel's affair (`halo_geometry` says how much). A halo that
    reaches beyond the adjacent workers is served by further ones.

    Args:
        X: the blocks of the input, copies along some grid axes allowed.
        kernel_size, stride, padding, dilation: of the sliding kernel, as in torch.nn: one number,
            or one per dimension of the tensor.
        in_place: exchange on extended blocks that hold the bulk already.

    Returns:
        The operator from X to the ranges ``start:stop`` of `halo_geometry`, unneeded input trimmed;
        or, in place, from extended blocks (bulk and halo, a `TensorSpace` itself) to the same.

    Raises:
        ShapeError: the parameters do not fit the shape, or leave no output. PartitionError: the
            blocks of X overlap, or leave gaps.
    """
    X = expect("halo_exchange", X, TensorSpace)
    if not X.tiled:
        raise PartitionError(f"halo_exchange: the blocks of X must follow one another; {X.bounds}")
    kernels = _kernels(X.global_shape, kernel_size, stride, padding, dilation)
    geometry = _geometry(X, kernels)
    needed = {d: tuple((h.start, h.stop) for h in dims) for d, dims in enumerate(geometry)}
    if in_place:
        return Named("H", "", _in_place(X, needed))
    Y = X.like(X.partition, X.axes, needed)

    def five_stages() -> LinearOperator:
        body = _in_place(X, needed)
        E = expect("halo_exchange", body.domain, TensorSpace)
        bulk = Named("C", "bulk", out_of_place(X, E, common_parts(X, E)))
        trim = Named("C", "trim", out_of_place(E, Y, common_parts(E, Y)))
        return compose(trim, bulk) if isinstance(body, Identity) else compose(trim, body, bulk)

    return Known("H", "", matching(X, Y, copies_apart(X)), five_stages)


def _in_place(X: TensorSpace, needed: Mapping[int, Bounds]) -> LinearOperator:
    """The exchange on extended blocks, dimension after dimension."""
    extended = {
        d: tuple(_hull(*pair) for pair in zip(X.bounds[d], needed[d], strict=True)) for d in needed
    }
    name = f"{X.name}⁺"
    E = TensorSpace(
        X.global_shape, X.partition, X.dtype, X.axes, name, bounds=extended, memory=X.memory
    )
    exchange = _Exchange(X, E, tuple(needed[d] for d in range(X.ndim)))
    phases = [phase for d in range(X.ndim) for phase in exchange.phases(d)]
    return compose(*reversed(phases)) if phases else Identity(E)


class _Exchange:
    """The five stages of equation 10 on extended blocks E, for one dimension at a time."""

    def __init__(self, X: TensorSpace, E: TensorSpace, needed: tuple[Bounds, ...]) -> None:
        self.X, self.E, self.needed = X, E, needed
        self.base = dict(zip(E.index, E.starts[:, : E.ndim].tolist(), strict=True))

    def phases(self, dim: int) -> Iterator[LinearOperator]:
        """A, K_S, C_P, C_E, C_U, K_T, D of a dimension, first applied first."""
        messages = list(self._messages(dim))
        if not messages:
            return
        sends = [_buffer(f"s{dim}:{a}→{b}", part) for part, _, a, b in messages]
        receives = [_buffer(f"r{dim}:{a}→{b}", part) for _, part, a, b in messages]
        buffers = [*sends, *receives]
        bring = allocate(self.E, *(buffer.region for buffer in buffers))
        space = bring.codomain
        yield bring
        yield Named("K", f"S{dim}", clears(space, buffers))
        yield Named("C", f"P{dim}", copies(space, [m[0] for m in messages], sends))
        yield Named("C", f"E{dim}", copies(space, sends, receives))
        yield Named("C", f"U{dim}", copies(space, receives, [m[1] for m in messages]))
        yield Named("K", f"T{dim}", clears(space, buffers))
        yield bring.H

    def _messages(self, dim: int) -> Iterator[tuple[Subset, Subset, int, int]]:
        """(part of the sender's bulk, part of the receiver's halo, sender, receiver): in the
        dimensions before `dim` all that is needed, in those after it the bulk."""
        if dim not in self.X.axes:
            return
        axis = self.X.axes.index(dim)
        overlaps = list(self._overlaps(dim))
        for line in self.E.lines([axis]):
            for j, k, low, high in overlaps:
                source, target = line[j], line[k]
                box = self._slab(target, dim, low, high)
                if all(a < b for a, b in box):
                    ends = source.workers[0], target.workers[0]
                    yield self._part(source, box), self._part(target, box), *ends

    def _overlaps(self, dim: int) -> Iterator[tuple[int, int, int, int]]:
        """(sender, receiver, start, stop): what a block needs of the bulk of another one."""
        bulk = self.X.bounds[dim]
        stops = [stop for _, stop in bulk]
        for k, (start, stop) in enumerate(self.needed[dim]):
            # Blocks follow one another: those that meet the range are neighbours.
            for j in range(bisect_right(stops, start), bisect_left(stops, stop) + 1):
                low, high = max(start, bulk[j][0]), min(stop, stops[j])
                if j != k and low < high:
                    yield j, k, low, high

    def _slab(self, region: Region, dim: int, low: int, high: int) -> list[tuple[int, int]]:
        at = self.X.partition.coordinates(region.workers[0])
        box = []
        for d in range(self.X.ndim):
            k = at[self.X.axes.index(d)] if d in self.X.axes else 0
            bounds = self.needed[d] if d < dim else self.X.bounds[d]
            box.append((low, high) if d == dim else bounds[k])
        return box

    def _part(self, region: Region, box: Sequence[tuple[int, int]]) -> Subset:
        base = self.base[region.name]
        start = tuple(a - o for (a, _), o in zip(box, base, strict=True))
        return Subset(region, start, tuple(b - o for (_, b), o in zip(box, base, strict=True)))


def _buffer(name: str, part: Subset) -> Subset:
    return as_subset(Region.checked(name, part.shape, part.workers, part.memory))


def _geometry(X: TensorSpace, kernels: Sequence[Kernel]) -> list[list[HaloDim]]:
    """By dimension and block."""
    return [
        [
            _halo_dim(kernel, n, bulk, outputs)
            for bulk, outputs in zip(
                X.bounds[d], _blocks(kernel.outputs(n), len(X.bounds[d])), strict=True
            )
        ]
        for d, (kernel, n) in enumerate(zip(kernels, X.global_shape, strict=True))
    ]


def _halo_dim(kernel: Kernel, n: int, bulk: tuple[int, int], outputs: tuple[int, int]) -> HaloDim:
    a, b = bulk
    if outputs[0] == outputs[1]:
        return HaloDim(a, a, 0, 0, 0, 0, 0, b - a)
    low, high = kernel.reach(*outputs)
    start, stop = min(max(low, 0), n), max(min(high, n), 0)
    return HaloDim(
        start=start,
        stop=stop,
        left_halo=max(0, min(stop, a) - start),
        right_halo=max(0, stop - max(start, b)),
        left_padding=max(0, min(high, 0) - low),
        right_padding=max(0, high - max(low, n)),
        left_unused=min(max(start, a), b) - a,
        right_unused=b - max(min(stop, b), a),
    )


def _of_worker(X: TensorSpace, geometry: list[list[HaloDim]], worker: int) -> tuple[HaloDim, ...]:
    at = X.partition.coordinates(worker)
    return tuple(dims[at[X.axes.index(d)] if d in X.axes else 0] for d, dims in enumerate(geometry))


def _hull(bulk: tuple[int, int], need: tuple[int, int]) -> tuple[int, int]:
    """The smallest range that holds both; an empty one does not count."""
    ranges = [r for r in (bulk, need) if r[0] < r[1]] or [bulk]
    return min(a for a, _ in ranges), max(b for _, b in ranges)


def _blocks(n: int, parts: int) -> list[tuple[int, int]]:
    stops = list(accumulate(balanced(n, parts)))
    return list(zip([0, *stops[:-1]], stops, strict=True))


def _kernels(
    shape: tuple[int, ...], size: Any, stride: Any, padding: Any, dilation: Any
) -> list[Kernel]:
    """One kernel a dimension.

    Raises:
        ShapeError: a parameter has the wrong length or value, or there is no output.
    """
    ndim = len(shape)
    columns = [
        per_dim("kernel_size", size, ndim, 1),
        per_dim("stride", stride, ndim, 1),
        per_dim("padding", padding, ndim, 0),
        per_dim("dilation", dilation, ndim, 1),
    ]
    kernels = [Kernel(*row) for row in zip(*columns, strict=True)]
    for d, (kernel, n) in enumerate(zip(kernels, shape, strict=True)):
        if kernel.outputs(n) < 1:
            raise ShapeError(
                f"dimension {d} of extent {n}: a kernel of size {kernel.size}, dilation "
                f"{kernel.dilation} and padding {kernel.padding} does not fit; there is no output"
            )
    return kernels


def per_dim(what: str, value: Any, ndim: int, least: int) -> tuple[int, ...]:
    """One number for each dimension, from one for all or from a sequence.

    Raises:
        ShapeError: the wrong number of them, or one below `least`.
    """
    values = naturals(value, what, ShapeError)
    values = values * ndim if not hasattr(value, "__len__") else values
    if len(values) != ndim:
        raise ShapeError(f"{what}: {len(values)} numbers for {ndim} dimensions: {values}")
    if any(v < least for v in values):
        raise ShapeError(f"{what}: {values}; each is at least {least}")
    return values
