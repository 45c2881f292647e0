"""Stencils: the movement that brings what the taps need, and the local operator that sums."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy

from linop.caching import cached_property
from linop.errors import PartitionError, expect
from linop.local_operators.functions import local_operator
from linop.local_operators.sliding_sums import Fill, Run, SlidingSums
from linop.normal_form.maps import Function
from linop.operators.algebra import Named, direct_sum
from linop.operators.expressions import Identity, compose
from linop.operators.memory import adds, allocate
from linop.operators.operator import LinearOperator, TensorOperator
from linop.provenance import records_origin
from linop.spaces.array_modules import Namespace
from linop.spaces.blocks import is_tiled
from linop.spaces.region import Region, Subset
from linop.spaces.space import Space
from linop.spaces.tensor import TensorSpace
from linop.stencils.boundaries import Boundary, boundaries, runs
from linop.stencils.needs import Box, Needs
from linop.stencils.taps import Blockwise, Coefficient, Offset, taps_of


@records_origin
def stencil(
    X: TensorSpace,
    weights: npt.ArrayLike | Mapping[Any, Coefficient],
    boundary: Boundary | Sequence[Boundary] = "zero",
    *,
    origin: int | Sequence[int] | None = None,
    name: str = "St",
) -> TensorOperator:
    """The stencil ``y[i] = sum over taps of weight[i] x[i + offset]``, on a tensor in blocks.

    It is composed of a movement, which brings the elements of other blocks that the taps read, each
    once and no others (a star's halos have no corners), in one message between two workers; and of
    a local operator, which follows the rule of `linop.local_operators`. The adjoint is derived.

    Args:
        X: the blocks, of any lengths, which follow one another. Each copy along an axis of
            `COPIES` has its own neighbours; those of `REPLICATED` axes all compute.
        weights: coefficients by offset, a tuple (in one dimension also a number); or an array of
            numbers, with the element itself in the middle. A coefficient is a number, or varies
            with i: a global array of X's shape; a `Vector` of X, of which a worker needs its own
            blocks only; or a function that returns the coefficients of a block, given the slices
            of its global indices, and is called when that block is first computed. Taps of zeros
            are skipped.
        boundary: elements beyond the edges, for all dimensions or one for each: ``zero``, or as
            `numpy.pad` names them ``reflect``, ``symmetric``, ``edge``; or ``periodic`` (its
            ``wrap``).
        origin: the index of the element itself in an array of weights, if not the middle.
        name: the symbol.

    Returns:
        The operator from X to X.

    Raises:
        ShapeError: offsets or coefficients do not fit the shape; an array has an even side, and
            there is no `origin`. DTypeError: X's dtype does not hold a coefficient.
            ArgumentError: an unknown boundary. SpaceError: coefficients are a vector of another
            space. PartitionError: the blocks of X overlap, leave gaps, or are not in order.

    Example:
        >>> X = linop.TensorSpace((4,), linop.Partition(2))
        >>> D = linop.stencil(X, {0: -1.0, 1: 1.0}, boundary="periodic")
        >>> (D @ np.array([0.0, 1.0, 4.0, 9.0])).tolist()
        [1.0, 3.0, 5.0, -9.0]
        >>> (D.H @ np.array([1.0, 0.0, 0.0, 0.0])).tolist()
        [-1.0, 1.0, 0.0, 0.0]
    """
    X = expect("stencil", X, TensorSpace)
    if not is_tiled(X):
        raise PartitionError(f"stencil: the blocks of X must follow one another; {X.bounds}")
    modes = boundaries(boundary, X.ndim)
    taps = taps_of(X, weights, origin)
    needs = Needs(X, [offset for offset, _ in taps], modes)
    blocks = [_Block(X, region, taps, modes, needs) for region in X.regions]
    local = direct_sum(*(block.operator(name) for block in blocks))
    sums = compose(Identity(local.codomain, X), local)
    pieces = [piece for block in blocks for piece in block.pieces]
    if not pieces:
        return Named(name, "", compose(sums, Identity(X, local.domain)))
    bring = allocate(X, *pieces)
    parts = [pair for block in blocks for pair in block.parts(needs)]
    sources, targets = zip(*parts, strict=True)
    halos = Named("H", name, compose(adds(bring.codomain, sources, targets), bring))
    return Named(name, "", compose(sums, halos))


class _Block:
    """The part of a stencil that is one block's.

    Attributes:
        pieces: regions for the elements of other blocks that the block needs.
        boxes: global indices of the block, and of each piece.
    """

    def __init__(
        self,
        X: TensorSpace,
        region: Region,
        taps: Sequence[tuple[Offset, Blockwise]],
        modes: Sequence[Boundary],
        needs: Needs,
    ) -> None:
        self.X, self.region, self.taps, self.modes = X, region, taps, modes
        self.own: Box = tuple((part.start, part.stop) for part in X.block(region))
        needed = needs.of(self.own)
        self.boxes = [self.own, *needed]
        self.pieces = [
            Region(
                f"{X.name}:{k}@{region.workers[0]}",
                tuple(b - a for a, b in box),
                region.workers,
                region.memory,
            )
            for k, box in enumerate(needed)
        ]

    def parts(self, needs: Needs) -> Iterator[tuple[Subset, Subset]]:
        """(part of a block, part of a piece) of each copy that the block needs."""
        X, at = self.X, list(self.X.partition.coordinates(self.region.workers[0]))
        for piece, box in zip(self.pieces, self.boxes[1:], strict=True):
            for numbers, part in needs.holders(box):
                there = [numbers[a] if isinstance(a, int) else at[k] for k, a in enumerate(X.axes)]
                holder = X.region(X.partition.worker(there))
                first = [part.start for part in X.block(holder)]
                yield _subset(holder, part, first), _subset(piece, part, [a for a, _ in box])

    def operator(self, name: str) -> LinearOperator:
        """The local operator from the block and its pieces to the block."""
        held, single = [self.region, *self.pieces], not self.pieces
        names = [region.name for region in held]

        def port(namespace: Namespace) -> tuple[Function, Function]:
            pair = functools.cache(lambda: self.sums.functions(namespace))  # by who applies it

            def forward(x: Any) -> Any:
                return pair()[0]([x] if single else [x[n] for n in names])[0]

            def backward(y: Any) -> Any:
                xs = pair()[1]([y])
                return xs[0] if single else dict(zip(names, xs, strict=True))

            return forward, backward

        space = Space(held, self.X.dtype), Space(self.region, self.X.dtype)
        return local_operator(*space, port, name, self.matrix)

    def matrix(self) -> scipy.sparse.csr_array:
        """The matrix of the local operator."""
        return self.sums.matrix()

    @cached_property
    def sums(self) -> SlidingSums:
        """The loop; coefficients are evaluated here."""
        offsets = np.array([offset for offset, _ in self.taps], np.int64)
        offsets = offsets.reshape(len(self.taps), self.X.ndim)
        low = offsets.min(axis=0, initial=0)
        return SlidingSums(
            sources=tuple(tuple(b - a for a, b in box) for box in self.boxes),
            fills=tuple(self._fills(low.tolist(), offsets.max(axis=0, initial=0).tolist())),
            target=self.region.shape,
            steps=(1,) * self.X.ndim,
            offsets=tuple(map(tuple, (offsets - low).tolist())),
            weights=tuple(weight(self.region) for _, weight in self.taps),
            dtype=self.X.dtype,
        )

    def _fills(self, low: Sequence[int], high: Sequence[int]) -> Iterator[Fill]:
        """The boxes of the padded block that the block itself and its pieces fill."""
        sides = zip(self.own, low, high, self.X.global_shape, self.modes, strict=True)
        lines = [runs(a + x, b + y, n, mode) for (a, b), x, y, n, mode in sides]
        for line in product(*lines):
            for source, box in enumerate(self.boxes):
                parts = [_clipped(run, *ends) for run, ends in zip(line, box, strict=True)]
                if all(parts):
                    yield Fill(source, tuple(part for part in parts if part))


def _subset(region: Region, part: Box, first: Sequence[int]) -> Subset:
    """A box of global indices as a subset of a region that starts at `first`."""
    start, stop = ([end - a for end, a in zip(ends, first, strict=True)] for ends in _ends(part))
    return Subset(region, tuple(start), tuple(stop))


def _ends(box: Box) -> tuple[list[int], list[int]]:
    return [a for a, _ in box], [b for _, b in box]


def _clipped(run: Run, start: int, stop: int) -> Run | None:
    """The part of a run whose indices are from `start` to `stop`, counted from `start`."""
    if run.stride == 1:
        first, last = max(0, start - run.of), min(run.count, stop - run.of)
    else:
        first, last = max(0, run.of - stop + 1), min(run.count, run.of - start + 1)
    if first >= last:
        return None
    return Run(run.at + first, run.of + run.stride * first - start, last - first, run.stride)
