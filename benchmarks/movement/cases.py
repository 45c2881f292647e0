"""Cases of operators: each builds a linop operator, and the same in raw mpi4py.

A case is one function, registered by `case`. Its raw side is expert code: buffer mode, every buffer
and view made beforehand, packing only where data is not contiguous already. Halo exchanges are in
`benchmarks.movement.halos`, PyLops-MPI's examples in `benchmarks.movement.stencil`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

import linop
from benchmarks.harness.sides import Rival
from benchmarks.harness.task import FLOOR, RAW, ROOT_COPIES, SIZES
from linop import COPIES, LinearOperator, Partition, Space, TensorSpace
from linop.spaces.scalars import Array


@dataclass
class Case:
    """One comparison on this rank."""

    op: LinearOperator
    x: Array | None
    """This rank's argument; None where it holds no region."""
    y: Array | None
    """The argument of the adjoint."""
    forward: dict[str, Rival] = field(default_factory=dict)
    adjoint: dict[str, Rival] = field(default_factory=dict)
    one_buffer: str = ""
    """Direction in which raw MPI usually has one buffer for argument and result; empty: none."""
    in_place: bool = False
    """True if plans are timed in place, with ``out=`` the argument."""
    solver: Callable[[Any, int], Rival] | None = None
    """For iterative solvers: builds linop's side from the plan and a number of iterations.
    `forward` is then built from it and `solvers`."""
    solvers: dict[str, Callable[[int], Rival]] = field(default_factory=dict)


Build = Callable[[MPI.Intracomm, int], Case]


class Entry(NamedTuple):
    """A registered case."""

    name: str
    build: Build
    sizes: tuple[int, ...]
    ranks: tuple[int, ...] | None
    """The numbers of ranks it is for; None: all from 2."""
    peers_only: bool


CASES: list[Entry] = []


def case(
    name: str,
    sizes: tuple[int, ...] = SIZES,
    ranks: tuple[int, ...] | None = None,
    peers_only: bool = False,
) -> Callable[[Build], Build]:
    """Register ``build(comm, bytes a worker) -> Case``. `peers_only`: run beside the peers."""

    def register(build: Build) -> Build:
        CASES.append(Entry(name, build, sizes, ranks, peers_only))
        return build

    return register


def whole(space: Space, rank: int, seed: int) -> Array | None:
    """This rank's array in a space, or None: whole numbers from -9 to 9, whose sums are exact."""
    regions = space.on(rank)
    if not regions:
        return None
    numbers = np.random.default_rng([seed, rank])
    return numbers.integers(-9, 10, regions[0].shape).astype(space.dtype)


def arguments(op: LinearOperator, rank: int) -> tuple[Array | None, Array | None]:
    """This rank's arguments of an operator and of its adjoint."""
    return whole(op.domain, rank, 1), whole(op.codomain, rank, 2)


def held(op: LinearOperator, rank: int) -> tuple[Array, Array]:
    """As `arguments`, for operators with a region on every rank on both sides."""
    x, y = arguments(op, rank)
    assert x is not None and y is not None
    return x, y


def _result(function: Callable[..., Any], *given: Any, out: Array | None) -> Rival:
    """A buffer-mode call that leaves its result in `out`."""

    def run() -> Array | None:
        function(*given)
        return out

    return Rival(run)


def _empty(like: Array | None) -> Array | None:
    return None if like is None else np.empty_like(like)


def _elements(size: int) -> int:
    return size // np.dtype(np.float32).itemsize


@case("broadcast", (8, *SIZES))
def broadcast(comm: MPI.Intracomm, size: int) -> Case:
    """Broadcast from rank 0; raw MPI usually has one buffer on the root for argument and result, as
    in ``plan(x, out=x)``."""
    X = TensorSpace(_elements(size), Partition((1,)), np.float32)
    op = linop.broadcast(X, Partition((comm.size,)))
    x, y = arguments(op, comm.rank)
    assert y is not None
    buffer = np.empty_like(y) if x is None else x
    copied = np.empty_like(y)

    def with_copy() -> Array:
        if x is not None:
            np.copyto(copied, x)
        comm.Bcast(copied)
        return copied

    forward = {RAW: _result(comm.Bcast, buffer, out=buffer), ROOT_COPIES: Rival(with_copy)}
    out = _empty(x)
    adjoint = {RAW: _result(comm.Reduce, y, out, out=out)}
    return Case(op, x, y, forward, adjoint, one_buffer="forward")


