"""Local operators among others: products, sums and direct sums with movement; equality; SciPy.

Whole numbers, compared with ``==``; solvers to a tolerance of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pylops
import pytest
import scipy.sparse
import scipy.sparse.linalg
from hypothesis import given
from hypothesis import strategies as st

import linop
from linop import LinearOperator, Region, Space
from linop.errors import UndecidableError
from linop.testing import check_adjoint, check_exact
from linop.testing.describing import COMPUTED, dtype_of, seeds, whole_numbers
from support.operators.properties import (
    backend_agrees,
    conjugates,
    interpretation,
    same_arrays,
    same_matrices,
    two_roads,
)

# Every example is interpreted, multiplied out, and run on threads, four times each.

# Products, sums and direct sums of chains: a matrix, a move to another worker, another matrix

Blocks = dict[tuple[str, str], np.ndarray]
"""Blocks of a matrix, by region of the codomain and of the domain."""


def chain(a: Region, b: Region, dtype: Any, seed: int) -> tuple[LinearOperator, np.ndarray]:
    """local ∘ movement ∘ local from a region to one on another worker, and its matrix."""
    p, q = (Region(f"via {a}{b}", 2, worker) for worker in (a.workers, b.workers))
    A, B = whole_numbers((2, a.size), dtype, seed), whole_numbers((b.size, 2), dtype, seed + 1)
    x, here, there, y = (Space(r, dtype) for r in (a, p, Region("to", 2, q.workers), b))
    across = linop.move(here, p, there.regions[0])
    op = (
        linop.local_operators.matrix(B, there, y)
        @ across
        @ linop.local_operators.matrix(A, x, here)
    )
    return op, B @ A


@st.composite
def ends(draw: st.DrawFn, prefix: str) -> list[Region]:
    """Two regions, each on one worker or on two."""
    workers = st.sampled_from([(0,), (1,), (2,), (0, 1), (1, 2)])
    sizes = draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
    return [Region(f"{prefix}{k}", n, draw(workers)) for k, n in enumerate(sizes)]


@st.composite
def terms(
    draw: st.DrawFn, sources: list[Region], targets: list[Region], dtype: Any
) -> tuple[LinearOperator, Blocks]:
    """A direct sum of two chains: straight or crossed, in either order; at times a multiple."""
    pairs = list(zip(sources, draw(st.permutations(targets)), strict=True))
    ops, blocks = [], {}
    for a, b in draw(st.permutations(pairs)):
        op, matrix = chain(a, b, dtype, draw(seeds))
        ops.append(op)
        blocks[b.name, a.name] = matrix
    scalar = draw(st.sampled_from([1, 2, -1, *([1j] if dtype.kind == "c" else [])]))
    total = linop.direct_sum(*ops)
    scaled = {key: (scalar * m).astype(dtype) for key, m in blocks.items()}
    return (total if scalar == 1 else scalar * total), scaled


def laid_out(op: LinearOperator, *summands: Blocks) -> np.ndarray:
    """The matrix over the spaces of an operator of blocks by name."""
    matrix = np.zeros(op.shape, np.complex128 if op.dtype.kind == "c" else np.float64)
    rows, columns = op.codomain.offsets, op.domain.offsets
    for blocks in summands:
        for (b, a), block in blocks.items():
            i, j = rows[b], columns[a]
            matrix[i : i + block.shape[0], j : j + block.shape[1]] += block
    return matrix


def three_ways(op: LinearOperator, wanted: np.ndarray) -> None:
    """Interpreted, on threads, and as a matrix; forward and back."""
    same_matrices(op.to_matrix(), scipy.sparse.csr_array(wanted))
    two_roads(op)
    interpretation(op)
    backend_agrees(op)
    conjugates(op)
    assert check_exact(op)
    assert check_adjoint(op)


@given(st.sampled_from(COMPUTED), ends("a"), ends("b"), st.integers(1, 3), st.data())
def test_sums_of_chains(
    name: str, sources: list[Region], targets: list[Region], count: int, data: st.DataObject
) -> None:
    """Over spaces whose regions stand in another order in every term."""
    drawn = [data.draw(terms(sources, targets, dtype_of(name))) for _ in range(count)]
    total = drawn[0][0]
    for op, _ in drawn[1:]:
        total = total + op
    three_ways(total, laid_out(total, *(blocks for _, blocks in drawn)))


@pytest.mark.slow
@given(st.sampled_from(COMPUTED), ends("a"), ends("b"), ends("c"), st.data())
def test_products_of_sums_of_chains(
    name: str, x: list[Region], y: list[Region], z: list[Region], data: st.DataObject
) -> None:
    dtype = dtype_of(name)
    right, left = (
        [data.draw(terms(*sides, dtype)) for _ in range(2)] for sides in ((x, y), (y, z))
    )
    first, second = (ops[0][0] + ops[1][0] for ops in (right, left))
    op = second @ first
    order = linop.Movement.between(first.codomain, second.domain).to_matrix().toarray()
    inner = laid_out(first, *(blocks for _, blocks in right))
    three_ways(op, laid_out(second, *(blocks for _, blocks in left)) @ order @ inner)


@given(st.sampled_from(COMPUTED), st.data())
def test_direct_sums_of_sums_of_chains(name: str, data: st.DataObject) -> None:
    """Of different depth: with a movement alone, and with two sums after one another."""
    dtype = dtype_of(name)
    sides = [data.draw(ends(prefix)) for prefix in "abcde"]
    deep = [data.draw(terms(sides[k], sides[k + 1], dtype)) for k in range(2)]
    flat = [data.draw(terms(sides[3], sides[4], dtype)) for _ in range(2)]
    moved = Space(Region("m", 2), dtype)
    move = linop.move(moved, moved["m"], Region("n", 2, 3))
    op = linop.direct_sum(deep[1][0] @ deep[0][0], move, flat[0][0] + flat[1][0])
    blocks: Blocks = {("n", "m"): np.eye(2)}
    for (c, b), outer in deep[1][1].items():
        blocks |= {(c, a): outer @ inner for (b2, a), inner in deep[0][1].items() if b2 == b}
    three_ways(op, laid_out(op, blocks, *(f[1] for f in flat)))


# equals()

X, Y = Space(Region("x", 3)), Space(Region("y", 2))


def unknown(name: str, factor: int = 2) -> LinearOperator:
    """A multiple of the identity that linop does not know for one."""
    return linop.local(X, X, lambda v: factor * v, lambda v: factor * v, name=name)


@given(seeds, seeds, st.sampled_from(COMPUTED))
def test_equality_is_decided_where_matrices_are_known(one: int, two: int, name: str) -> None:
    dtype = dtype_of(name)
    x, y, z = (Space(Region(n, 3, 1), dtype) for n in "xyz")
    A, B, C = (whole_numbers((3, 3), dtype, seed) for seed in (one, two, one + two))
    product = linop.local_operators.matrix(B, y, z) @ linop.local_operators.matrix(A, x, y)
    assert product.equals(linop.local_operators.matrix(B @ A, x, z))
    assert product.H.equals(linop.local_operators.matrix((B @ A).conj().T, z, x))
    assert product.T.equals(linop.local_operators.matrix((B @ A).T, z, x))
    assert product.conj().equals(linop.local_operators.matrix((B @ A).conj(), x, z))
    assert product.equals(linop.local_operators.matrix(C, x, z)) is bool((C == B @ A).all())
    total = linop.local_operators.matrix(A, x, y) + linop.local_operators.matrix(B, x, y)
    assert total.equals(linop.local_operators.matrix(A + B, x, y))
    assert (2 * total).equals(total + total)


def test_kinds_of_operators_are_compared_by_their_matrices() -> None:
    x = X["x"]
    assert linop.local_operators.diagonal([1.0, 2, 3], X).equals(
        linop.local_operators.matrix(np.diag([1.0, 2, 3]), X, X)
    )
    assert linop.local_operators.matrix(np.eye(3), X, X).equals(linop.identity(X))
    assert linop.identity(X).equals(linop.local_operators.matrix(np.eye(3), X, X))
    assert linop.local_operators.matrix(np.zeros((2, 3)), X, Y).equals(linop.zero(X, Y))
    assert linop.local_operators.restriction(X, x[1:], Y).equals(
        linop.local_operators.restriction(X, [1, -1], Y)
    )
    assert linop.local_operators.convolution([1.0, -1], X, Y).equals(
        linop.local_operators.matrix([[1, -1, 0], [0, 1, -1.0]], X, Y)
    )
    assert linop.local_operators.convolution([0.0, 1], X, Y).equals(
        linop.local_operators.restriction(X, [1, 2], Y)
    )
    assert not linop.local_operators.restriction(X, [0, 1], Y).equals(
        linop.local_operators.restriction(X, [1, 2], Y)
    )
    around = linop.local_operators.diagonal([1.0, 2, 3], X) @ linop.clear(X, x[:2])
    assert around.equals(linop.local_operators.diagonal([0.0, 0, 3], X))


def test_equality_where_regions_stand_in_another_order() -> None:
    a, b = Region("a", 2), Region("b", 3)
    A, B = whole_numbers((2, 2), float, 0), whole_numbers((3, 3), float, 1)
    ops = (
        linop.local_operators.matrix(A, Space(a), Space(a)),
        linop.local_operators.matrix(B, Space(b), Space(b)),
    )
    one, other = linop.direct_sum(*ops), linop.direct_sum(*ops[::-1])
    assert one.equals(other)
    assert not one.equals(2 * other)
    both = Space([b, a])
    assert linop.local_operators.matrix(other.to_matrix(), both, both).equals(one)


L, M = unknown("L"), unknown("M", 3)
SAME: dict[str, Callable[[], tuple[LinearOperator, LinearOperator]]] = {
    "itself": lambda: (L, L),
    "composed": lambda: (L @ M, L @ M),
    "summed": lambda: (L + M, L + M),
    "a multiple": lambda: (2 * L, L * 2),
    "twice adjoint": lambda: ((L @ M).H.H, L @ M),
    "the adjoint of a product": lambda: ((L @ M).H, M.H @ L.H),
    "the adjoint of a sum": lambda: ((L + 2 * M).H, L.H + 2 * M.H),
    "around the identity": lambda: (L @ linop.identity(X), L),
    "around movement": lambda: (
        L @ linop.clear(X, X["x"]) @ linop.clear(X, X["x"]) @ M,
        L @ linop.clear(X, X["x"]) @ M,
    ),
    "beside others": lambda: (
        linop.direct_sum(L, linop.identity(Y)), linop.direct_sum(L, linop.identity(Y))),
}  # fmt: skip


@pytest.mark.parametrize("how", SAME)
def test_the_same_structure_is_a_proof(how: str) -> None:
    one, other = SAME[how]()
    assert one.equals(other)
    assert other.equals(one)


UNDECIDED: dict[str, tuple[Callable[[], tuple[LinearOperator, LinearOperator]], str]] = {
    "two functions": (lambda: (L, M), "the matrix of L, M is not known"),
    "the other order": (lambda: (L + M, M + L), "the matrix of L, M is not known"),
    "the adjoint": (lambda: (L, L.H), r"the matrix of L, L\* is not known"),
    "a matrix": (
        lambda: (L, linop.local_operators.matrix(2 * np.eye(3), X, X)),
        "the matrix of L is not known",
    ),
    "movement": (lambda: (L, linop.identity(X)), "the matrix of L is not known"),
}


@pytest.mark.parametrize("case", UNDECIDED)
def test_what_depends_on_functions_is_not_decided(case: str) -> None:
    make, message = UNDECIDED[case]
    one, other = make()
    for left, right in ((one, other), (other, one)):
        with pytest.raises(UndecidableError, match=message):
            left.equals(right)


def test_other_spaces_are_never_equal() -> None:
    assert not L.equals(linop.local_operators.matrix(np.ones((2, 3)), X, Y))


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
def test_rounding_is_not_decided(dtype: str) -> None:
    """(AB)C and A(BC) differ by rounding, in whichever precision."""
    rng = np.random.default_rng(0)
    spaces = [Space(Region(name, 5), dtype) for name in "wxyz"]
    A, B, C = (rng.standard_normal((5, 5)).astype(dtype) for _ in range(3))
    maps = [
        linop.local_operators.matrix(m, a, b)
        for m, a, b in zip((C, B, A), spaces, spaces[1:], strict=False)
    ]
    once = linop.local_operators.matrix(A @ (B @ C), spaces[0], spaces[3])
    again = linop.local_operators.matrix((A @ B) @ C, spaces[0], spaces[3])
    assert ((A @ B) @ C != A @ (B @ C)).any()
    for one, other in ((once, again), (again @ linop.identity(spaces[0]), once)):
        with pytest.raises(UndecidableError, match="may be rounding"):
            one.equals(other)
    assert not (maps[2] @ maps[1] @ maps[0]).equals(2 * once)


def test_a_transform_and_back_is_the_identity_to_rounding() -> None:
    F = linop.local_operators.fft(Space(Region("x", 7), complex))
    with pytest.raises(UndecidableError, match="may be rounding"):
        (F.H @ F).equals(linop.identity(F.domain))
    assert not F.equals(linop.local_operators.fft(F.domain, F.codomain).conj())


# SciPy and PyLops


@given(st.sampled_from(COMPUTED), ends("a"), ends("b"), st.data())
def test_to_scipy(
    name: str, sources: list[Region], targets: list[Region], data: st.DataObject
) -> None:
    """Vectors, adjoint vectors and several columns; of the operator and of what is made of it."""
    dtype = dtype_of(name)
    one, other = (data.draw(terms(sources, targets, dtype))[0] for _ in range(2))
    for op in (one, one + other, one.H @ other, (one - other).H, one.conj(), one.T):
        A, S = op.to_matrix().toarray(), op.to_scipy()
        assert isinstance(S, scipy.sparse.linalg.LinearOperator)
        assert (S.shape, S.dtype) == (op.shape, op.dtype)
        x, y = (whole_numbers((n, 2), dtype, 5) for n in op.shape[::-1])
        same_arrays(S.matvec(x[:, 0]), A @ x[:, 0])
        same_arrays(S.rmatvec(y[:, 0]), A.conj().T @ y[:, 0])
        same_arrays(S.matmat(x), A @ x)
        same_arrays(S.H.matmat(y), A.conj().T @ y)
        same_arrays(S.T @ y[:, 0], A.T @ y[:, 0])
        same_arrays((S.H @ S).matvec(x[:, 0]), A.conj().T @ (A @ x[:, 0]))


def system(dtype: Any) -> tuple[LinearOperator, np.ndarray]:
    """A well-conditioned operator with movement between local maps, and its matrix."""
    x, y = Region("x", 4), Region("y", 4, 1)
    A = whole_numbers((4, 4), dtype, 3) + 9 * np.eye(4, dtype=dtype)
    there = linop.move(Space(x, dtype), x, y)
    op = linop.local_operators.diagonal(np.array([1, 2, -1, 2], dtype), there.codomain) @ there
    op = op @ linop.local_operators.matrix(A, op.domain, op.domain)
    return op, np.diag(np.array([1, 2, -1, 2], dtype)) @ A


@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
@pytest.mark.parametrize("solver", ["lsqr", "gmres", "cg", "pylops"])
def test_solvers_take_it(solver: str, dtype: Any) -> None:
    op, A = system(dtype)
    wanted = whole_numbers((4,), dtype, 4, 9)
    b, S = A @ wanted, op.to_scipy()
    found = {
        "lsqr": lambda: scipy.sparse.linalg.lsqr(S, b, atol=1e-14, btol=1e-14)[0],
        "gmres": lambda: scipy.sparse.linalg.gmres(S, b, rtol=1e-14)[0],
        "cg": lambda: scipy.sparse.linalg.cg((op.H @ op).to_scipy(), S.rmatvec(b), rtol=1e-14)[0],
        "pylops": lambda: pylops.cgls(pylops.aslinearoperator(S), b, niter=20, tol=1e-16)[0],
    }[solver]()
    assert np.abs(found - wanted).max() < 1e-9  # condition 4, values to 9, four unknowns


def test_back_from_scipy_it_is_the_same_matrix() -> None:
    op, A = system(np.complex128)
    three_ways(linop.local_operators.from_scipy(op.to_scipy()), A)
    three_ways(linop.local_operators.from_scipy(2 * pylops.aslinearoperator(op.to_scipy())), 2 * A)


def test_a_wrong_block_is_noticed() -> None:
    a = Region("a", 2)
    op, matrix = chain(a, Region("b", 2, 1), np.dtype(float), 0)
    three_ways(op, laid_out(op, {("b", "a"): matrix}))
    with pytest.raises(AssertionError):
        three_ways(op, laid_out(op, {("b", "a"): matrix + np.eye(2)}))
