"""Operators that are linear over the real numbers alone, beside NumPy's real and complex arrays:
their algebra, adjoints for real inner products, matrices, plans."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import scipy.sparse.linalg as sl
from hypothesis import given, settings
from hypothesis import strategies as st

import linop
import linop.testing as lt
from linop import LinearOperator, Partition, Region, Space, TensorSpace
from linop.errors import (
    ArgumentError,
    DTypeError,
    LinopError,
    ShapeError,
    SpaceError,
    UndecidableError,
)
from linop.local_operators import diagonal, from_scipy, local, matrix
from linop.spaces.blocks import is_disjoint
from linop.testing.describing import Description, seeds
from linop.testing.factories import describe
from linop.testing.factories.real_linear import real_linear
from support.contracts.real_linear import computes_numpy_s, numpy_s
from support.requirements import needs_mpi
from support.workers import on_ranks, on_threads

steps = describe("real_parts", 4)
X = TensorSpace((4, 3), Partition((2,)), complex)
R, J, C = linop.real(X), linop.imag(X), linop.conj(X)
E = R.H


def same(A: LinearOperator, B: LinearOperator) -> bool:
    return A.equals(B) and B.equals(A)


# The algebra


def test_parts_and_what_they_are_parts_of() -> None:
    one, y = linop.identity(X), linop.identity(R.codomain)
    assert same(E @ R + 1j * (E @ J), one)
    assert same(R @ E, y) and same(J @ E, 0 * y) and same(J @ (1j * E), y)
    assert same(C @ C, one) and same(C, E @ R - 1j * (E @ J))
    assert same(J, R @ (-1j * one)) and same(J.H, 1j * E)
    assert same((R + 1j * J), one)  # a sum with real parts is complex
    assert same(C.H, C) and same(C @ (2j * one), -2j * C)
    assert not C.equals(one) and not one.equals(C)
    for op in (R, J, C, E, 1j * E, R @ C):
        assert not op.clinear and op.H.H is op
    assert one.clinear and (1j * one).clinear


@given(steps, seeds)
def test_compositions_are_numpy_s(description: Description, seed: int) -> None:
    """Applied here, forward and back; and the real matrices are transposes, exactly."""
    op = real_linear(**description)
    x = op.domain.integers(seed)
    result = op(x)
    if is_disjoint(op.domain):
        wanted = numpy_s(description, op.domain.gather(x))
        assert (op.codomain.gather(result) == wanted).all()
    for name, array in x.arrays.items() if not is_disjoint(op.domain) else ():
        assert (result[name] == numpy_s(description, array)).all()  # nothing has moved
    y = op.codomain.integers(seed + 1)
    left, right = result.inner(y), x.inner(op.H(y))
    assert np.real(left) == np.real(right)
    forms = op.over_reals(), op.H.over_reals()
    assert (forms[0].to_matrix() != forms[1].to_matrix().T).nnz == 0
    assert same(op, pickle.loads(pickle.dumps(op)))
    assert op.conj().conj().equals(op) and op.T.equals(op.H.conj())
    assert lt.check_exact(op) and lt.check_linear(op) and lt.check_dot_exact(op)
    assert same(op.simplify(), op)


@given(st.integers(1, 4), st.integers(1, 4), seeds)
def test_complex_multiples_and_sums_of_real_operators(m: int, n: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.integers(-9, 10, (2, m, n)).astype(float)
    x, y = Space(Region("x", n)), Space(Region("y", m))
    A, B = matrix(a, x, y), matrix(b, x, y)
    op, M = A + 1j * B, a + 1j * b
    assert op.domain.dtype == float and op.codomain.dtype == op.dtype == complex
    assert (op.to_matrix().toarray() == M).all() and (op.todense() == M).all()
    assert (op[:, n - 1] == M[:, n - 1]).all() and op[0, 0] == M[0, 0]
    v, w = x.integers(seed), op.codomain.integers(seed)
    assert (op(v)["y"] == M @ v["x"]).all()
    assert (op.H(w)["x"] == (M.conj().T @ w["y"]).real).all()
    assert (op.conj().todense() == M.conj()).all()
    assert (op @ op.H @ op).equals(op @ (op.H @ op))
    assert ((op.H @ op).to_matrix().toarray() == (M.conj().T @ M).real).all()
    assert (matrix(M, x, op.codomain).to_matrix().toarray() == M).all()
    assert matrix(M, x, op.codomain).equals(op)
    assert (2 * op - op).equals(op) and (-op + op).equals(0 * op)


def test_stacks_and_steps() -> None:
    a = TensorSpace((3,), Partition((1,)), complex, name="a")
    b = TensorSpace((3,), Partition((1,)), complex, name="b")
    both = linop.direct_sum(linop.real(a), linop.imag(b))
    assert both.domain.parts == (a, b)
    x = both.domain.integers(1)
    y = both(x)
    assert (y["a@0"] == x["a@0"].real).all() and (y["b@0"] == x["b@0"].imag).all()
    assert lt.check_exact(both)
    assert same(linop.in_steps(linop.real(a), linop.conj(a)), linop.real(a))
    move = linop.move(a, a.regions[0], b.regions[0])
    column = linop.vstack(linop.real(a), linop.imag(b) @ move)
    row = linop.hstack(linop.real(a), linop.real(a) @ move.H)
    assert lt.check_exact(column) and lt.check_exact(row)
    v = a.integers(2)["a@0"]
    found = column({"a@0": v})
    assert (found["a@0"] == v.real).all() and (found["b@0"] == v.imag).all()


def test_spaces_of_a_dtype_that_is_no_part_are_refused() -> None:
    single = TensorSpace((4, 3), Partition((2,)), np.complex64)
    whole = linop.identity(TensorSpace((4, 3), Partition((2,)), np.int64))
    for call, error, words in [
        (lambda: R @ linop.identity(single), SpaceError, "left domain, right codomain"),
        (lambda: linop.identity(R.codomain) @ C, SpaceError, r"linop\.real\(space\) takes"),
        (lambda: 1j * whole, DTypeError, "complex scalar 1j on a space of dtype int64"),
        (lambda: 1j * linop.identity(Space(Region("x", 2), np.float16)), DTypeError, "float16"),
        (lambda: linop.conj(R.codomain), DTypeError, "a complex space expected"),
        (lambda: linop.imag(3), ArgumentError, "given 3"),
        (R.to_matrix, UndecidableError, r"\.over_reals\(\)\.to_matrix\(\)"),
        (lambda: C + linop.identity(R.codomain), SpaceError, "sum of operators, domains"),
        (lambda: R(R.codomain.zeros()), SpaceError, "argument of an operator"),
        (lambda: local(Space(Region("x", 2), "f4"), Space(Region("y", 2), "c16"), abs, abs),
         SpaceError, "float32, codomain of complex128"),
    ]:  # fmt: skip
        with pytest.raises(error, match=words):
            call()


# Functions and other people's operators


def test_functions_between_real_and_complex_arrays() -> None:
    x, y = Space(Region("x", (4, 3))), Space(Region("y", 12), complex)
    w = np.exp(1j * np.arange(12))
    op = local(x, y, lambda v: w * v.ravel(), lambda u: (w.conj() * u).real.reshape(4, 3))
    assert lt.check_exact(op) and lt.check_adjoint(op, "threads") and lt.check_exact(2j * op)
    bent = local(x, y, lambda v: w * v.ravel(), lambda u: (w * u).real.reshape(4, 3))
    assert not lt.check_adjoint(bent)
    embedded = local(x, y, np.ravel, lambda u: u.real.reshape(4, 3))  # real results are complex
    assert lt.check_exact(embedded)
    wrong = local(x, y, lambda v: v.ravel().astype("f4"), lambda u: u.real.reshape(4, 3))
    with pytest.raises(DTypeError, match="dtype float32, complex128 expected"):
        wrong(x.zeros())
    z = Space(Region("z", 3), complex)
    swap = local(z, z, np.conj, np.conj, clinear=False)
    assert lt.check_exact(swap) and lt.check_equal(swap, linop.conj(z))
    assert not lt.check_linear(local(z, z, np.conj, np.conj))


def test_scipy_s_functions_take_them() -> None:
    rng = np.random.default_rng(0)
    M = rng.standard_normal((6, 3)) + 1j * rng.standard_normal((6, 3))
    op = matrix(M, Space(Region("x", 3)), Space(Region("y", 6), complex))
    truth = np.array([1.0, -2, 3])
    assert np.allclose(sl.lsqr(op, M @ truth)[0], truth)
    normal = op.H @ op
    assert normal.dtype == float and np.allclose(sl.cg(normal, normal @ truth)[0], truth)
    assert np.allclose(sl.eigsh(normal, 1)[0], np.linalg.eigvalsh((M.conj().T @ M).real)[-1])
    with pytest.raises(DTypeError):
        op @ (1j * truth)
    with pytest.raises(ShapeError):
        op @ np.zeros(4)


@pytest.mark.parametrize("name", ["lsqr", "lsmr", "cgls", "cg", "minres", "gmres", "bicgstab"])
def test_solvers_use_real_inner_products(name: str) -> None:
    """A x + conj(x) = b has one solution, found in the real dimension's number of steps."""
    rng = np.random.default_rng(1)
    x = Space(Region("x", 5), complex)
    A = matrix(rng.standard_normal((5, 5)) + 4 * np.eye(5), x, x) + linop.conj(x)
    truth = x.random(2)
    solve = getattr(linop.solvers, name)
    if name in ("cg", "minres"):
        A = A.H @ A
    tight: dict[str, Any] = {"rtol": 1e-12, "maxiter": 60}
    if name in ("lsqr", "lsmr"):
        tight = {"atol": 1e-14, "btol": 1e-14, "maxiter": 60}
    elif name == "cgls":
        tight = {"tol": 1e-12}
    found = solve(A, A(truth), **tight)
    assert (found.x - truth).norm() < 1e-6 * truth.norm()


