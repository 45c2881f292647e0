"""SciPy's protocol on operators: flat and shaped arrays, matrices, SciPy's functions.

The oracle is NumPy on global arrays: a tensor space's flat vector is the raveled global tensor.
"""

from __future__ import annotations

import itertools
import operator
import warnings
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import scipy.sparse.linalg as sl
from hypothesis import given
from hypothesis import strategies as st

import linop
from linop import COPIES, REPLICATED, LinearOperator, Partition, Region, Space, TensorSpace
from linop.errors import ArgumentError, DTypeError, LinopError, ShapeError

SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=3)


@st.composite
def tensor_spaces(draw: st.DrawFn, copies: bool = False, dtype: Any = np.float64) -> TensorSpace:
    """Tensors of up to three dimensions, cut in an order of their own over workers in any order."""
    shape = draw(SIZES)
    cut = draw(st.permutations(range(len(shape))))[: draw(st.integers(0, len(shape)))]
    axes = [*cut, REPLICATED] + ([COPIES] if copies else [])
    axes = draw(st.permutations(axes))
    grid = draw(st.lists(st.integers(1, 2), min_size=len(axes), max_size=len(axes)))
    workers = draw(st.permutations(range(int(np.prod(grid)))))
    return TensorSpace(shape, Partition(grid, workers), dtype, axes=axes)


def numbers(shape: Any, seed: int = 0, dtype: Any = np.float64) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.asarray(rng.integers(-9, 10, shape).astype(dtype))


@given(tensor_spaces(), st.integers(0, 9))
def test_flat_vectors_are_raveled_tensors(X: TensorSpace, seed: int) -> None:
    array = numbers(X.global_shape, seed)
    vector = X.scatter(array)
    assert X.flatten(vector).tolist() == array.ravel().tolist()
    assert X.unflatten(array.ravel()).equals(vector)
    assert X.unflatten(array).equals(vector)
    by_region = np.concatenate([vector[r.name].ravel() for r in X.regions])
    assert X.flatten(vector, "regions").tolist() == by_region.tolist()
    assert X.unflatten(by_region, order="regions").equals(vector)


@given(tensor_spaces(copies=True), st.integers(0, 9))
def test_copies_are_tensors_one_after_another(X: TensorSpace, seed: int) -> None:
    axis = X.axes.index(COPIES)
    copies = numbers((X.partition.shape[axis], *X.global_shape), seed)
    arrays = {}
    for region in X.regions:
        worker = region.workers[0]
        copy = copies[X.partition.coordinates(worker)[axis]]
        arrays[region.name] = copy[(*X.slices(worker), ...)].copy()
    assert X.flatten(X.vector(arrays)).tolist() == copies.ravel().tolist()
    assert X.unflatten(copies.ravel()).equals(X.vector(arrays))


def test_gaps_are_left_out_and_blocks_that_overlap_stay_apart() -> None:
    gaps = TensorSpace((9,), Partition((2,)), bounds={0: ((5, 8), (1, 3))})
    array = np.arange(9.0)
    assert gaps.flatten(gaps.scatter(array)).tolist() == [1, 2, 5, 6, 7]
    overlap = TensorSpace((5, 2), Partition((2,)), bounds={0: ((0, 3), (2, 5))})
    grid = np.arange(10.0).reshape(5, 2)
    wanted = [*grid[0:3].ravel(), *grid[2:5].ravel()]
    assert overlap.flatten(overlap.scatter(grid)).tolist() == wanted
    assert overlap.unflatten(wanted).equals(overlap.scatter(grid))


@st.composite
def endomorphisms(draw: st.DrawFn, dtype: Any = np.float64) -> tuple[LinearOperator, np.ndarray]:
    """Weights of the gathered tensor, and a multiple of the identity; and the matrix on raveled
    tensors."""
    X = draw(tensor_spaces(dtype=dtype))
    there = linop.repartition(X, Partition((1,) * max(1, len(X.global_shape)), [0]))
    weights = numbers(X.global_shape, 3, dtype)
    D = linop.local_operators.diagonal(weights, there.codomain)
    c = draw(st.integers(-3, 3))
    op = there.H @ D @ there + c * linop.identity(X)
    return op, np.diag(weights.ravel()) + c * np.eye(weights.size)


