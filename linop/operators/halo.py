"""Generalized, unbalanced halo exchange (paper, section 3, equations 10 to 12, and appendix B).

The output of a sliding kernel is balanced over the workers. `halo_geometry` derives which input
each worker needs for its block of the output, and `halo_exchange` is the operator that moves it
there. Geometry and data movement only: the kernel itself is a local operator, such as
`linop.local_operators.convolution`.
"""

from __future__ import annotations

import operator
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from numbers import Integral
from typing import Any, NamedTuple

from linop.errors import ArgumentError, PartitionError, ShapeError, expect
from linop.normal_form.matching import matching, separate_copies
from linop.operators.algebra import Named
from linop.operators.expressions import Identity, compose
from linop.operators.memory import allocate, clears, copies
from linop.operators.named_movement import NamedMovement, out_of_place
from linop.operators.operator import LinearOperator, TensorOperator
from linop.provenance import records_origin
from linop.spaces.blocks import intersections, is_tiled, lines
from linop.spaces.decomposition import Bounds
from linop.spaces.partition import Partition, balanced
from linop.spaces.region import Region, Subset, naturals
from linop.spaces.tensor import TensorSpace

PerDim = int | Sequence[int]
"""One number for all tensor dimensions, or one per dimension."""


class HaloDim(NamedTuple):
    """Halo geometry of one worker in one dimension (paper, appendix B). Lengths are in elements.

    Attributes:
        start, stop: the range of global input indices that the worker's outputs need, without
            boundary padding.
        left_halo, right_halo: how many of these are before and after its own block.
        left_padding, right_padding: how far its kernel reaches beyond the tensor.
        left_unused, right_unused: how many elements at the start and the end of its own block it
            does not need.

    Example:
        >>> geometry = linop.halo_geometry((6,), linop.Partition(2), 3, padding=1)
        >>> (halo,) = geometry[0]  # of worker 0
        >>> halo.start, halo.stop, halo.left_padding, halo.right_halo
        (0, 4, 1, 1)
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
    """A sliding kernel along one dimension; all values are in elements, as in torch.nn."""

    size: int
    stride: int
    padding: int
    dilation: int

    def outputs(self, n: int) -> int:
        """Number of outputs for n inputs; below 1 if the kernel does not fit."""
        return (n + 2 * self.padding - self.dilation * (self.size - 1) - 1) // self.stride + 1

    def reach(self, first: int, last: int) -> tuple[int, int]:
        """Range (start, stop) of input indices that outputs first:last read. Indices outside of the
        input are boundary padding."""
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
    """Input ranges, halos, boundary padding and unused input of every worker (paper, appendix B).

    Args:
        shape: of the global input.
        partition: grid axis k splits dimension k, of the input and of the output, into balanced
            blocks.
        kernel_size, stride, padding, dilation: of the sliding kernel, as in torch.nn: one number,
            or one per dimension.

    Returns:
        By worker, a `HaloDim` for each dimension.

    Raises:
        PartitionError: more grid axes than dimensions. ShapeError: the parameters do not fit the
            shape, or leave no output.

    Example:
        >>> geometry = linop.halo_geometry((6,), linop.Partition(2), kernel_size=3)
        >>> [(dim.start, dim.stop) for (dim,) in geometry.values()]
        [(0, 4), (2, 6)]
        >>> [(dim.left_halo, dim.right_halo) for (dim,) in geometry.values()]
        [(0, 1), (1, 0)]
    """
    X = TensorSpace(shape, partition)
    kernels = _kernels(X.global_shape, kernel_size, stride, padding, dilation)
    geometry = _geometry(X, kernels)
    return {w: _of_worker(X, geometry, w) for w in X.partition.workers}


@records_origin
def halo_exchange(
    X: TensorSpace,
    kernel_size: PerDim | None = None,
    stride: PerDim = 1,
    padding: PerDim = 0,
    dilation: PerDim = 1,
    *,
    widths: int | Sequence[int | tuple[int, int]] | None = None,
    in_place: bool = False,
) -> TensorOperator:
    """H: the halo exchange. Every worker gets the input that its block of a sliding kernel's output
    needs (paper, equation 11); or, by `widths`, its own block and so many elements beside it.

    Dimensions are exchanged one after the other, so that corners arrive. Boundary padding is not
    communicated and is not in the result: the local kernel adds it, by the widths that
    `halo_geometry` gives. If a halo is wider than the neighbouring block, more distant workers send
    the rest.

    Args:
        X: the blocks of the input; grid axes may also hold copies.
        kernel_size, stride, padding, dilation: of the sliding kernel, as in torch.nn: one number,
            or one per dimension of the tensor.
        widths: of the halos, instead of a kernel: per dimension (left, right), or one number for
            both; or one number for all. Beyond the edges of the tensor there is no halo, and a
            block of no elements has none.
        in_place: map extended blocks, which hold the bulk already, to themselves.

    Returns:
        The operator from X to the ranges ``start:stop`` of `halo_geometry`, without unused input;
        or to the blocks with halos of the given widths.
        If in place, from the `TensorSpace` of extended blocks (bulk and halo) to itself.

    Raises:
        ShapeError: the parameters do not fit the shape, or leave no output. PartitionError: the
            blocks of X overlap, leave gaps, or are not in order. ArgumentError: both a kernel and
            widths are given, or neither.

    Example:
        >>> X = linop.TensorSpace((6,), linop.Partition(2))
        >>> H = linop.halo_exchange(X, kernel_size=3)
        >>> y = H(X.scatter(np.arange(6.0)))
        >>> [y[region.name].tolist() for region in H.codomain]
        [[0.0, 1.0, 2.0, 3.0], [2.0, 3.0, 4.0, 5.0]]
        >>> X.gather(H.H(y)).tolist()  # what two workers had comes back twice
        [0.0, 1.0, 4.0, 6.0, 4.0, 5.0]
    """
    X = expect("halo_exchange", X, TensorSpace)
    if not is_tiled(X):
        raise PartitionError(f"halo_exchange: the blocks of X must follow one another; {X.bounds}")
    kernel = kernel_size, stride, padding, dilation
    if (kernel_size is None) == (widths is None) or (
        widths is not None and kernel[1:] != (1, 0, 1)
    ):
        raise ArgumentError(
            "halo_exchange: give a kernel (kernel_size, stride, padding, dilation) or widths, and "
            "not both"
        )
    needed = _by_kernel(X, kernel) if widths is None else _beside(X, widths)
    if in_place:
        return Named("H", "", _in_place(X, needed))
    Y = X.like(X.partition, X.axes, needed)

    def five_stages() -> LinearOperator:
        body = _in_place(X, needed)
        E = expect("halo_exchange", body.domain, TensorSpace)
        bulk = Named("C", "bulk", out_of_place(X, E, intersections(X, E)))
        trim = Named("C", "trim", out_of_place(E, Y, intersections(E, Y)))
        return compose(trim, bulk) if isinstance(body, Identity) else compose(trim, body, bulk)

    return NamedMovement("H", "", matching(X, Y, separate_copies(X)), five_stages)


def _in_place(X: TensorSpace, needed: Mapping[int, Bounds]) -> TensorOperator:
    """The exchange on extended blocks, one dimension after the other (paper, equation 11)."""
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
    """The five factors of the paper's equation 10, on extended blocks E, for one dimension at a
    time.

    Args:
        X: the blocks of the input (the bulk).
        E: the same tensor in blocks extended by their halos.
        needed: for each dimension, the input range (start, stop) of each grid coordinate.
    """

    def __init__(self, X: TensorSpace, E: TensorSpace, needed: tuple[Bounds, ...]) -> None:
        self.X, self.E, self.needed = X, E, needed
        self.corners: dict[tuple[int, ...], tuple[int, ...]] = {}
        self.base = dict(
            zip(E.numbering.index, E.numbering.starts[:, : E.ndim].tolist(), strict=True)
        )

    def phases(self, dim: int) -> Iterator[LinearOperator]:
        """The operators A, K_S, C_P, C_E, C_U, K_T, D of a dimension, the first applied first:
        allocate the buffers, clear, pack, exchange, unpack, clear, deallocate. Yields nothing if
        the dimension needs no message."""
        messages = list(self._messages(dim))
        if not messages:
            return
        sends = [self._buffer(f"s{dim}:{a}→{b}", part) for part, _, a, b in messages]
        receives = [self._buffer(f"r{dim}:{a}→{b}", part) for _, part, a, b in messages]
        buffers = [*sends, *receives]
        bring = allocate(self.E, *(buffer.region for buffer in buffers))
        space = bring.codomain
        yield bring
        yield Named("K", f"S{dim}", clears(space, buffers))
        yield Named("C", f"P{dim}", copies(space, [m[0] for m in messages], sends))
        yield Named("C", f"E{dim}", copies(space, sends, receives))
        yield Named("C", f"U{dim}", copies(space, receives, [m[1] for m in messages]))
        yield Named("K", f"T{dim}", clears(space, buffers))
        yield bring.euclidean_adjoint

    def _messages(self, dim: int) -> Iterator[tuple[Subset, Subset, int, int]]:
        """The messages along a dimension: (subset of the sender's bulk, subset of the receiver's
        halo, sender, receiver). They span the needed range in the dimensions before `dim`, which
        were exchanged already, and the bulk in those after it."""
        if dim not in self.X.axes:
            return
        axis = self.X.axes.index(dim)
        overlaps = list(self._overlaps(dim))
        for line in lines(self.E, [axis]):
            low, high = self._corners(line[0], dim)
            for j, k, low[dim], high[dim] in overlaps:
                if all(map(operator.lt, low, high)):
                    source, target = line[j], line[k]
                    ends = source.workers[0], target.workers[0]
                    yield self._part(source, low, high), self._part(target, low, high), *ends

    def _overlaps(self, dim: int) -> Iterator[tuple[int, int, int, int]]:
        """(sender, receiver, start, stop) for each pair of grid coordinates along a dimension: the
        range of global indices that one needs of the other's bulk."""
        bulk = self.X.bounds[dim]
        stops = [stop for _, stop in bulk]
        for k, (start, stop) in enumerate(self.needed[dim]):
            # Blocks are in order and without gaps, so those that intersect the range are a run.
            for j in range(bisect_right(stops, start), bisect_left(stops, stop) + 1):
                low, high = max(start, bulk[j][0]), min(stop, stops[j])
                if j != k and low < high:
                    yield j, k, low, high

    def _corners(self, region: Region, dim: int) -> tuple[list[int], list[int]]:
        """The lower and upper corners, in global indices, of a worker's needed range in the
        dimensions before `dim` and of its bulk in the others. In all dimensions but `dim` they are
        the same for a line of workers along it."""
        at = dict(zip(self.X.axes, self.X.partition.coordinates(region.workers[0]), strict=True))
        bounds = [*self.needed[:dim], *self.X.bounds[dim:]]
        box = [ranges[at.get(d, 0)] for d, ranges in enumerate(bounds)]
        return [a for a, _ in box], [b for _, b in box]

    def _part(self, region: Region, low: list[int], high: list[int]) -> Subset:
        base = self.base[region.name]
        start, stop = map(operator.sub, low, base), map(operator.sub, high, base)
        return Subset(region, self._corner(start), self._corner(stop))

    def _buffer(self, name: str, part: Subset) -> Subset:
        start, stop = self._corner((0,) * self.X.ndim), self._corner(part.shape)
        return Subset(Region.checked(name, stop, part.workers, part.memory), start, stop)

    def _corner(self, given: Iterable[int]) -> tuple[int, ...]:
        """A tuple, the same object for equal ones: blocks have few different corners, and a tuple
        for each of 16,000 messages would keep the garbage collector busy."""
        corner = tuple(given)
        return self.corners.setdefault(corner, corner)