@case("sum-reduce", (8, *SIZES))
def sum_reduce(comm: MPI.Intracomm, size: int) -> Case:
    Y = TensorSpace(_elements(size), Partition((comm.size,)), np.float32, [COPIES])
    op = linop.sum_reduce(Y, Partition((1,)))
    x, y = arguments(op, comm.rank)
    assert x is not None
    out = _empty(y)
    buffer = np.empty_like(x) if y is None else y
    forward = {RAW: _result(comm.Reduce, x, out, out=out)}
    adjoint = {RAW: _result(comm.Bcast, buffer, out=buffer)}
    return Case(op, x, y, forward, adjoint, one_buffer="adjoint")


@case("all-reduce", (8, *SIZES))
def all_reduce(comm: MPI.Intracomm, size: int) -> Case:
    op = linop.all_reduce(
        TensorSpace(_elements(size), Partition((comm.size,)), np.float32, [COPIES])
    )
    x, y = arguments(op, comm.rank)
    there, back = _empty(x), _empty(y)
    forward = {RAW: _result(comm.Allreduce, x, there, out=there)}
    return Case(op, x, y, forward, {RAW: _result(comm.Allreduce, y, back, out=back)})


@case("all-gather")
def all_gather(comm: MPI.Intracomm, size: int) -> Case:
    P = comm.size
    op = linop.all_gather(TensorSpace(P * _elements(size), Partition((P,)), np.float32))
    x, y = arguments(op, comm.rank)
    there, back = _empty(y), _empty(x)
    forward = {RAW: _result(comm.Allgather, x, there, out=there)}
    return Case(op, x, y, forward, {RAW: _result(comm.Reduce_scatter_block, y, back, out=back)})


@case("reduce-scatter")
def reduce_scatter(comm: MPI.Intracomm, size: int) -> Case:
    op = linop.reduce_scatter(
        TensorSpace(_elements(size), Partition((comm.size,)), np.float32, [COPIES])
    )
    x, y = arguments(op, comm.rank)
    there, back = _empty(y), _empty(x)
    forward = {RAW: _result(comm.Reduce_scatter_block, x, there, out=there)}
    return Case(op, x, y, forward, {RAW: _result(comm.Allgather, y, back, out=back)})


@case("repartition P×1 → 1×P")
def rows_to_columns(comm: MPI.Intracomm, size: int) -> Case:
    return _repartition(comm, size, (comm.size, 1), (1, comm.size))


@case("repartition 2×2 → 1×4", ranks=(4,))
def squares_to_columns(comm: MPI.Intracomm, size: int) -> Case:
    return _repartition(comm, size, (2, 2), (1, 4))


Grid = tuple[int, ...]