@given(endomorphisms(), st.integers(1, 3))
def test_products_with_arrays_of_every_form(pair: Any, columns: int) -> None:
    A, M = pair
    shape, n = A.domain.global_shape, A.shape[1]
    x, X = numbers(n, 1), numbers((n, columns), 2)
    assert (A.todense() == M).all() and (np.asarray(A) == M).all()
    assert (A.to_matrix().toarray() == M).all()
    for given_, wanted in (
        (A @ x, M @ x),
        (A.dot(x), M @ x),
        (A * x, M @ x),
        (A.matvec(x), M @ x),
        (A.rmatvec(x), M.T @ x),
        (A.matvec(x[:, None]), (M @ x)[:, None]),
        (A.matmat(X), M @ X),
        (A.rmatmat(X), M.T @ X),
        (A @ x.reshape(shape), (M @ x).reshape(shape)),
        (A @ x.tolist(), M @ x),
        (A @ x.astype(np.float32), M @ x),
        (A @ x.astype(np.int8), M @ x),
        (A.H @ x, M.T @ x),
        (A.to_scipy().matvec(x), M @ x),
    ):
        assert given_.shape == wanted.shape and given_.dtype == A.dtype
        assert (given_ == wanted).all()
    if shape != (n, columns):
        assert (A @ X == M @ X).all()
    vector = A.domain.scatter(x.reshape(shape))
    assert (A @ vector).equals(A(vector)) and (A * vector).equals(A(vector))
    assert (A * np.array(3)).equals(3 * A) and A.dot(2).equals(2 * A)
    assert A.dot(A).equals(A @ A)


@given(endomorphisms(), st.data())
def test_indices_are_those_of_the_matrix(pair: Any, data: st.DataObject) -> None:
    A, M = pair
    n = len(M)
    one = st.integers(-n, n - 1)
    part = st.one_of(one, st.slices(n), st.lists(one, min_size=1, max_size=3))
    rows, columns = data.draw(part), data.draw(part)
    if isinstance(rows, list) and isinstance(columns, list):
        columns = columns[:1]  # broadcast, as NumPy does
    for index in ((rows, columns), rows, (slice(None), columns)):
        given_, wanted = A[index], M[index]
        assert np.shape(given_) == wanted.shape
        assert (given_ == wanted).all()


def test_an_operator_is_no_sequence() -> None:
    A = linop.identity(Space(Region("x", 3)))
    with pytest.raises(TypeError):
        iter(A)
    with pytest.raises(IndexError):
        A[3]
    with pytest.raises(IndexError):
        A[0, 0, 0]


@given(tensor_spaces(dtype="c16"))
def test_real_and_imaginary_parts(X: TensorSpace) -> None:
    A = (2 + 3j) * linop.identity(X)
    assert (A.real.todense() == 2 * np.eye(X.size)).all()
    assert (A.imag.todense() == 3 * np.eye(X.size)).all()
    assert (A.real + 1j * A.imag).equals(A)
    B = linop.identity(TensorSpace((3,), Partition((2,))))
    assert B.real is B and not B.imag.todense().any()


def test_one_order_where_domain_and_codomain_are_equal() -> None:
    """A shift's codomain has the blocks on other workers: the matrix is that of one basis."""
    X = TensorSpace((4, 6), Partition((2, 2)))
    S = linop.shift(X, 1)
    assert S.domain == S.codomain
    for op in (S, S.H, S + linop.identity(X), linop.shift(X, 1, 1) @ S):
        M = op.todense()
        x = X.random(0)
        assert (X.flatten(op(x)) == M @ X.flatten(x)).all()
        assert (op.H.todense() == M.T).all()
        assert ((op**2).todense() == M @ M).all()


