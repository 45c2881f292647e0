"""Partitions and tensor spaces."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import linop
from linop import COPIES, REPLICATED, Partition, Region, Space, TensorSpace
from linop.errors import ArgumentError, DTypeError, PartitionError, ShapeError, SpaceError
from linop.spaces.blocks import axes_of_copies, is_disjoint, is_tiled, lines
from linop.spaces.partition import balanced
from linop.testing.describing import (
    COMPUTED,
    MOVED,
    Description,
    dtype_of,
    grids,
    orders,
    seeds,
    tensor_of,
    tensors,
)
from support.operators.properties import same_arrays, same_vectors


@given(grids(12), st.data())
def test_a_partition_is_a_grid_of_workers(grid: tuple[int, ...], data: st.DataObject) -> None:
    size = math.prod(grid)
    workers = data.draw(orders(12, size))
    partition = Partition(grid, workers)
    assert (partition.shape, partition.ndim, partition.size) == (grid, len(grid), size)
    assert partition.workers == workers
    # Row-major: the last coordinate runs fastest.
    for worker, at in zip(workers, product(*map(range, grid)), strict=True):
        assert partition.coordinates(worker) == at
        assert partition.worker(at) == worker
        assert worker in partition
        # "The worker at (i, j) stands at (j, i)."
        assert partition.T.coordinates(worker) == at[::-1]
    assert not any(w in partition for w in set(range(12)) - set(workers))
    same_arrays(partition.grid, np.array(workers).reshape(grid))
    assert partition.T.shape == grid[::-1]
    assert partition.T.T == partition
    assert partition.transpose() == partition.T
    assert Partition(grid).workers == tuple(range(size))
    assert Partition(list(grid), list(workers)) == partition
    assert hash(Partition(grid, workers)) == hash(partition)


@given(grids(12, 1, 3), st.integers(0, 2))
def test_extension_is_by_ones_on_the_left(grid: tuple[int, ...], more: int) -> None:
    partition = Partition(grid)
    wide = partition.extend(len(grid) + more)
    assert wide.shape == (1,) * more + grid
    assert wide.workers == partition.workers
    with pytest.raises(PartitionError, match="cannot extend"):
        partition.extend(len(grid) - 1)


def test_sub_grids_are_numpys() -> None:
    partition = Partition((2, 3), [5, 4, 3, 2, 1, 0])
    assert partition[0] == Partition((3,), [5, 4, 3])
    assert partition[:, 1] == Partition((2,), [4, 1])
    assert partition[:, 1:2] == Partition((2, 1), [4, 1])
    assert partition[::-1, ..., 0] == Partition((2,), [2, 5])
    assert partition[1, 2] == Partition((), [0])
    assert Partition(4) == Partition((4,))
    assert Partition(()).workers == (0,)
    assert Partition(()).worker(()) == 0


@given(grids(12), st.data())
def test_sub_grids_are_numpys_of_any_grid(grid: tuple[int, ...], data: st.DataObject) -> None:
    partition = Partition(grid, data.draw(orders(12, math.prod(grid))))
    index = tuple(
        data.draw(st.integers(-n, n - 1) | st.slices(n).filter(lambda s, n=n: len(range(n)[s]) > 0))
        for n in grid
    )
    part = partition[index]
    same_arrays(part.grid, np.asarray(partition.grid[index]))
    assert all(partition[index].worker(part.coordinates(w)) == w for w in part.workers)
    assert partition[...] == partition
    assert partition[None, ...] == partition.extend(partition.ndim + 1)


GRID = Partition((2, 3), [5, 4, 3, 2, 1, 0])
REFUSED: dict[str, Callable[[], Any]] = {
    "no such worker": lambda: GRID.coordinates(6),
    "no such point": lambda: GRID.worker((0, 3)),
    "before the first point": lambda: GRID.worker((0, -1)),
    "a point of too few numbers": lambda: GRID.worker((1,)),
    "an index beyond": lambda: GRID[2],
    "an index too many": lambda: GRID[0, 0, 0],
    "no workers left": lambda: GRID[0:0],
    "a worker twice by index": lambda: GRID[[0, 0]],
    "an axis of none": lambda: Partition((2, 0)),
    "a worker twice": lambda: Partition(2, [1, 1]),
    "too few workers": lambda: Partition((2, 2), [0, 1, 2]),
    "a negative worker": lambda: Partition(2, [0, -1]),
}


@pytest.mark.parametrize("what", REFUSED)
def test_partitions_refuse(what: str) -> None:
    with pytest.raises(PartitionError):
        REFUSED[what]()


def test_partitions_differ_in_shape_or_workers() -> None:
    assert Partition((2, 3)) != Partition((3, 2))
    assert Partition((2,)) != Partition((2,), [1, 0])
    assert Partition((2,)) != (2,)
    assert repr(Partition((2,))) == "Partition((2,))"
    assert repr(Partition((2,), [3, 1])) == "Partition((2,), workers=(3, 1))"
    assert str(Partition((2, 3))) == "2×3"


# Blocks


@given(st.integers(0, 30), st.integers(1, 12))
def test_balanced_blocks(n: int, parts: int) -> None:
    """The first ``n mod p`` are one longer; as NumPy splits arrays."""
    lengths = balanced(n, parts)
    assert lengths == tuple(len(piece) for piece in np.array_split(np.arange(n), parts))
    assert lengths == tuple([n // parts + 1] * (n % parts) + [n // parts] * (parts - n % parts))


@given(st.integers(0, 12), st.integers(1, 8))
def test_blocks_of_a_line(n: int, parts: int) -> None:
    X = TensorSpace(n, Partition(parts))
    pieces = np.array_split(np.arange(n), parts)
    for worker, piece in enumerate(pieces):
        assert X.local_shape(worker) == piece.shape
        same_arrays(np.arange(n)[X.slices(worker)], piece)
        assert X.region(worker) == Region(f"x@{worker}", piece.shape, worker)


def test_a_grid_of_blocks() -> None:
    X = TensorSpace((5, 4), Partition((2, 3), [10, 11, 12, 20, 21, 22]), name="t")
    assert [r.name for r in X] == ["t@10", "t@11", "t@12", "t@20", "t@21", "t@22"]
    assert [r.shape for r in X] == [(3, 2), (3, 1), (3, 1), (2, 2), (2, 1), (2, 1)]
    assert X.slices(21) == (slice(3, 5), slice(2, 3))
    assert X.size == 20
    assert is_disjoint(X)
    assert isinstance(X, Space)


def test_axes_choose_what_the_grid_does() -> None:
    grid = Partition((2, 3))
    swapped = TensorSpace((5, 4), grid, axes=(1, 0))
    assert swapped.slices(5) == (slice(4, 5), slice(2, 4))
    assert TensorSpace((5, 4), grid, axes=(-1, -2)).axes == (1, 0)

    copied = TensorSpace((5,), grid, axes=(COPIES, 0))
    assert [r.shape for r in copied] == [(2,), (2,), (1,)] * 2
    assert copied.size == 10  # independent copies count
    assert axes_of_copies(copied) == (0,)
    assert not is_disjoint(copied)

    shared = TensorSpace((5,), grid, axes=(REPLICATED, 0))
    assert [(r.name, r.workers) for r in shared] == [
        ("x@0", (0, 3)),
        ("x@1", (1, 4)),
        ("x@2", (2, 5)),
    ]
    assert shared.size == 5  # one logical piece
    assert shared.region(4) == shared.region(1)
    assert is_disjoint(shared)

    both = TensorSpace((), grid, axes=(COPIES, REPLICATED))
    assert [(r.name, r.workers) for r in both] == [("x@0", (0, 1, 2)), ("x@3", (3, 4, 5))]


@given(tensors(8, dtypes=COMPUTED, overlapping=True), seeds)
def test_blocks_lie_where_slices_say(described: Description, seed: int) -> None:
    X = tensor_of(described)
    whole = np.random.default_rng(seed).integers(-9, 9, X.global_shape).astype(X.dtype)
    whole = np.asarray(whole)
    v = X.scatter(whole)
    assert X.partition.workers == described["workers"]
    for worker in X.partition.workers:
        region = X.region(worker)
        assert worker in region.workers
        assert region.shape == X.local_shape(worker)
        same_arrays(v[region.name], whole[(*X.slices(worker), ...)])
        assert not np.shares_memory(v[region.name], whole)
    covered = np.zeros(X.global_shape, int)
    for region in X:
        covered[(*X.block(region), ...)] += 1
    # Replicated blocks are one region; copies are several.
    assert is_disjoint(X) or covered.max(initial=0) > 1 or X.size == 0 or 0 in X.global_shape
    if covered.all():
        same_arrays(X.gather(v), whole)
        same_arrays(X.gather(v.arrays), whole)
    else:
        with pytest.raises(SpaceError, match="leave out elements of the tensor"):
            X.gather(v)


@given(tensors(8, dtypes=COMPUTED), seeds)
def test_gather_undoes_scatter(described: Description, seed: int) -> None:
    X = tensor_of(described)
    v = X.scatter(X.gather(X.scatter(np.ones(X.global_shape, X.dtype))))
    same_vectors(v, X.scatter(np.ones(X.global_shape, X.dtype)))
    sizes = [math.prod(X.local_shape(r.workers[0])) for r in X]
    assert X.size == sum(sizes)


def test_gather_wants_copies_that_agree() -> None:
    X = TensorSpace(3, Partition(2), axes=(COPIES,))
    v = X.scatter(np.arange(3.0))
    same_arrays(X.gather(v), np.arange(3.0))
    v["x@1"][1] = 7
    with pytest.raises(SpaceError, match=r"block 'x@0' differs from another copy"):
        X.gather(v)


def test_gather_takes_nan_for_nan() -> None:
    X = TensorSpace(2, Partition(2), axes=(COPIES,))
    assert np.isnan(X.gather(X.scatter(np.array([np.nan, 1.0])))[0])


def test_uneven_and_overlapping_blocks() -> None:
    X = TensorSpace(6, Partition(3), sizes={0: (4, 0, 2)})
    assert [X.slices(w) for w in range(3)] == [(slice(0, 4),), (slice(4, 4),), (slice(4, 6),)]
    Y = TensorSpace(6, Partition(3), bounds={0: ((0, 3), (2, 5), (5, 6))})
    assert [Y.local_shape(w) for w in range(3)] == [(3,), (3,), (1,)]
    assert is_disjoint(X)
    assert not is_disjoint(Y)


def test_like_lays_the_same_tensor_out_elsewhere() -> None:
    X = TensorSpace((5, 4), Partition((2, 2)), np.float32, name="t")
    Y = X.like(Partition((3,), [4, 5, 6]), (1,))
    assert Y == TensorSpace((5, 4), Partition((3,), [4, 5, 6]), np.float32, (1,), "t")
    assert Y.dtype == np.float32
    assert [r.name for r in Y] == ["t@4", "t@5", "t@6"]


def test_lines_are_along_grid_axes() -> None:
    X = TensorSpace((4, 4), Partition((2, 2)))
    names = [[r.name for r in line] for line in lines(X, [0])]
    assert names == [["x@0", "x@2"], ["x@1", "x@3"]]
    names = [[r.name for r in line] for line in lines(X, [0, 1])]
    assert names == [["x@0", "x@1", "x@2", "x@3"]]


def test_the_core_holds_thousands_of_workers() -> None:
    """Design, section 1: an operator over 4,096 workers in one process."""
    X = TensorSpace((256, 256), Partition((64, 64)))
    op = linop.shift(X, 1, grid_axis=1) @ linop.shift(X, -1, grid_axis=1)
    assert len(X.regions) == 4096
    assert op.H.movement() == op.movement().adjoint() == linop.identity(X).movement()
    assert (linop.shift(X, 1).cost().messages, linop.shift(X, 0).cost().messages) == (4096, 0)


# What tensors hold


@given(tensors(8, dtypes=COMPUTED, roles=("split",), shape=(5, 4, 3)))
def test_blocks_tile_the_tensor(described: Description) -> None:
    """Grids that split only: every element is in exactly as many blocks as there are copies."""
    X = tensor_of(described)
    times = np.zeros(X.global_shape, int)
    for worker in X.partition.workers:
        times[X.slices(worker)] += 1
    assert is_tiled(X)
    copies = math.prod(
        n for n, axis in zip(described["grid"], X.axes, strict=True) if axis is COPIES
    )
    assert (times == copies).all()
    assert X.size == copies * 60


@given(tensors(8, dtypes=COMPUTED), seeds)
def test_replicated_blocks_count_once(described: Description, seed: int) -> None:
    """In the size, and in the inner product; independent copies count each."""
    X = tensor_of(described)
    copies = math.prod(
        n for n, axis in zip(described["grid"], X.axes, strict=True) if axis is COPIES
    )
    assert X.size == copies * math.prod(X.global_shape)
    whole = np.random.default_rng(seed).integers(-9, 9, (2, *X.global_shape)).astype(X.dtype)
    v, w = (X.scatter(np.asarray(values)) for values in whole)
    assert v.inner(w) == copies * np.vdot(whole[0].astype(complex), whole[1]).real
    for region in X:
        alike = [a for a, axis in zip(described["grid"], X.axes, strict=True) if axis is REPLICATED]
        assert len(region.workers) == math.prod(alike)
        assert region.name == f"x@{min(region.workers)}"


@pytest.mark.parametrize("given_", [np.dtype(bool), *map(dtype_of, MOVED)], ids=str)
@pytest.mark.parametrize("wanted", MOVED)
def test_scatter_casts_what_loses_nothing(given_: np.dtype[Any], wanted: str) -> None:
    X = TensorSpace(3, Partition(2), dtype_of(wanted))
    array = np.ones(3, given_)
    if np.can_cast(given_, X.dtype, "safe"):
        same_arrays(X.gather(X.scatter(array)), np.ones(3, X.dtype))
    else:
        with pytest.raises(DTypeError, match=f"{given_} given, {X.dtype} expected"):
            X.scatter(array)


def test_scatter_takes_numbers_without_a_dtype() -> None:
    X = TensorSpace(3, Partition(2), np.float32)
    same_arrays(X.gather(X.scatter([1, 2.5, True])), np.array([1, 2.5, 1], np.float32))
    whole = TensorSpace((), Partition(3), int, axes=(COPIES,))
    same_arrays(whole.gather(whole.scatter(7)), np.array(7))
    assert whole.size == 3


UNFIT: dict[str, tuple[type[Exception], Callable[[], Any]]] = {
    "shape": (ShapeError, lambda: TensorSpace((2, 3), Partition(2)).scatter(np.ones((3, 2)))),
    "fractions": (DTypeError, lambda: TensorSpace(2, Partition(2), int).scatter([0.5, 1])),
    "complex": (DTypeError, lambda: TensorSpace(2, Partition(2)).scatter([1j, 1])),
    "dimensions": (PartitionError, lambda: TensorSpace(4, GRID)),
    "axis": (PartitionError, lambda: TensorSpace((4, 4), GRID, axes=(0, -3))),
    "axis twice": (PartitionError, lambda: TensorSpace((4, 4), GRID, axes=(1, -1))),
    "axes": (PartitionError, lambda: TensorSpace((4, 4), GRID, axes=(0,))),
    "role": (ArgumentError, lambda: TensorSpace(4, Partition(2), axes=("copies",))),  # type: ignore[arg-type]
    "partition": (ArgumentError, lambda: TensorSpace(4, "2")),  # type: ignore[arg-type]
    "sum of sizes": (PartitionError, lambda: TensorSpace(4, Partition(2), sizes={0: (1, 2)})),
    "number of sizes": (PartitionError, lambda: TensorSpace(4, Partition(2), sizes={0: (4,)})),
    "sizes of what": (PartitionError, lambda: TensorSpace(4, Partition(2), sizes={1: (1, 3)})),
    "bounds": (PartitionError, lambda: TensorSpace(4, Partition(1), bounds={0: ((2, 5),)})),
    "reversed": (PartitionError, lambda: TensorSpace(4, Partition(1), bounds={0: ((2, 1),)})),
    "bounds of what": (PartitionError, lambda: TensorSpace(4, Partition(1), bounds={2: ((0, 1),)})),
    "a stranger's block": (PartitionError, lambda: TensorSpace(4, Partition(2)).slices(2)),
    "a stranger's region": (PartitionError, lambda: TensorSpace(4, Partition(2)).region(2)),
    "a part": (SpaceError, lambda: TensorSpace(2, Partition(2)).gather({"x@0": np.ones(1)})),
    "another": (SpaceError, lambda: TensorSpace(2, Partition(2)).gather(
        TensorSpace(2, Partition(1)).zeros())),
}  # fmt: skip


@pytest.mark.parametrize("grid", [2, (2,), [2, 1], (1, 2), np.int64(3)])
def test_a_grid_is_given_by_its_shape_too(grid: Any) -> None:
    X, Y = TensorSpace((4, 6), grid), TensorSpace((4, 6), Partition(grid))
    assert X == Y and X.partition.shape == Y.partition.shape
    with pytest.raises(PartitionError, match="at least one worker"):
        TensorSpace((4, 6), 0)


@pytest.mark.parametrize("what", UNFIT)
def test_tensors_refuse(what: str) -> None:
    error, attempt = UNFIT[what]
    with pytest.raises(error):
        attempt()


@given(tensors(8, dtypes=COMPUTED, overlapping=True), st.data())
def test_gather_rejects_what_disagrees(described: Description, data: st.DataObject) -> None:
    """An element in two blocks, one of which is changed."""
    X = tensor_of(described)
    v = X.scatter(np.zeros(X.global_shape, X.dtype))
    times = np.zeros(X.global_shape, int)
    for region in X:
        times[(*X.block(region), ...)] += 1
    if not times.all() or times.max(initial=0) < 2:
        return
    region = data.draw(st.sampled_from([r for r in X if (times[(*X.block(r), ...)] > 1).any()]))
    twice = np.argwhere(times[(*X.block(region), ...)] > 1)
    v[region.name][tuple(data.draw(st.sampled_from(twice.tolist())))] = 1
    with pytest.raises(SpaceError, match="differs from another copy"):
        X.gather(v)
