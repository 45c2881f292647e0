"""Adjoints for inner products of spaces: random operators of the catalogue with random weights on
either end, exactly where these are powers of two; and operators' inner products."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import linop
from linop import LinearOperator
from linop.errors import SpaceError, UndecidableError
from linop.operators.expressions import Composition, Identity
from linop.operators.riesz import Riesz
from linop.testing.code import code
from linop.testing.describing import seeds
from support.contracts import weighted_spaces as contracts
from support.operators.catalogue import FACTORIES, NAMES, build, describe
from support.operators.properties import rounding, stays_exact
from support.requirements import needs_mpi
from support.workers import on_ranks, on_threads

names = st.sampled_from(NAMES)


def drawn(data: st.DataObject, name: str, workers: int = 4) -> tuple[LinearOperator, float]:
    """An operator of the catalogue with weights, and its rounding."""
    plain = build(name, data.draw(describe(name, workers), label=name))
    assume(plain.dtype.name in contracts.FLOATS and stays_exact(plain))
    op = contracts.weighted(plain, data.draw(seeds))
    return op, 0.0 if FACTORIES[name].exact else 64 * rounding(op)


@settings(max_examples=60)
@given(data=st.data(), name=names, seed=seeds)
def test_adjoint_of_the_catalogue(data: st.DataObject, name: str, seed: int) -> None:
    op, tolerance = drawn(data, name)
    x, y = op.domain.integers(seed), op.codomain.integers(seed + 1)
    left, right = op(x).inner(y), x.inner(op.H(y))
    size = max(1.0, op(x).norm() * y.norm(), x.norm() * op.H(y).norm())
    assert abs(left - right) <= tolerance * size, (left, right)
    assert op.H.H is op
    assert (op.H.domain, op.H.codomain) == (op.codomain, op.domain)
    A = op.to_matrix("regions").toarray()
    np.testing.assert_array_equal(op.T.to_matrix("regions").toarray(), A.T)
    found, wanted = op.H.to_matrix("regions").toarray(), contracts.adjoint_of_matrix(op)
    np.testing.assert_allclose(
        found, wanted, atol=max(tolerance, 1e-12) * max(1, abs(A).max(initial=0))
    )
    simple = op.H.simplify()
    assert (simple.domain, simple.codomain) == (op.codomain, op.domain)
    np.testing.assert_allclose(
        simple.to_matrix("regions").toarray(), wanted, atol=max(tolerance, 1e-12)
    )


@given(data=st.data(), name=names)
def test_products_and_sums(data: st.DataObject, name: str) -> None:
    op, _ = drawn(data, name)
    back = op.H
    product, total = op.H @ op, op + op @ (op.H @ op)
    try:
        assert product.H.equals(product)
        assert total.H.equals(op.H + (op.H @ op) @ op.H)
        assert (op @ op.H).H.equals(back.H @ back)
        assert (2 * op).H.equals(2 * op.H)
    except UndecidableError:
        assume(False)


@given(data=st.data(), name=names, seed=seeds)
def test_on_threads(data: st.DataObject, name: str, seed: int) -> None:
    op, tolerance = drawn(data, name)
    on_threads(4, contracts.agrees, op, seed, tolerance)


@needs_mpi
@settings(max_examples=5)
@given(data=st.data(), name=names, seed=seeds, weights=seeds)
def test_on_ranks(data: st.DataObject, name: str, seed: int, weights: int) -> None:
    description = data.draw(describe(name, 2), label=name)
    plain = build(name, description)
    assume(plain.dtype.name in contracts.FLOATS and stays_exact(plain))
    tolerance = 0.0 if FACTORIES[name].exact else 64 * rounding(plain)
    on_ranks(2, contracts.of_the_catalogue, name, description, weights, seed, tolerance)


@pytest.mark.parametrize(
    ("workers", "n", "dtype"), [(1, 4, "float64"), (3, 7, "complex64"), (2, 1, "float32")]
)
def test_mass_matrix_on_threads(workers: int, n: int, dtype: str) -> None:
    on_threads(workers, contracts.mass_on_workers, (n, 3), workers, dtype)


@needs_mpi
@pytest.mark.parametrize("dtype", ["float64", "complex64"])
def test_mass_matrix_on_ranks(dtype: str) -> None:
    on_ranks(2, contracts.mass_on_workers, (7, 3), 2, dtype)


def test_the_contract_notices_a_wrong_adjoint() -> None:
    X = linop.TensorSpace((4,), linop.Partition((2,)), inner=[1.0, 2, 4, 8])
    op = linop.stencil(X, {0: 1.0, 1: 2.0})
    op._h = op.euclidean_adjoint
    with pytest.raises(AssertionError):
        on_threads(2, contracts.agrees, op, 0)


# Movements between elements of equal weights: nothing is written


@given(st.integers(0, 100))
def test_weights_of_the_global_tensor_follow_movement(seed: int) -> None:
    weights = np.random.default_rng(seed).uniform(0.5, 2, (6, 4))
    X = linop.TensorSpace((6, 4), linop.Partition((2,)), inner=weights)
    plain = X.euclidean
    moves = [
        lambda X: linop.repartition(X, linop.Partition((1, 2))),
        lambda X: linop.shift(X, 1),
        lambda X: linop.all_gather(X, into=linop.REPLICATED),
        lambda X: linop.all_to_all(X, 0, 1),
        linop.gather,
    ]
    for move in moves:
        op = move(X)
        assert isinstance(op.codomain.inner_product, type(X.inner_product))
        assert op.H is op.euclidean_adjoint
        assert op.H.movement() == op.movement().adjoint()
        assert (op.H.domain, op.H.codomain) == (op.codomain, X)
        assert op.H.stages.to_matrix().nnz == move(plain).H.stages.to_matrix().nnz
    copied = linop.halo_exchange(X, widths=1), linop.all_gather(X), linop.pad(X, [(1, 1), (0, 2)])
    for op in (*copied, linop.broadcast(X, linop.Partition((3, 2)))):
        assert op.codomain.inner_product is None
        assert riesz_maps(op.H) == [True]
        assert linop.testing.check_exact(op)
    other = linop.TensorSpace((6, 4), linop.Partition((1, 2)), inner=weights + 1)
    written = linop.repartition(X, other)
    assert written.H is not written.euclidean_adjoint
    assert linop.testing.check_adjoint(written)
    assert not linop.testing.check_adjoint(written, adjoint=written.euclidean_adjoint)


def test_uniform_weights_are_numbers() -> None:
    X = linop.TensorSpace((6,), linop.Partition((2,)), inner=0.25)
    Y = linop.TensorSpace((6,), linop.Partition((2,)), name="y", inner=0.5)
    A = linop.stencil(X, {0: -1.0, 1: 1.0})
    assert A.H is A.euclidean_adjoint
    B = linop.identity(X.euclidean, X) @ linop.repartition(X.euclidean, X.euclidean)
    assert B.H.stages.pure
    assert (2 * linop.repartition(X.euclidean, Y)).H.equals(linop.repartition(Y, X.euclidean))
    assert linop.riesz(X).stages.pure
    assert (linop.riesz(X) @ linop.riesz(X, inverse=True)).equals(linop.identity(X))


def test_euclidean_spaces_are_as_before() -> None:
    X = linop.TensorSpace((6,), linop.Partition((2,)))
    A = linop.stencil(X, {0: -1.0, 1: 1.0})
    assert A.H is A.euclidean_adjoint
    assert X.euclidean is X
    assert isinstance(linop.riesz(X), Identity)
    assert isinstance(linop.riesz(X, inverse=True), Identity)


# Riesz maps are written once, at the ends


def riesz_maps(op: LinearOperator) -> list[bool]:
    parts = op.factors if isinstance(op, Composition) else (op,)
    return [part.inverted for part in parts if isinstance(part, Riesz)]


def test_riesz_maps_are_written_at_the_ends_alone() -> None:
    X = linop.TensorSpace((6,), linop.Partition((2,)), inner=[1.0, 2, 3, 4, 5, 6])
    A = linop.stencil(X, {0: -1.0, 1: 1.0})
    assert riesz_maps(A.H) == [True, False]
    assert riesz_maps((A @ A @ A).H) == [True, False]
    assert riesz_maps((A.H @ A).H) == [True, False]
    assert riesz_maps((A.H @ A.H).simplify()) == [True, False]
    assert linop.identity(X).H.equals(linop.identity(X))
    G, inverse = linop.riesz(X), linop.riesz(X, inverse=True)
    assert G.H.equals(G)
    assert inverse.H.equals(inverse)
    assert (G @ inverse).simplify().equals(linop.identity(X))
    assert str(A.H) == "G_x⁻¹ St* G_x"
    assert A.H._repr_latex_() == "$G_x^{-1} St^{*} G_x$"


def test_identity_between_inner_products() -> None:
    X = linop.Space(linop.Region("x", 2), inner=[1.0, 4.0])
    into = linop.identity(X.euclidean, X)
    v = X.euclidean.vector([1.0, 1.0])
    assert into(v).space == X
    assert into(v).inner(into(v)) == 5
    assert into.H.equals(linop.identity(X, X.euclidean) @ linop.riesz(X))
    with pytest.raises(SpaceError, match=r"identity: the spaces differ\n.*'x' shape"):
        linop.identity(X, linop.Space(linop.Region("x", 3)))


# Direct sums


def test_direct_sums_keep_inner_products() -> None:
    X = linop.Space(linop.Region("x", 2), inner=[1.0, 2.0])
    M = contracts.mass_matrix(3)
    Y = linop.Space(linop.Region("y", 3))
    mass = linop.local_operators.matrix(M, Y, Y)
    Y = Y.with_inner(linop.inner_product(mass, partial(np.linalg.solve, M)))
    A = contracts.local(np.arange(6.0).reshape(3, 2), X, Y)
    B = contracts.local(np.eye(2), X, linop.Space(linop.Region("z", 2), inner=8.0))
    for op in (linop.vstack(A, B), linop.hstack(A.H, B.H), linop.direct_sum(A, B.H)):
        assert linop.testing.check_adjoint(op), op
        np.testing.assert_allclose(op.H.to_matrix("regions").toarray(), wanted_of(op), atol=1e-12)
    both = linop.vstack(B, B @ linop.riesz(X)) if False else linop.vstack(A, B)
    assert both.codomain.scatter([1.0, 1, 1], [1.0, 0]).norm() == pytest.approx(
        (M.sum() + 8) ** 0.5
    )
    assert both.codomain.euclidean.inner_product is None
    assert pickle.loads(pickle.dumps(both)).codomain == both.codomain


def wanted_of(op: LinearOperator) -> np.ndarray:
    def gram(space: linop.Space) -> np.ndarray:
        return linop.riesz(space).to_matrix("regions").toarray()

    A = op.to_matrix("regions").toarray()
    found: np.ndarray = np.linalg.solve(gram(op.domain), A.T @ gram(op.codomain))
    return found


def test_blocks_on_weighted_tensors() -> None:
    """Local operators of Euclidean blocks, as an operator between weighted tensors."""
    X = linop.TensorSpace((4, 3), linop.Partition((2,)), inner=np.arange(1.0, 13).reshape(4, 3))
    blocks = [
        linop.local_operators.diagonal(np.full(r.shape, 3.0), linop.Space(r)) for r in X.regions
    ]
    op = linop.direct_sum(*blocks, domain=X, codomain=X)
    assert (op.domain, op.codomain) == (X, X)
    assert linop.testing.check_self_adjoint(op)


# Copies, pickles, text


def test_pickles_and_prints_as_code() -> None:
    X = linop.Space(linop.Region("x", 3), inner=[1.0, 2.0, 4.0])
    A = linop.local_operators.matrix(np.arange(9.0).reshape(3, 3), X, X)
    names = {"linop": linop, "numpy": np}
    for op in (A, A.H, A.T, (A @ A).H, linop.riesz(X), linop.riesz(X, inverse=True)):
        for other in (pickle.loads(pickle.dumps(op)), eval(code(op), names)):
            assert (other.domain, other.codomain) == (op.domain, op.codomain)
            assert other.equals(op)
    assert copy.deepcopy(A.H) is A.H
    G = linop.local_operators.matrix(contracts.mass_matrix(3), X.euclidean, X.euclidean)
    inverse = linop.local_operators.matrix(
        np.linalg.inv(contracts.mass_matrix(3)), X.euclidean, X.euclidean
    )
    Y = X.with_inner(linop.inner_product(G, inverse))
    assert pickle.loads(pickle.dumps(Y)) == Y
    assert hash(pickle.loads(pickle.dumps(Y))) == hash(Y)
    assert eval(code(linop.riesz(Y)), names).domain == Y


# SciPy's protocol and autograd are Euclidean


def test_flat_arrays_are_euclidean() -> None:
    X = linop.TensorSpace((4,), linop.Partition((2,)), inner=[1.0, 2, 3, 4])
    A = linop.stencil(X, {0: -1.0, 1: 1.0})
    M, y = A.to_matrix().toarray(), np.arange(4.0)
    np.testing.assert_array_equal(A.rmatvec(y), M.T @ y)
    np.testing.assert_array_equal(A.to_scipy().H @ y, M.T @ y)
    np.testing.assert_array_equal(A.to_scipy().T @ y, M.T @ y)
    np.testing.assert_allclose(A.H @ y, A.H.to_matrix() @ y)
    np.testing.assert_array_equal(A[1], M[1])
    assert A.cond() == pytest.approx(np.linalg.cond(M))
    np.testing.assert_array_equal(
        linop.interop.scipy(A.compile(linop.backends.get("reference"))).rmatvec(y), M.T @ y
    )


def test_gradients_of_torch_are_euclidean() -> None:
    torch = pytest.importorskip("torch")
    X = linop.Space(linop.Region("x", 3), inner=[1.0, 2.0, 4.0])
    M = np.arange(9.0).reshape(3, 3)
    A = linop.local_operators.matrix(M, X, X)
    backend = linop.backends.get("reference")
    for op in (A, A.compile(backend)):
        x = torch.ones(3, dtype=torch.float64, requires_grad=True)
        given = {} if op is not A else {"backend": backend}
        y = linop.autograd.apply(op, x, **given)
        y.backward(torch.tensor([1.0, 0, 2], dtype=torch.float64))
        np.testing.assert_array_equal(x.grad.numpy(), M.T @ [1, 0, 2])


# Errors


def test_errors_of_operators() -> None:
    X = linop.Space(linop.Region("x", 3))
    A = linop.local_operators.matrix(np.eye(3), X, X)
    Y = X.with_inner(linop.inner_product(A))
    B = linop.local_operators.matrix(np.eye(3), Y, Y)
    assert Y.vector([1.0, 2, 2]).norm() == 3
    with pytest.raises(SpaceError, match="whose inverse is not known, and adjoints need it"):
        B.H  # noqa: B018
    with pytest.raises(SpaceError, match=r"left domain, right codomain: .*\n  inner"):
        A @ B
    with pytest.raises(SpaceError, match=r"linop.identity\(X, Y\) maps one to the other"):
        A + B
    with pytest.raises(SpaceError, match="domain and codomain of G"):
        linop.inner_product(linop.local_operators.matrix(np.ones((2, 3))))
    with pytest.raises(SpaceError, match="space of G, which has to be Euclidean"):
        linop.inner_product(B)
    with pytest.raises(SpaceError, match="spaces of G and of its inverse"):
        linop.inner_product(A, linop.local_operators.matrix(np.eye(2)))
    with pytest.raises(linop.errors.ArgumentError, match="an inverse or bounds of the spectrum"):
        linop.inner_product(A, A, spectrum=(1, 2))
    with pytest.raises(linop.errors.ArgumentError, match="0 < least <= largest"):
        linop.inner_product(A, spectrum=(2, 1))
    with pytest.raises(linop.errors.ArgumentError, match="a function that solves; given 3"):
        linop.inner_product(A, 3)
    with pytest.raises(linop.errors.ArgumentError, match=r"give linop.inner_product\(G, inverse\)"):
        X.with_inner(A)
    with pytest.raises(SpaceError, match="which is of other regions"):
        linop.Space(linop.Region("y", 3), inner=linop.inner_product(A))


def test_plans_of_time_loops_have_weighted_adjoints() -> None:
    X = linop.TensorSpace((4,), linop.Partition((2,)), inner=np.arange(1.0, 5))
    step = linop.stencil(X, {0: 0.5, 1: 0.2})
    loops = linop.timeloop(step, 3), linop.repeat(linop.repeat(step, 2), 2) @ linop.repeat(step, 1)

    def main(backend: linop.backends.Backend) -> None:
        for op in loops:
            plan, y = op.compile(backend), X.integers(1)
            found, wanted = plan.H(backend.vector(X, y.arrays)), op.H(y)
            assert plan.H.H is plan
            for name, array in found.arrays.items():
                np.testing.assert_allclose(array, wanted[name], rtol=1e-12)
            solved = linop.solvers.lsqr(plan, backend.vector(X, y.arrays))
            assert solved.success

    linop.launch(main, 2)


def test_weights_that_differ_on_workers_are_told() -> None:
    def main(backend: linop.backends.Backend) -> None:
        assert backend.worker is not None
        X = linop.TensorSpace((4,), linop.Partition((2,)), inner=1.5 + backend.worker)
        linop.stencil(X, {0: 1.0, 1: 2.0}).H.compile(backend)

    with pytest.raises(linop.errors.BackendError, match="workers built different operators"):
        linop.launch(main, 2)


def test_sums_simplify_in_their_spaces() -> None:
    X = linop.TensorSpace((4,), linop.Partition((2,)), inner=3.0)
    S, one = linop.stencil(X, {0: 1, 1: 2}), linop.identity(X)
    for op in (one - 2 * (one @ S.euclidean_adjoint), one @ one - one @ S.H, S - 2 * (one @ S.H)):
        assert op.simplify().equals(op)


def test_weights_of_one_are_euclidean() -> None:
    X = linop.TensorSpace((4,), linop.Partition((2,)))
    for inner in (1.0, np.ones(4), 1):
        Y = X.with_inner(inner)
        assert Y == X and hash(Y) == hash(X) and Y.inner_product is None