def _by_kernel(X: TensorSpace, kernel: tuple[Any, Any, Any, Any]) -> dict[int, Bounds]:
    """The input ranges that a kernel needs, by dimension, for each grid coordinate."""
    geometry = _geometry(X, _kernels(X.global_shape, *kernel))
    return {d: tuple((h.start, h.stop) for h in dims) for d, dims in enumerate(geometry)}


def _beside(X: TensorSpace, widths: Any) -> dict[int, Bounds]:
    """The blocks with halos of the given widths, by dimension, for each grid coordinate.

    Raises:
        ShapeError: the widths are not (left, right) for each dimension.
    """
    sides = edge_widths("widths", widths, X.ndim)
    return {
        d: tuple((max(a - left, 0), min(b + right, n)) if a < b else (a, b) for a, b in cuts)
        for d, (cuts, n, (left, right)) in enumerate(
            zip(X.bounds, X.global_shape, sides, strict=True)
        )
    }


def _geometry(X: TensorSpace, kernels: Sequence[Kernel]) -> list[list[HaloDim]]:
    """The geometry of X, indexed by dimension, then by grid coordinate along it."""
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
    """The smallest range that contains both; empty ranges are ignored, unless both are empty."""
    ranges = [r for r in (bulk, need) if r[0] < r[1]] or [bulk]
    return min(a for a, _ in ranges), max(b for _, b in ranges)