def test_one_order_of_regions_that_are_listed_in_two() -> None:
    a, b = Region("a", (1,), (0,)), Region("b", (2,), (1,))
    parts = [linop.identity(Space([r])) * k for k, r in ((2.0, a), (3.0, b))]
    op = linop.direct_sum(*parts, domain=Space([a, b]), codomain=Space([b, a]))
    assert (op.todense() == np.diag([2.0, 3.0, 3.0])).all()
    assert (op.H.todense() == op.todense()).all()
    assert np.allclose(sl.cg(op, np.ones(3))[0], [1 / 2, 1 / 3, 1 / 3])


def laplacian(grid: tuple[int, int]) -> tuple[LinearOperator, np.ndarray]:
    """A symmetric positive definite operator on a cut grid, and its matrix by Kronecker sums."""
    m, n = 6, 5
    X = TensorSpace((m, n), Partition(grid))
    whole = linop.repartition(X, Partition((1, 1)))
    T = [2 * np.eye(k) - np.eye(k, k=1) - np.eye(k, k=-1) for k in (m, n)]
    M = np.kron(T[0], np.eye(n)) + np.kron(np.eye(m), T[1])
    return whole.H @ linop.local_operators.matrix(M, whole.codomain, whole.codomain) @ whole, M


@pytest.mark.parametrize("grid", [(1, 1), (2, 2), (3, 2)])
def test_scipy_s_functions_take_the_operator(grid: tuple[int, int]) -> None:
    A, M = laplacian(grid)
    b = numbers((6, 5), 4)
    for solver in (sl.cg, sl.gmres, sl.bicgstab, sl.minres):
        x, info = solver(A, b.ravel(), rtol=1e-12)
        assert info == 0
        assert np.allclose(A @ x.reshape(6, 5), b, atol=1e-8)  # the reshaped solution is right
    close = {"atol": 1e-13, "btol": 1e-13}
    for found in (
        sl.lsqr(A, b.ravel(), iter_lim=200, **close),
        sl.lsmr(A, b.ravel(), maxiter=200, **close),
    ):
        assert np.allclose(A @ found[0], b.ravel(), atol=1e-6)
    assert np.allclose(sl.eigsh(A, k=3, return_eigenvectors=False), np.linalg.eigvalsh(M)[-3:])
    assert np.allclose(sl.svds(A, k=1, return_singular_vectors=False), np.linalg.norm(M, 2))
    flat = sl.aslinearoperator(A)
    assert np.allclose(flat.matmat(np.eye(30)), M)
    assert np.allclose(flat.rmatvec(b.ravel()), M @ b.ravel())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = sl.expm_multiply(-0.1 * M, b.ravel())
    assert np.allclose(sl.expm_multiply(-0.1 * A, b.ravel()), wanted)


def test_eigenvalues_condition_and_trace() -> None:
    A, M = laplacian((2, 2))
    values = np.linalg.eigvalsh(M)[::-1]
    assert np.allclose(A.eigs(symmetric=True), values)
    assert np.allclose(A.eigs(4, symmetric=True), values[:4])
    assert np.allclose(A.eigs(4, niter=500, symmetric=True, tol=0), values[:4])
    assert np.allclose(np.sort(A.eigs().real)[::-1], values)
    assert A.cond() == pytest.approx(np.linalg.cond(M))
    assert A.trace() == np.trace(M)
    assert A.trace_est(2000) == pytest.approx(np.trace(M), rel=0.05)
    assert (3 * linop.identity(A.domain)).trace_est(1) == 90  # no entries off the diagonal
    large = linop.local_operators.diagonal(np.linspace(1, 40, 300), Region("x", 300))
    assert large.cond() == pytest.approx(40)
    assert np.allclose(large.eigs(2, symmetric=True)[0], 40)
    assert (0 * linop.identity(A.domain)).cond() == np.inf


