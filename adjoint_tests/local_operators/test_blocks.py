"""Operators of blocks in one process, against SciPy's block matrices; names of their regions, and
the tensor spaces that they are of. The catalogue has them, too, for the generic tests."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pylops
import pytest
import scipy.linalg
import scipy.sparse
import scipy.sparse.linalg
from hypothesis import given
from hypothesis import strategies as st

import linop
from linop import Partition, Region, Space, TensorSpace
from linop.errors import ArgumentError, RegionError, ShapeError, SpaceError
from linop.local_operators import diagonal, fft, matrix
from linop.spaces.direct_sums import DirectSumSpace
from linop.spaces.space import Order
from linop.testing import check_adjoint, check_exact
from linop.testing.code import code
from linop.testing.describing import seeds, whole_numbers

DTYPES = st.sampled_from(["float64", "float32", "int64", "complex128"])
GIVEN: dict[str, Any] = {
    "array": lambda A: A,
    "list": lambda A: A.tolist(),
    "sparse": scipy.sparse.csc_array,
    "scipy": scipy.sparse.linalg.aslinearoperator,
    "pylops": lambda A: pylops.MatrixMult(A, dtype=A.dtype),
}


def is_matrix(op: linop.LinearOperator, wanted: np.ndarray, order: Order = "global") -> None:
    assert op.shape == wanted.shape
    assert (op.to_matrix(order).toarray() == wanted).all()
    X, Y = op.domain, op.codomain
    x = X.integers(1)
    assert (Y.flatten(op(x), order) == wanted @ X.flatten(x, order)).all()
    y = Y.integers(2)
    assert (X.flatten(op.H(y), order) == wanted.conj().T @ Y.flatten(y, order)).all()


@st.composite
def grids(draw: st.DrawFn) -> list[list[np.ndarray | None]]:
    """Matrices and None, at least one matrix in each row and column."""
    rows, columns = (draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)) for _ in range(2))
    dtype, seed = draw(DTYPES), draw(seeds)
    grid = [
        [
            whole_numbers((m, n), dtype, seed + 5 * i + j) if draw(st.booleans()) else None
            for j, n in enumerate(columns)
        ]
        for i, m in enumerate(rows)
    ]
    for k in range(max(len(rows), len(columns))):
        i, j = k % len(rows), k % len(columns)
        grid[i][j] = whole_numbers((rows[i], columns[j]), dtype, seed + k)
    return grid


@given(grids(), st.sampled_from(["array", "sparse", "scipy"]))
def test_block_is_scipys(grid: list[list[np.ndarray | None]], kind: str) -> None:
    sparse = [[None if A is None else scipy.sparse.csr_array(A) for A in row] for row in grid]
    wanted = scipy.sparse.block_array(sparse).toarray()
    op = linop.block([[None if A is None else GIVEN[kind](A) for A in row] for row in grid])
    is_matrix(op, wanted)
    is_matrix(op.H, wanted.conj().T)
    if op.shape[0] == op.shape[1] and op.domain == op.codomain:
        is_matrix(op @ op, wanted @ wanted)


@pytest.mark.parametrize("kind", GIVEN)
def test_matrices_of_every_kind_are_blocks(kind: str) -> None:
    A, B = whole_numbers((3, 2), "float64", 1), whole_numbers((3, 2), "float64", 2)
    one, other = GIVEN[kind](A), GIVEN[kind](B)
    is_matrix(linop.block_diag(one, other), scipy.linalg.block_diag(A, B))
    is_matrix(linop.vstack(one, other), np.vstack([A, B]))
    is_matrix(linop.hstack(one, other), np.hstack([A, B]))
    is_matrix(linop.kron(one, other), np.kron(A, B))


def test_matrices_beside_operators_are_between_their_spaces() -> None:
    """A regularised least-squares problem: a matrix below an operator."""
    A, mu = whole_numbers((5, 3), "float32", 1), 2 * np.eye(3)
    model, data = Space(Region("m", 3, 2), "float32"), Space(Region("d", 5, 2), "float32")
    op = linop.vstack(matrix(A, model, data), mu)
    assert op.domain == model
    assert op.codomain.regions == (Region("d", 5, 2), Region("y", 3, 2))
    is_matrix(op, np.vstack([A, mu]).astype("float32"))
    is_matrix(
        linop.hstack(matrix(A, model, data), np.ones((5, 1))), np.hstack([A, np.ones((5, 1))])
    )


def test_names_that_clash_get_numbers() -> None:
    x, x0 = Space(Region("x", 2)), Space(Region("x0", 2, 1))
    op = linop.block_diag(linop.identity(x), linop.identity(x0), linop.identity(x))
    assert [r.name for r in op.domain] == ["x0'", "x0", "x2"]
    both = linop.block_diag(linop.identity(x), linop.identity(Space(Region("y", 1))))
    assert [r.name for r in both.domain] == ["x", "y"]
    with pytest.raises(RegionError, match="duplicate region"):
        linop.vstack(linop.identity(x), linop.identity(x))
    assert linop.block([[linop.identity(x)], [linop.identity(x)]]).shape == (4, 2)
    assert (
        linop.block_diag(np.eye(2), np.eye(3)).domain
        == linop.block_diag(np.ones((2, 2)), np.ones((3, 3))).codomain
    )


def test_operators_on_many_workers_are_blocks() -> None:
    """Tensor spaces are renamed as a whole, and stay tensor spaces."""
    X = TensorSpace((6, 2), Partition((3,)))
    S = linop.shift(X, 1)
    op = linop.block([[S, None], [linop.identity(X), S.H]])
    s, one = S.to_matrix("regions").toarray(), np.eye(12)
    is_matrix(op, np.block([[s, 0 * s], [one, s.T]]), "regions")
    assert isinstance(op.domain, DirectSumSpace)
    assert [(part.name, part.global_shape) for part in op.domain.parts] == [
        ("x0", (6, 2)),
        ("x1", (6, 2)),
    ]
    assert check_adjoint(op, backend="threads")


def test_direct_sums_keep_their_tensor_spaces() -> None:
    X = TensorSpace((5,), Partition((2,)))
    Y = TensorSpace((4, 3), Partition((2,)), name="y")
    z = Space([Region("z", 2), Region("w", 1)])
    op = linop.direct_sum(linop.direct_sum(linop.shift(X, 1), linop.identity(Y)), linop.identity(z))
    for space in (op.domain, op.codomain, op.H.domain, (2 * op).domain, op.simplify().domain):
        assert isinstance(space, DirectSumSpace)
        assert [len(part.regions) for part in space.parts] == [2, 2, 2]
    assert op.domain.parts[:2] == (X, Y)
    x, y, v = np.arange(5.0), np.arange(12.0).reshape(4, 3), z.integers(1)
    given = op.domain.scatter(x, y, v)
    back = op.domain.gather(given)
    assert (back[0] == x).all()
    assert (back[1] == y).all()
    assert back[2].equals(v)
    moved = op.codomain.gather(op(given))
    assert (np.sort(moved[0]) == x).all()
    assert op.domain == Space(op.domain.regions)
    assert op.domain.in_memory("host").parts[0] == X.in_memory("host")
    assert pickle.loads(pickle.dumps(op)).domain.parts[:2] == (X, Y)
    with pytest.raises(ArgumentError, match="3 parts, 1 arrays given"):
        op.domain.scatter(x)
    with pytest.raises(SpaceError, match="needs all 6 regions"):
        op.domain.gather(op.domain.vector({"z": np.zeros(2)}))


def test_kron_of_maps_without_a_matrix_applies_them_line_by_line() -> None:
    """FFTs along both dimensions of an array are one transform."""
    x, y = Space(Region("x", 4), complex), Space(Region("x", (2, 3)), complex)
    F = linop.kron(fft(x), fft(y))
    array = np.random.default_rng(1).standard_normal((4, 2, 3)).astype(complex)
    assert np.allclose(F(array), np.fft.fftn(array, norm="ortho"))
    assert check_adjoint(F)
    cumulate = linop.local(
        Region("x", 3), Region("x", 3), np.cumsum, lambda v: np.cumsum(v[::-1])[::-1]
    )
    K = linop.kron(cumulate, linop.kron(np.eye(2), diagonal(np.arange(3.0))))
    lower = np.tril(np.ones((3, 3)))
    wanted = np.kron(lower, np.kron(np.eye(2), np.diag(np.arange(3.0))))
    is_matrix(K, wanted)
    assert check_exact(K)
    with pytest.raises(linop.errors.UndecidableError):
        K.equals(2 * K)


@given(st.lists(seeds, min_size=1, max_size=4), DTYPES)
def test_sum_adds_operators(drawn: list[int], dtype: str) -> None:
    ops = [matrix(whole_numbers((2, 2), dtype, seed)) for seed in drawn]
    assert (sum(ops).to_matrix() - sum(op.to_matrix() for op in ops)).nnz == 0
    for wrong in (1, None, 0.5):
        with pytest.raises(TypeError):
            wrong + ops[0]


def test_what_is_built_of_blocks_is_pickled_and_printed_as_code() -> None:
    names: dict[str, Any] = {"linop": linop, "numpy": np, "scipy": scipy}
    for op in (
        linop.block_diag(np.eye(2), np.ones((1, 2))),
        linop.block([[np.eye(2), None], [None, np.ones((1, 2))]]).H,
        linop.kron(np.eye(2), np.ones((1, 2))),
        linop.vstack(np.eye(2), np.ones((1, 2))),
    ):
        same = pickle.loads(pickle.dumps(op))
        assert same.domain == op.domain
        assert same.equals(op)
        assert eval(code(op), names).equals(op)


MISTAKES: list[tuple[Any, type[Exception], str]] = [
    (linop.block_diag, ArgumentError, "block_diag: expected at least one block"),
    (lambda: linop.block([[np.eye(2), np.eye(2)], [np.eye(2)]]), ArgumentError, r"given \[2, 1\]"),
    (lambda: linop.block([[np.eye(2), None]]), ArgumentError, "column 1 has no block"),
    (lambda: linop.block([[np.eye(2)], [None]]), ArgumentError, "row 1 has no block"),
    (lambda: linop.block([[np.eye(2)], [np.eye(3)]]), ShapeError, "needs"),
    (lambda: linop.block([]), ArgumentError, "rows of equal length"),
    (lambda: linop.block_diag(np.eye(2), 3), ArgumentError, "operators or matrices, given 3"),
    (lambda: linop.block_diag(np.eye(2), "x"), ArgumentError, "given 'x'"),
    (lambda: linop.kron(fft(Region("x", 2)), np.eye(2)), SpaceError, "one dtype"),
    (
        lambda: linop.kron(linop.identity(Space([Region("x", 2), Region("y", 2)])), np.eye(2)),
        SpaceError,
        "kron: a space of one region",
    ),
    (
        lambda: linop.kron(np.eye(2), linop.identity(Space(Region("x", 2, 1)))),
        SpaceError,
        "on one worker",
    ),
    (
        lambda: linop.block([[linop.identity(Space(Region("x", 2)))], [fft(Region("x", 2))]]),
        SpaceError,
        r"block \(1, 0\), its domain and its column's",
    ),
    (lambda: linop.vstack(np.eye(2), "x"), ArgumentError, "given 'x'"),
]


@pytest.mark.parametrize("case", MISTAKES, ids=range(len(MISTAKES)))
def test_mistakes(case: tuple[Any, type[Exception], str]) -> None:
    build, kind, text = case
    with pytest.raises(kind, match=text):
        build()