def test_real_linear_operators_of_pylops() -> None:
    pylops = pytest.importorskip("pylops")
    F = pylops.signalprocessing.FFT(6, real=True)
    x, y = Space(Region("x", 6)), Space(Region("y", 4), complex)
    op = from_scipy(F, x, y)
    v = np.arange(6.0)
    assert np.allclose(op(v), np.fft.rfft(v, norm="ortho") * [1, 2**0.5, 2**0.5, 1])
    assert lt.check_exact(op) and op.clinear is False
    assert np.allclose((op.H @ op).todense(), np.eye(6))


# Workers


@given(steps, seeds)
def test_plans_on_threads(description: Description, seed: int) -> None:
    on_threads(4, computes_numpy_s, description, seed)


@needs_mpi
@settings(max_examples=10)
@given(steps, seeds)
def test_plans_on_ranks(description: Description, seed: int) -> None:
    on_ranks(4, computes_numpy_s, description, seed)


def test_a_plan_of_the_whole_takes_all_forms() -> None:
    for name in ("reference", "threads"):
        plan = (2j * E @ R).compile(linop.backends.get(name))
        x = X.integers(3)
        wanted = 2j * X.gather(x).real
        assert (X.gather(plan(x)) == wanted).all()
        assert (X.gather(plan(dict(x.arrays))) == wanted).all()
        plan.start(x)
        assert (X.gather(plan.finish()) == wanted).all()
        out = X.zeros()
        assert plan(x, out=out) is out and (X.gather(out) == wanted).all()
        assert plan.H.H is plan and plan.domain is X
        assert plan.describe().startswith("worker 0")
        with pytest.raises(LinopError):
            plan(X.gather(x))
        copy = pickle.loads(pickle.dumps(plan))
        assert (X.gather(copy(x)) == wanted).all()
        plan.release()


