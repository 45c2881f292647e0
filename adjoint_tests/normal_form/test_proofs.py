"""Proofs by the normal form: identities between programs, for all vectors.

Here they are correct; how fast they are, ``benchmarks/planning/proofs.py`` says.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import linop
from linop import COPIES, REPLICATED, Movement, Partition, Region, Space, TensorSpace
from linop.normal_form.boxes import row_keys
from linop.normal_form.movement import Transfer
from linop.operators.expressions import Primitives
from linop.testing.describing import COMPUTED, Description, grids, shapes, tensor_of
from support.operators.catalogue import halos


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 8, 13, 16])
@pytest.mark.parametrize("shape", [(), (1,), (40,), (3, 7), (0, 2)])
def test_ring_all_reduce_is_broadcast_of_sum_reduce(workers: int, shape: tuple[int, ...]) -> None:
    copies = TensorSpace(shape, Partition(workers), axes=(COPIES,))
    ring = linop.ring_all_reduce(copies)
    reduced = linop.sum_reduce(copies, Partition(1))
    spread = linop.broadcast(reduced.codomain, Partition(workers))  # type: ignore[arg-type]
    assert ring.equals(spread @ reduced)
    assert ring.equals(linop.all_reduce(copies))
    assert ring.equals(ring.H)
    assert spread.H.equals(reduced)
    size = int(np.prod(shape, dtype=int))
    wanted = np.kron(np.ones((workers, workers)), np.eye(size))
    assert (ring.to_matrix().toarray() == wanted).all()


def test_a_ring_with_one_step_less_is_no_all_reduce() -> None:
    copies = TensorSpace(12, Partition(4), axes=(COPIES,))
    (ring,) = linop.ring_all_reduce(copies)._flattened()
    steps = tuple(ring.actions)  # type: ignore[attr-defined]
    for k in range(len(steps)):
        wrong = Primitives(copies, steps[:k] + steps[k + 1 :], copies)
        # A clear before a copy into what was summed is needed too.
        assert not wrong.equals(linop.all_reduce(copies))


@given(grids(8, 3, 3))
def test_a_3d_halo_exchange_and_its_transpose(grid: tuple[int, ...]) -> None:
    """Built, composed with its adjoint, and compared with its transpose."""
    X = TensorSpace((7, 6, 5), Partition(grid))
    H = linop.halo_exchange(X, 3, padding=1)
    assert H.H.movement() == H.movement().adjoint()
    gram = H.H @ H
    assert gram.equals(gram.H)
    assert gram.movement() == H.movement().adjoint() @ H.movement()
    # H* H counts, for every element, the workers that hold it afterwards.
    counts = np.zeros(X.global_shape)
    for dims in linop.halo_geometry(X.global_shape, X.partition, 3, padding=1).values():
        counts[tuple(slice(h.start, h.stop) for h in dims)] += 1
    wanted = np.diag(X.flatten(X.scatter(counts)))
    assert (gram.to_matrix().toarray() == wanted).all()


@given(halos(8, roles=("split", "copies"), uneven=False))
def test_a_halo_exchange_only_copies(described: Description) -> None:
    """Every element of the result is one element of the input: a 0/1 matrix, one 1 a row."""
    kernel = {k: v for k, v in described.items() if k != "source"}
    H = linop.halo_exchange(tensor_of(described["source"]), **kernel)
    matrix = H.to_matrix()
    assert (matrix.sum(axis=1) == 1).all()
    assert (matrix.data == 1).all()


@given(st.integers(1, 8), shapes(2), st.sampled_from(COMPUTED))
def test_why_replicated_regions_matter(workers: int, shape: tuple[int, ...], dtype: str) -> None:
    """Design, section 2: with one replicated region V, the embedding E: V -> copies costs nothing
    forward, and its adjoint sums: E E* is the all-reduce."""
    line = Partition(workers)
    V = TensorSpace(shape, line, dtype, (REPLICATED,), "v")
    copies = TensorSpace(shape, line, dtype, (COPIES,))
    E = linop.repartition(V, copies)
    assert E.cost().messages == 0
    assert (E.H @ E).equals(workers * linop.identity(V))
    assert (E @ E.H).equals(linop.all_reduce(copies))


@given(st.integers(1, 8), shapes(2))
def test_gathering_into_copies_and_into_one_replicated_tensor(
    workers: int, shape: tuple[int, ...]
) -> None:
    """Design, section 2: parameters gathered into copies have reduce-scatter as adjoint, gathered
    into a replicated region a mere slice."""
    X = TensorSpace(shape, Partition(workers))
    copied = linop.all_gather(X)
    assert isinstance(copied.codomain, TensorSpace)
    assert copied.H.equals(linop.reduce_scatter(copied.codomain))
    shared = linop.all_gather(X, into=REPLICATED)
    assert shared.H.cost().messages == 0
    assert (shared.H @ shared).equals(linop.identity(X))
    assert (shared @ shared.H).equals(linop.identity(shared.codomain))


@given(st.integers(1, 8), st.integers(-9, 9), shapes(2))
def test_shifts_are_a_group(workers: int, steps: int, shape: tuple[int, ...]) -> None:
    X = TensorSpace(shape, Partition(workers), axes=(COPIES,))
    one = linop.shift(X, 1)
    assert one.H.equals(linop.shift(X, -1))
    assert (one**workers).equals(linop.identity(X))
    assert linop.shift(X, steps).equals(one ** (steps % workers))


def test_large_shapes_do_not_overflow() -> None:
    """Keys that sort transfers are products of ranges: past 2**62, ranks stand in for values."""
    n = 2**20
    x, y = Region("x", (n, n, n, n)), Region("y", (n, n, n, n), 1)
    tiles = [
        (y[i:j, ..., k:m], x[i:j, ..., k:m], 1)
        for i, j in ((0, n // 2), (n // 2, n))
        for k, m in ((0, 1), (1, n - 1), (n - 1, n))
    ]
    (only,) = Movement.of_blocks(Space(x), Space(y), tiles)
    assert only == Transfer(x[...], y[...], 1)
    part = Movement.of_blocks(Space(x), Space(y), tiles[:5])
    assert part @ part.adjoint() @ part == part
    assert part != Movement.of_blocks(Space(x), Space(y), tiles[1:])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("unit", [2, 2**58, 2**60, 2**61 - 1])
def test_long_regions_do_not_overflow(unit: int) -> None:
    """Regions, and groups of boxes that are summed, are told apart by multiples of their length."""
    X = TensorSpace((3 * unit,), Partition((3,)), axes=(COPIES,))
    total, shift = linop.all_reduce(X), linop.shift(X, 1)
    assert (total @ total).equals(3 * total)
    assert (shift @ shift.H).equals(linop.identity(X))
    assert not (shift @ shift.H).equals(0 * linop.identity(X))
    pairs = [(r, q) for r in X.regions for q in X.regions]

    def of(*parts: tuple[int, int, int]) -> Movement:
        at = [(slice(a * unit, b * unit), c) for a, b, c in parts]
        return Movement.of_blocks(X, X, [(r[one], q[one], c) for r, q in pairs for one, c in at])

    assert of((0, 2, 1), (1, 3, 1)) == of((0, 1, 1), (1, 2, 2), (2, 3, 1))
    assert of((0, 2, 1), (1, 3, -1)) == of((0, 1, 1), (2, 3, -1))
    assert of((0, 2, 1), (1, 3, 1)) != of((0, 3, 1))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("unit", [1, 2**58, 2**60])
def test_cells_of_regions_long_in_two_dimensions_do_not_overflow(unit: int) -> None:
    a = Region("a", (9, 4 * unit, 2 * unit), (1, 3))
    b = Region("b", (9, 4 * unit, 4 * unit), (0, 1, 2))
    space = Space([a, b, Region("c", (6, 4 * unit, 4 * unit))])
    source, target = b[:, 2 * unit : 3 * unit, unit : 3 * unit], a[:, 2 * unit : 3 * unit]
    move = linop.move(space, source, target)
    assert (move + move).equals(2 * move)
    assert not (move + move).equals(move)


wide = st.sampled_from([0, 1, 2**31, 2**62, 2**63 - 1]) | st.integers(-(2**63), 2**63 - 1)


@given(st.integers(1, 3).flatmap(lambda n: st.lists(st.tuples(*[wide] * n), min_size=1)))
def test_keys_of_rows_sort_as_rows_do(rows: list[tuple[int, ...]]) -> None:
    keys = row_keys(*np.array(rows, np.int64).T).tolist()
    ranks = {row: keys[k] for k, row in enumerate(rows)}
    assert keys == [ranks[row] for row in rows]
    assert sorted(ranks, key=ranks.__getitem__) == sorted(set(rows))
    assert len(set(keys)) == len(ranks)


def test_transfers_print() -> None:
    x, y = Region("x", (6, 4)), Region("y", (6, 4), 1)
    two = Movement.of_blocks(Space(x), Space(y), [(y[:2], x[2:4], -2), (y[4:], x[4:], 1)])
    assert [str(t) for t in two] == [
        "y[0:2, 0:4] += -2 · x[2:4, 0:4]",
        "y[4:6, 0:4] += x[4:6, 0:4]",
    ]
    assert repr(two) == ("Movement(y[0:2, 0:4] += -2 · x[2:4, 0:4]; y[4:6, 0:4] += x[4:6, 0:4])")