def _repartition(comm: MPI.Intracomm, size: int, source: Grid, target: Grid) -> Case:
    side = math.isqrt(_elements(size))
    shape = (side * 2, side * comm.size // 2)
    X = TensorSpace(shape, Partition(source), np.float32)
    op = linop.repartition(X, Partition(target))
    x, y = held(op, comm.rank)
    columns = np.ones((side, 2 * side), np.float32)[:, :side]
    floor = Rival(partial(np.copyto, np.empty((side, side), np.float32), columns), tolerance=None)
    there = Rival(Exchange(comm, x, np.empty_like(y), shape, source, target))
    back = Rival(Exchange(comm, y, np.empty_like(x), shape, target, source))
    return Case(op, x, y, {RAW: there, FLOOR: floor}, {RAW: back, FLOOR: floor})


class Exchange:
    """Repartition: pack, Alltoallv, unpack; the copies only where pieces are not contiguous."""

    def __init__(
        self, comm: MPI.Intracomm, x: Array, out: Array, shape: Grid, source: Grid, target: Grid
    ) -> None:
        sources, targets = _blocks(shape, source), _blocks(shape, target)
        self.comm, self.out = comm, out
        self.send, self.pack = self._side(x, sources[comm.rank], targets)
        self.receive, copies = self._side(out, targets[comm.rank], sources)
        self.unpack = [(view, piece) for piece, view in copies]

    @staticmethod
    def _side(array: Array, mine: Box, others: list[Box]) -> tuple[list[Any], list[Any]]:
        """Message buffer in mpi4py's form, and (piece of the buffer, view of the array) to copy."""
        views = [array[_shared(mine, other)] for other in others]
        counts = [view.size for view in views]
        if all(view.flags.c_contiguous for view in views):
            start = array.ctypes.data
            places = [(view.ctypes.data - start) // array.itemsize for view in views]
            return [array, counts, places, MPI.FLOAT], []
        buffer = np.empty(sum(counts), array.dtype)
        places = [sum(counts[:k]) for k in range(len(counts))]
        pieces = [
            buffer[p : p + v.size].reshape(v.shape) for p, v in zip(places, views, strict=True)
        ]
        return [buffer, counts, places, MPI.FLOAT], list(zip(pieces, views, strict=True))

    def __call__(self) -> Array:
        for piece, view in self.pack:
            np.copyto(piece, view)
        self.comm.Alltoallv(self.send, self.receive)
        for view, piece in self.unpack:
            np.copyto(view, piece)
        return self.out


Box = tuple[tuple[int, int], ...]


def _blocks(shape: Grid, grid: Grid) -> list[Box]:
    """The equal blocks of a tensor over a grid, by rank."""
    steps = [n // p for n, p in zip(shape, grid, strict=True)]
    return [
        tuple((k * s, k * s + s) for k, s in zip(at, steps, strict=True))
        for at in np.ndindex(*grid)
    ]


def _shared(mine: Box, other: Box) -> tuple[slice, ...]:
    """Intersection of two blocks, as slices of the first; empty if they are disjoint."""
    lows = [max(a, c) for (a, _), (c, _) in zip(mine, other, strict=True)]
    highs = [min(b, d) for (_, b), (_, d) in zip(mine, other, strict=True)]
    return tuple(
        slice(low - a, max(low, high) - a)
        for low, high, (a, _) in zip(lows, highs, mine, strict=True)
    )


@case("three tiny diagonals composed", (64,), ranks=(1,))
def diagonals(comm: MPI.Intracomm, size: int) -> Case:
    """Local operators on one worker, eight elements."""
    region = linop.Region("x", (size // 8,))
    values = [np.arange(k, k + size // 8) * 1.0 for k in (1, 2, 3)]
    a, b, c = (linop.local_operators.diagonal(d, region) for d in values)
    op = a @ b @ c
    x, y = held(op, comm.rank)
    return Case(
        op,
        x,
        y,
        {"NumPy": Rival(lambda: values[0] * (values[1] * (values[2] * x)))},
        {"NumPy": Rival(lambda: values[2] * (values[1] * (values[0] * y)))},
    )


@case("three tiny matrices composed", (64,), ranks=(1,))
def matrices(comm: MPI.Intracomm, size: int) -> Case:
    """Local operators on one worker, eight elements."""
    n = size // 8
    region = linop.Region("x", (n,))
    draw = np.random.default_rng(0).integers
    a, b, c = (draw(-3, 4, (n, n)).astype(float) for _ in range(3))
    op = linop.local_operators.matrix(a, region, region) @ linop.local_operators.matrix(
        b, region, region
    )
    op = op @ linop.local_operators.matrix(c, region, region)
    x, y = held(op, comm.rank)
    return Case(
        op,
        x,
        y,
        {"NumPy": Rival(lambda: a @ (b @ (c @ x)))},
        {"NumPy": Rival(lambda: c.T @ (b.T @ (a.T @ y)))},
    )
