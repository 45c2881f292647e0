"""Partitions and tensor spaces (design, section 2)."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import linop
from checks import same_arrays, same_vectors
from describing import COMPUTED, Description, grids, orders, seeds, tensor_of, tensors
from linop import COPIES, REPLICATED, Partition, Region, Space, TensorSpace
from linop.errors import PartitionError, SpaceError
from linop.partition import balanced


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
    assert X.disjoint
    assert isinstance(X, Space)


def test_axes_choose_what_the_grid_does() -> None:
    grid = Partition((2, 3))
    swapped = TensorSpace((5, 4), grid, axes=(1, 0))
    assert swapped.slices(5) == (slice(4, 5), slice(2, 4))
    assert TensorSpace((5, 4), grid, axes=(-1, -2)).axes == (1, 0)

    copied = TensorSpace((5,), grid, axes=(COPIES, 0))
    assert [r.shape for r in copied] == [(2,), (2,), (1,)] * 2
    assert copied.size == 10  # independent copies count
    assert copied.copied == (0,)
    assert not copied.disjoint

    shared = TensorSpace((5,), grid, axes=(REPLICATED, 0))
    assert [(r.name, r.workers) for r in shared] == [
        ("x@0", (0, 3)),
        ("x@1", (1, 4)),
        ("x@2", (2, 5)),
    ]
    assert shared.size == 5  # one logical piece
    assert shared.region(4) == shared.region(1)
    assert shared.disjoint

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
    assert X.disjoint or covered.max(initial=0) > 1 or X.size == 0 or 0 in X.global_shape
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
    assert X.disjoint
    assert not Y.disjoint


def test_like_lays_the_same_tensor_out_elsewhere() -> None:
    X = TensorSpace((5, 4), Partition((2, 2)), np.float32, name="t")
    Y = X.like(Partition((3,), [4, 5, 6]), (1,))
    assert Y == TensorSpace((5, 4), Partition((3,), [4, 5, 6]), np.float32, (1,), "t")
    assert Y.dtype == np.float32
    assert [r.name for r in Y] == ["t@4", "t@5", "t@6"]


def test_lines_are_along_grid_axes() -> None:
    X = TensorSpace((4, 4), Partition((2, 2)))
    names = [[r.name for r in line] for line in X.lines([0])]
    assert names == [["x@0", "x@2"], ["x@1", "x@3"]]
    names = [[r.name for r in line] for line in X.lines([0, 1])]
    assert names == [["x@0", "x@1", "x@2", "x@3"]]


def test_the_core_holds_thousands_of_workers() -> None:
    """Design, section 1: an operator over 4,096 workers in one process."""
    X = TensorSpace((256, 256), Partition((64, 64)))
    op = linop.shift(X, 1, grid_axis=1) @ linop.shift(X, -1, grid_axis=1)
    assert len(X.regions) == 4096
    assert op.H.movement() == op.movement().adjoint() == linop.identity(X).movement()
    assert (linop.shift(X, 1).cost().messages, linop.shift(X, 0).cost().messages) == (4096, 0)