def test_sums_with_multiples_of_the_identity_matrix() -> None:
    A, M = laplacian((2, 1))
    for found, wanted in (
        (A - 3 * np.eye(30), M - 3 * np.eye(30)),
        (np.eye(30) + A, M + np.eye(30)),
        (2 * np.eye(30) - A, 2 * np.eye(30) - M),
    ):
        assert isinstance(found, LinearOperator)
        assert (found.todense() == wanted).all()
    with pytest.raises(ArgumentError, match="multiples of the identity"):
        A + np.ones((30, 30))
    with pytest.raises(ShapeError, match=r"\(3, 3\) given, \(30, 30\) expected"):
        A + np.eye(3)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda A: A @ np.ones(7), ShapeError, r"\(30,\)"),
        (lambda A: A @ np.ones((5, 6)), ShapeError, r"\(5, 6\) given, .* or \(6, 5\) expected"),
        (lambda A: A.matvec(np.ones((6, 5))), ShapeError, r"flat array of shape \(30,\)"),
        (lambda A: A.matmat(np.ones(30)), ShapeError, r"\(30, k\)"),
        (lambda A: A @ (1j * np.ones(30)), DTypeError, "complex128"),
        (lambda A: A @ np.full(30, 2**60 + 1), DTypeError, "does not hold"),
        (lambda A: A.to_matrix(order="F"), ArgumentError, "'F'"),
        (lambda A: A.to_scipy("F"), ArgumentError, "'F'"),
        (lambda A: A.trace_est(0), ArgumentError, "given 0"),
        (lambda A: A.domain.flatten(A.domain.zeros(), "F"), ArgumentError, "'F'"),
        (lambda A: A[:, 0, 0], IndexError, "an index or two"),
        (lambda A: linop.halo_exchange(A.domain, 3, padding=1).trace(), ShapeError, "square"),
    ],
)
def test_what_does_not_fit_is_named(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        call(laplacian((2, 2))[0])
    assert error is IndexError or isinstance(caught.value, LinopError)


def test_regions_that_are_no_tensor_follow_one_another() -> None:
    """Forms of spaces of several regions, and of none."""
    space = Space([Region("a", (2, 2)), Region("b", 3)])
    A = 2 * linop.identity(space)
    assert (A @ np.arange(7.0)).tolist() == [0, 2, 4, 6, 8, 10, 12]
    C = linop.zero(space, Space([]))
    assert (C @ np.ones(7)).shape == (0,)
    for n, order in itertools.product((1, 7), ("global", "regions")):
        assert A.to_scipy(order).matmat(np.ones((7, n))).tolist() == np.full((7, n), 2.0).tolist()


def test_flat_vectors_of_direct_sums_are_those_of_the_parts() -> None:
    X, Y = TensorSpace((4, 6), Partition((2, 2)), name="u"), TensorSpace((3, 2), Partition((1, 2)))
    A = linop.direct_sum(2 * linop.identity(X), 3 * linop.identity(Y))
    u, v = numbers((4, 6)), numbers((3, 2), 1)
    flat = np.concatenate([u.ravel(), v.ravel()])
    assert A.domain.flatten(A.domain.scatter(u, v)).tolist() == flat.tolist()
    assert A.domain.unflatten(flat).equals(A.domain.scatter(u, v))
    wanted = np.concatenate([2 * u.ravel(), 3 * v.ravel()])
    assert (A @ flat == wanted).all() and (A.todense() @ flat == wanted).all()


def diagonal(values: np.ndarray) -> LinearOperator:
    return linop.local_operators.diagonal(values, Region("x", len(values)))


def test_singular_operators_have_no_condition_number() -> None:
    for n in (300, 1200):  # from dense matrices, and from ARPACK
        assert diagonal(np.r_[np.zeros(n // 2), np.ones(n // 2)]).cond() == np.inf
        assert diagonal(np.r_[5.0, np.ones(n - 1)]).cond() == pytest.approx(5)
    assert diagonal(np.linspace(0, 1, 300)).cond() == np.inf


def test_ellipses_and_scalars_among_indices() -> None:
    A, M = laplacian((2, 2))
    for index in (..., (...,), (), (..., [0, 3]), ([0, 3], ...), (..., 2), (1, ..., 2), ([1], ...)):
        assert A[index].shape == M[index].shape
        assert (A[index] == M[index]).all()
    assert isinstance(A[3, 4], np.float64)


def test_traces_of_short_integers_do_not_wrap() -> None:
    X = TensorSpace((200,), Partition((2,)), np.int8)
    assert linop.identity(X).trace_est(3) == 200
    with pytest.raises(DTypeError, match="no sign"):
        linop.identity(X.with_dtype("u1")).trace_est(3)


def test_arguments_of_eigenvalues() -> None:
    A, _ = laplacian((2, 1))
    for call, words in (
        (lambda: A.eigs(29, which="SM"), "which: options are ARPACK's"),
        (lambda: A.eigs(sigma=0.0), "sigma"),
        (lambda: A.eigs(-1), "neigs from 1 expected, given -1"),
    ):
        with pytest.raises(ArgumentError, match=words):
            call()
    assert (A * ([1.0] * 30) == A @ np.ones(30)).all()


# Beside SciPy's matrices and operators

MADE = {
    "array": scipy.sparse.csr_array,
    "matrix": scipy.sparse.csr_matrix,
    "operator": sl.aslinearoperator,
}


def squares(X: TensorSpace) -> LinearOperator:
    return linop.halo_exchange(X, 3, padding=1).H @ linop.halo_exchange(X, 3, padding=1)


@pytest.mark.parametrize("kind", MADE)
@given(st.sampled_from([(1,), (2,), (2, 2)]), st.integers(0, 9))
def test_algebra_with_scipy_on_either_side(kind: str, grid: tuple[int, ...], seed: int) -> None:
    X = TensorSpace((4, 3), Partition(grid))
    A, S = squares(X), numbers((12, 12), seed)
    D, M, x = A.todense(), MADE[kind](S), numbers(12, seed + 1)
    for found, wanted in (
        (A + M, D + S),
        (M + A, D + S),
        (A - M, D - S),
        (M - A, S - D),
        (A @ M, D @ S),
        (A * M, D @ S),
        (A.dot(M), D @ S),
        (M @ A, S @ D),
        (S @ A, S @ D),
    ):
        assert found.shape == (12, 12)
        assert (found @ x).tolist() == (wanted @ x).tolist()
        assert found.dot(np.eye(12)).tolist() == wanted.tolist()
    assert isinstance(A + M, sl.LinearOperator)
    assert ((A + M).H @ x).tolist() == ((D + S).T @ x).tolist()
    assert (x @ A).tolist() == (x @ D).tolist()


def test_shapes_have_to_fit_those_of_scipy() -> None:
    A = squares(TensorSpace((4, 3), Partition((2,))))
    for join in (operator.add, operator.sub, operator.matmul):
        with pytest.raises(ValueError, match=r"shape|dimension"):
            join(A, scipy.sparse.eye_array(5))
    for wrong in (object(), "A", None):
        with pytest.raises(TypeError):
            A + wrong


def test_lobpcg_takes_an_operator() -> None:
    X = TensorSpace((8, 8), Partition((2, 2)))
    A = linop.identity(X) + squares(X)
    first = np.random.default_rng(1).standard_normal((64, 3))
    values, vectors = sl.lobpcg(A, first, maxiter=200, tol=1e-6)
    np.testing.assert_allclose(values, np.linalg.eigvalsh(A.todense())[:-4:-1], rtol=1e-6)
    np.testing.assert_allclose(A @ vectors, values * vectors, atol=1e-4)
    assert (A(first) == A.matmat(first)).all()