def _blocks(n: int, parts: int) -> list[tuple[int, int]]:
    stops = list(accumulate(balanced(n, parts)))
    return list(zip([0, *stops[:-1]], stops, strict=True))


def _kernels(
    shape: tuple[int, ...], size: Any, stride: Any, padding: Any, dilation: Any
) -> list[Kernel]:
    """The sliding kernel along each dimension of an input of this shape.

    Raises:
        ShapeError: a parameter has the wrong length or value, or the output is empty.
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
    """A parameter as one number per dimension.

    Args:
        what: its name, for messages.
        value: one number for all dimensions, or a sequence.
        ndim: the number of dimensions.
        least: the smallest valid value.

    Raises:
        ShapeError: the sequence has another length, or a number is below `least`.
    """
    values = naturals(value, what, ShapeError)
    values = values * ndim if not hasattr(value, "__len__") else values
    if len(values) != ndim:
        raise ShapeError(f"{what}: {len(values)} numbers for {ndim} dimensions: {values}")
    if any(v < least for v in values):
        raise ShapeError(f"{what}: {values}; each is at least {least}")
    return values


def edge_widths(what: str, widths: Any, ndim: int) -> tuple[tuple[int, int], ...]:
    """(left, right) of each dimension.

    Args:
        what: their name, for messages.
        widths: one number, or per dimension a number or (left, right).
        ndim: the number of dimensions.

    Raises:
        ShapeError: another number of dimensions, or a negative width.
    """
    items = [widths] * ndim if isinstance(widths, Integral) else list(widths)
    pairs = [(p, p) if isinstance(p, Integral) else tuple(p) for p in items]
    if len(pairs) != ndim or any(len(p) != 2 or min(p) < 0 for p in pairs):
        raise ShapeError(f"{what}: {widths!r} for {ndim} dimensions; numbers from 0 expected")
    return tuple((int(a), int(b)) for a, b in pairs)