def test_diagonals_of_complex_numbers_on_real_vectors() -> None:
    x = Space(Region("x", 3))
    D = diagonal(np.array([1j, 2, 3 - 1j]), Space(x.regions, complex))
    op = D @ linop.identity(x)
    assert (op.todense() == np.diag([1j, 2, 3 - 1j])).all()


def test_shapes_of_views_in_any_layout() -> None:
    y = Space(Region("y", (2, 3)), complex)
    op: Any = linop.conj(y)
    plan = op.compile(linop.backends.get("reference"))
    a = (np.arange(12) + 1j).reshape(4, 3)[::2]
    for given_ in (a, np.asfortranarray(a), np.arange(24).reshape(2, 12)[:, ::4] + 0j):
        assert (plan(given_) == given_.conj()).all()
        out = np.zeros((3, 2), complex).T
        assert plan(given_, out=out) is out and (out == given_.conj()).all()


def test_products_pickle_as_the_calls_that_built_them() -> None:
    Y = TensorSpace((4,), Partition((2,)))
    Z = Y.with_dtype(complex)
    for op in (
        linop.rfft(Y) @ linop.shift(Y, 1),
        (linop.rfft(Y) @ linop.repartition(Y, Y)).H,
        linop.rfft(Y) @ linop.imag(Z),
        1j * linop.rfft(Y) + linop.rfft(Y),
        linop.real(Z) @ linop.stencil(Z, {0: 1, 1: 1j}) @ linop.identity(Y),
    ):
        again = pickle.loads(pickle.dumps(op))
        assert again.domain == op.domain and again.codomain == op.codomain
        assert np.allclose(
            again.over_reals().to_matrix().toarray(), op.over_reals().to_matrix().toarray()
        )


def test_complex_multiples_in_spaces_of_operators_inner_products() -> None:
    E2 = TensorSpace((2,), Partition((1,)), complex)
    G = np.array([[2, 1j], [-1j, 2]])
    inner = linop.inner_product(matrix(G, E2, E2), matrix(np.linalg.inv(G), E2, E2))
    Y = E2.with_inner(inner)
    assert same(1j * linop.conj(Y), (1j * linop.identity(Y)) @ linop.conj(Y))
    real_part = E2.with_dtype(float)
    g = matrix(np.array([[2.0, 1], [1, 2]]), real_part, real_part)
    W = real_part.with_inner(linop.inner_product(g))
    with pytest.raises(SpaceError, match="inner product of a real operator: give the complex"):
        1j * linop.identity(W)
