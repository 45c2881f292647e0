"""The normal form of data movement, against dense matrices written by brute force.

Tables of random boxes overlap, repeat, cancel, and hold no elements at all. The model knows unit
cells only.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st

import linop
from linop import COPIES, Movement, Partition, Region, Space, Subset, TensorSpace
from linop.normal_form.primitives import Delta
from linop.spaces.region import as_subset
from linop.testing.describing import box_in, boxes, shapes
from support.operators.properties import same_matrices

Blocks = list[Delta]
Cell = tuple[str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...], complex]
"""Target and source regions, where in them, extent, coefficient."""

# The model


def places(space: Space, part: Subset) -> np.ndarray:
    """Indices of the elements of a part in a flat vector."""
    region = part.region
    numbers = np.arange(region.size).reshape(region.shape)[part.index]
    return np.ravel(numbers) + space.offsets[region.name]


def brute(domain: Space, codomain: Space, blocks: Blocks) -> np.ndarray:
    """The matrix of blocks, element by element."""
    matrix = np.zeros((codomain.size, domain.size), np.complex128)
    for target, source, coefficient in blocks:
        for i, j in zip(places(codomain, target), places(domain, source), strict=True):
            matrix[i, j] += coefficient
    return matrix


def reordered(matrix: np.ndarray, into: Movement, of: Movement) -> np.ndarray:
    """A matrix over the spaces of one movement, over those of an equal one in another order."""
    return permutation(into.codomain, of.codomain) @ matrix @ permutation(of.domain, into.domain)


def permutation(into: Space, of: Space) -> np.ndarray:
    """From the flat vectors of a space to those of an equal one."""
    return brute(of, into, [(as_subset(r), as_subset(r), 1) for r in of])


def unit_cells(matrix: np.ndarray, domain: Space, codomain: Space) -> list[Cell]:
    """The non-zero entries of a matrix, by region and coordinates."""

    def find(space: Space, k: int) -> tuple[str, tuple[int, ...]]:
        name = [r.name for r in space if r.size and space.offsets[r.name] <= k][-1]
        return name, tuple(map(int, np.unravel_index(k - space.offsets[name], space[name].shape)))

    cells = []
    for i, j in np.argwhere(matrix):
        (target, at), (source, of) = find(codomain, i), find(domain, j)
        cells.append((target, source, at, of, (1,) * len(at), complex(matrix[i, j])))
    return cells


def canonical_cells(cells: list[Cell]) -> set[Cell]:
    """Unit cells merged as far as they go, along the last dimension first."""
    for axis in reversed(range(max((len(cell[2]) for cell in cells), default=0))):
        lines: dict[Any, list[Cell]] = {}
        for cell in cells:
            target, source, at, of, extent, coefficient = cell
            offset = tuple(a - b for a, b in zip(at, of, strict=True))
            across = [(a, n) for k, (a, n) in enumerate(zip(at, extent, strict=True)) if k != axis]
            lines.setdefault((target, source, offset, *across, coefficient), []).append(cell)
        cells = [joined for line in lines.values() for joined in _runs(line, axis)]
    return set(cells)


def _runs(line: list[Cell], axis: int) -> list[Cell]:
    """Neighbours on a line along an axis, joined."""
    if axis >= len(line[0][2]):
        return line
    done: list[Cell] = []
    for cell in sorted(line, key=lambda cell: cell[2][axis]):
        if done and done[-1][2][axis] + done[-1][4][axis] == cell[2][axis]:
            *rest, extent, coefficient = done.pop()
            longer = (*extent[:axis], extent[axis] + cell[4][axis], *extent[axis + 1 :])
            done.append((*rest, longer, coefficient))  # type: ignore[arg-type]
        else:
            done.append(cell)
    return done


def rows(movement: Movement) -> list[Cell]:
    """The transfers of a movement, in its order."""
    return [
        (t.target.region.name, t.source.region.name, t.target.start, t.source.start,
         t.target.shape, complex(t.coefficient))
        for t in movement
    ]  # fmt: skip


MANY = settings(max_examples=max(100, settings().max_examples))
"""Of ten, none may have a box that moves."""

# What is drawn

REAL: tuple[complex, ...] = (1, -1, 2, 0)
COEFFICIENTS = (*REAL, 1j, -1j, 1 - 2j)


@st.composite
def some_spaces(draw: st.DrawFn, prefix: str, complex_: bool = True) -> Space:
    """A space of up to four regions, each of its own number of dimensions."""
    ranks = [draw(st.integers(0, 3)) for _ in range(draw(st.integers(0, 4)))]
    regions = [
        Region(f"{prefix}{k}", draw(shapes(rank, (0, 5, 3, 2)[rank])), draw(st.integers(0, 3)))
        for k, rank in enumerate(ranks)
    ]
    return Space(regions, np.complex128 if complex_ else np.float64)


@st.composite
def some_blocks(
    draw: st.DrawFn, domain: Space, codomain: Space, coefficients: Sequence[complex] = COEFFICIENTS
) -> Blocks:
    """Blocks between regions of equal rank; some of them twice."""
    fitting = [(b, a) for b in codomain for a in domain if a.ndim == b.ndim]
    blocks: Blocks = []
    for _ in range(draw(st.integers(0, 5)) if fitting else 0):
        b, a = draw(st.sampled_from(fitting))
        target = box_in(b, draw(boxes(b.shape)))
        extent = [min(n, m) for n, m in zip(target.shape, a.shape, strict=True)]
        start = [draw(st.integers(0, m - n)) for n, m in zip(extent, a.shape, strict=True)]
        source = a[tuple(slice(s, s + n) for s, n in zip(start, extent, strict=True))]
        target = b[tuple(slice(s, s + n) for s, n in zip(target.start, extent, strict=True))]
        blocks.append((target, source, draw(st.sampled_from(coefficients))))  # type: ignore[arg-type]
    again = draw(st.lists(st.sampled_from(blocks), max_size=2)) if blocks else []
    return blocks + [(t, s, draw(st.sampled_from([c, -c]))) for t, s, c in again]


@st.composite
def recut(draw: st.DrawFn, blocks: Blocks) -> Blocks:
    """The same sum of blocks: cut in two here and there, in several summands, in any order."""
    pieces: Blocks = []
    for target, source, c in blocks:
        axis = draw(st.integers(0, len(target.shape)))
        if axis < len(target.shape):
            at = draw(st.integers(0, target.shape[axis]))
            pieces += [(*_halves(target, source, axis, at, side), c) for side in (0, 1)]
        else:
            pieces += [(target, source, c - 3), (target, source, 3)]
    return list(draw(st.permutations(pieces)))


def _halves(target: Subset, source: Subset, axis: int, at: int, side: int) -> tuple[Subset, Subset]:
    def half(part: Subset) -> Subset:
        slices = list(part.slices)
        low, high = slices[axis].start, slices[axis].stop
        slices[axis] = slice(low + at, high) if side else slice(low, low + at)
        return part.region[tuple(slices)]

    return half(target), half(source)


@st.composite
def operators(
    draw: st.DrawFn, domain: Space | None = None, codomain: Space | None = None
) -> tuple[Movement, np.ndarray, Blocks]:
    """A movement, its matrix by brute force, and its blocks."""
    domain = draw(some_spaces("x")) if domain is None else domain
    codomain = draw(some_spaces("y")) if codomain is None else codomain
    blocks = draw(some_blocks(domain, codomain))
    return Movement.of_blocks(domain, codomain, blocks), brute(domain, codomain, blocks), blocks


def turned(space: Space) -> Space:
    """An equal space, its regions in the other order."""
    return Space(reversed(space.regions), space.dtype)


def matrix_is(movement: Movement, wanted: np.ndarray) -> None:
    same_matrices(movement.to_matrix(), scipy.sparse.csr_array(wanted))


def same_tables(one: Movement, other: Movement) -> None:
    """The two tables are equal, row by row."""
    assert rows(one) == rows(other)
    assert one.fingerprint == other.fingerprint


# The normal form


@MANY
@given(operators())
def test_the_matrix_is_the_sum_of_the_blocks(drawn: Any) -> None:
    movement, matrix, _ = drawn
    matrix_is(movement, matrix)
    assert len(movement) == len(list(movement))


@given(operators())
def test_the_table_is_canonical(drawn: Any) -> None:
    """Merged as far as it goes: so no two boxes overlap, and no coefficient is zero."""
    movement, matrix, _ = drawn
    given_ = rows(movement)
    wanted = canonical_cells(unit_cells(matrix, movement.domain, movement.codomain))
    assert len(given_) == len(wanted)
    assert set(given_) == wanted
    numbers = movement.codomain.numbering.index, movement.domain.numbering.index
    order = [(numbers[0][b], numbers[1][a], *rest[:2]) for b, a, *rest in given_]
    assert all(one < two for one, two in pairwise(order))


@given(operators(), st.data())
def test_the_table_is_unique(drawn: Any, data: st.DataObject) -> None:
    movement, _, blocks = drawn
    other = Movement.of_blocks(movement.domain, movement.codomain, data.draw(recut(blocks)))
    same_tables(movement, other)
    assert movement == other


@given(operators(), st.data())
def test_equal_exactly_if_the_matrices_are(drawn: Any, data: st.DataObject) -> None:
    one, matrix, blocks = drawn
    kept = data.draw(st.lists(st.sampled_from(blocks), max_size=6)) if blocks else []
    sides = data.draw(st.sampled_from([lambda s: s, turned]))
    other = Movement.of_blocks(sides(one.domain), sides(one.codomain), kept)
    wanted = brute(one.domain, one.codomain, kept)
    assert (one == other) is bool((wanted == matrix).all())
    assert (other == one) is (one == other)
    matrix_is(other, reordered(wanted, other, one))


@given(some_spaces("x"), some_spaces("y"), some_spaces("z"), st.data())
def test_composition(x: Space, y: Space, z: Space, data: st.DataObject) -> None:
    right, of_right, _ = data.draw(operators(x, y))
    left, of_left, _ = data.draw(operators(turned(y), z))
    wanted = of_left @ permutation(left.domain, right.codomain) @ of_right
    matrix_is(left @ right, wanted)
    assert set(rows(left @ right)) == canonical_cells(unit_cells(wanted, x, z))


@given(operators(), st.data(), st.sampled_from(COEFFICIENTS))
def test_sums_and_multiples(drawn: Any, data: st.DataObject, scalar: complex) -> None:
    one, matrix, _ = drawn
    other, more, _ = data.draw(operators(turned(one.domain), turned(one.codomain)))
    more = reordered(more, one, other)
    matrix_is(one + other, matrix + more)
    matrix_is(one - other, matrix - more)
    assert len(one - one) == 0
    matrix_is(one.scale(scalar), scalar * matrix)


@given(operators())
def test_adjoint_and_conjugate(drawn: Any) -> None:
    movement, matrix, _ = drawn
    matrix_is(movement.adjoint(), matrix.conj().T)
    matrix_is(movement.conj(), matrix.conj())
    same_tables(movement.adjoint().adjoint(), movement)
    same_tables(movement.conj().conj(), movement)


@given(operators(), st.data())
def test_direct_sum(drawn: Any, data: st.DataObject) -> None:
    one, first, _ = drawn
    other, second, _ = data.draw(
        operators(data.draw(some_spaces("u")), data.draw(some_spaces("v")))
    )
    spaces = [
        Space([*a, *b], a.dtype)
        for a, b in ((one.domain, other.domain), (one.codomain, other.codomain))
    ]
    blocks = scipy.linalg.block_diag(first, second).reshape(spaces[1].size, spaces[0].size)
    wide = Movement.direct_sum([one, other], *spaces)
    matrix_is(wide, blocks)
    around = Movement.direct_sum([other, one], turned(spaces[0]), turned(spaces[1]))
    assert wide == around
    matrix_is(around, reordered(blocks, around, wide))


@given(some_spaces("x"), some_spaces("x"))
def test_between_is_the_identity_on_what_both_have(x: Space, y: Space) -> None:
    shared = [(as_subset(r), as_subset(r), 1) for r in x if r in y]
    matrix_is(Movement.between(x, y), brute(x, y, shared))  # type: ignore[arg-type]


# Fingerprints


@given(operators(), st.data())
def test_fingerprints(drawn: Any, data: st.DataObject) -> None:
    one, matrix, blocks = drawn
    again = Movement.of_blocks(one.domain, one.codomain, blocks)
    assert again.fingerprint == one.fingerprint
    other, different, _ = data.draw(operators(one.domain, one.codomain))
    assert (one.fingerprint == other.fingerprint) is bool((matrix == different).all())
    assert one.adjoint().fingerprint != one.fingerprint or one.domain == one.codomain


def test_fingerprints_tell_spaces_apart() -> None:
    x = Region("x", 2)
    spaces = [Space(x), Space(x, np.float32), Space(Region("x", 2, 1)), Space(Region("y", 2))]
    digests = {Movement.between(space, space).fingerprint for space in spaces}
    assert len(digests) == len(spaces)


def test_a_real_coefficient_has_one_fingerprint() -> None:
    """1 - 0j is 1."""
    x = Space(Region("x", 2), np.complex128)
    real = Movement.between(x, x)
    same_tables(real.scale(1j).scale(-1j).conj(), real)


def test_dimensions_on_the_way_leave_no_trace() -> None:
    """The table of I through a matrix is that of I."""
    x, wide = Region("x", 2), Region("m", (2, 2))
    space = Space([x])
    op = linop.allocate(space, wide).H @ linop.allocate(space, wide)
    by_product = linop.allocate(space, wide).H.movement() @ linop.allocate(space, wide).movement()
    same_tables(op.movement(), Movement.between(space, space))
    same_tables(by_product, Movement.between(space, space))


# Proofs


@pytest.mark.parametrize("workers", range(1, 17))
def test_ring_all_reduce_is_broadcast_after_sum_reduce(workers: int) -> None:
    for size in {0, 1, workers - 1, workers, 2 * workers + 1}:
        Y = TensorSpace(size, Partition(workers), axes=[COPIES])
        ring = linop.ring_all_reduce(Y)
        reduced = linop.sum_reduce(Y, Partition(1))
        product = linop.broadcast(reduced.codomain, Partition(workers)) @ reduced
        assert ring.equals(product)
        assert ring.movement() == product.movement()
        assert ring.equals(ring.H)
        assert ring.movement() == ring.movement().adjoint()
        if size and workers > 1:
            assert not ring.equals(linop.identity(Y))


def test_a_halo_exchange_after_its_adjoint_is_its_own_transpose() -> None:
    X = TensorSpace((8, 8, 8), Partition((4, 4, 4)))
    H = linop.halo_exchange(X, 3, padding=1)
    for product in (H.H @ H, H @ H.H):
        assert product.equals(product.T)
        assert product.movement() == product.movement().adjoint()
    assert not H.domain == H.codomain


def test_a_wrong_movement_is_noticed() -> None:
    space = Space(Region("x", 3))
    one = Movement.between(space, space)
    with pytest.raises(AssertionError):
        matrix_is(one, 2 * np.eye(3))
    with pytest.raises(AssertionError):
        same_tables(one, one.scale(2))
