"""The algebra of operators: composition, sums, multiples, powers, stacks.

The model of an operator is its dense matrix. What holds for one operator of every kind,
`test_catalogue` tests; here, what holds between several.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import scipy.sparse.linalg
from hypothesis import assume, given
from hypothesis import strategies as st

import linop
from linop import LinearOperator, Partition, Region, Space, TensorSpace
from linop.caching import cached_property
from linop.errors import ArgumentError, DTypeError, UndecidableError
from linop.provenance import Keeper
from linop.testing.describing import (
    COMPLEX,
    COMPUTED,
    Description,
    seeds,
    space_of,
    spaces,
    whole_numbers,
)
from support.operators.catalogue import build, describe
from support.operators.properties import (
    backend_agrees,
    dense,
    interpretation,
    same_arrays,
    stays_exact,
    two_roads,
)

x, y, z = Region("x", 2), Region("y", 3), Region("z", 2, 1)
X, Y = Space(x), Space(y)


@st.composite
def endomorphisms(draw: st.DrawFn, count: int) -> tuple[LinearOperator, ...]:
    """Operators from one space to itself: programs of movement and local operators."""
    described = draw(describe("sum_of_operators"))
    # Its terms are such programs; fewer are repeated.
    one = linop.identity(space_of(described["space"]))
    terms = [
        # Between identities, its matrix is in the order of this space.
        one @ build("power", {"space": described["space"], "steps": steps, "exponent": 1}) @ one
        for steps in described["terms"]
    ]
    return tuple(draw(st.sampled_from(terms)) for _ in range(count))


def same(op: LinearOperator, matrix: np.ndarray) -> None:
    """The operator has this matrix, and passes the generic tests."""
    assert (dense(op) == matrix).all()
    two_roads(op)
    if stays_exact(op):
        interpretation(op)


@given(endomorphisms(2), st.integers(-3, 3))
def test_the_algebra_is_that_of_matrices(ops: tuple[LinearOperator, ...], scalar: int) -> None:
    a, b = ops
    A, B = dense(a), dense(b)
    same(a @ b, A @ B)
    same(a + b, A + B)
    same(a - b, A - B)
    same(-a, -A)
    same(scalar * a, scalar * A)
    same(a * scalar, scalar * A)
    same(a**0, np.eye(len(A)))
    same(a**1, A)
    same(a**3, A @ A @ A)
    assert (a @ b).H.equals(b.H @ a.H)
    assert (a + b).H.equals(a.H + b.H)
    assert (scalar * a).H.equals(scalar * a.H)


@given(endomorphisms(3))
def test_the_laws_of_a_ring(ops: tuple[LinearOperator, ...]) -> None:
    a, b, c = ops
    one, none = linop.identity(a.domain), linop.zero(a.domain, a.domain)
    assert ((a @ b) @ c).equals(a @ (b @ c))
    assert ((a + b) + c).equals(a + (b + c))
    assert (a + b).equals(b + a)
    assert (a @ (b + c)).equals(a @ b + a @ c)
    assert ((a + b) @ c).equals(a @ c + b @ c)
    assert (a @ one).equals(a)
    assert (one @ a).equals(a)
    assert (a + none).equals(a)
    assert (a @ none).equals(none)
    assert (a - a).equals(none)
    assert (2 * a).equals(a + a)
    assert (a**2).equals(a @ a)


@given(st.data(), seeds)
def test_complex_scalars(data: st.DataObject, seed: int) -> None:
    described = data.draw(spaces(4, COMPLEX))
    space = space_of(described)
    a = linop.local_operators.diagonal(whole_numbers(space.regions[0].shape, space.dtype, seed))
    A = dense(a)
    same((2 - 1j) * a, (2 - 1j) * A)
    same(((2 - 1j) * a).H, (2 + 1j) * A.conj())
    same(((2 - 1j) * a).T, (2 - 1j) * A)
    same(((2 - 1j) * a).conj(), (2 + 1j) * A.conj())
    same(a / 2 + a / 2, A)
    assert ((1j * a) / 1j).equals(a)


@given(spaces(4, COMPUTED, prefix="a"), spaces(4, COMPUTED, prefix="b"), st.data())
def test_direct_sums_and_stacks(
    first: Description, second: Description, data: st.DataObject
) -> None:
    second = {**second, "dtype": first["dtype"]}
    a, b = (
        build(
            "power", {"space": s, "steps": (("clear", (s["regions"][0][0], whole)),), "exponent": 1}
        )
        for s, whole in ((s, tuple((0, n) for n in s["regions"][0][1])) for s in (first, second))
    )
    A, B = dense(a), dense(b)
    empty = np.zeros((len(A), len(B)))
    both = linop.direct_sum(a, b)
    same(both, np.block([[A, empty], [empty.T, B]]))
    assert both.domain.regions == (*a.domain.regions, *b.domain.regions)
    assert both.H.equals(linop.direct_sum(a.H, b.H))
    assert (both @ both).equals(linop.direct_sum(a @ a, b @ b))
    scalar = data.draw(st.integers(-2, 2))
    assert (scalar * both).equals(linop.direct_sum(scalar * a, scalar * b))


def test_stacks_are_blocks_in_a_row_and_in_a_column() -> None:
    A, B = whole_numbers((3, 2), "float64", 1), whole_numbers((3, 4), "float64", 2)
    a = linop.local_operators.matrix(A, X, Y)
    b = linop.local_operators.matrix(B, Space(Region("w", 4)), Y)
    same(linop.hstack(a, b), np.hstack([A, B]))
    same(linop.vstack(a.H, b.H), np.vstack([A.T, B.T]))
    assert linop.hstack(a, b).H.equals(linop.vstack(a.H, b.H))
    for stack in (linop.hstack, linop.vstack, linop.direct_sum):
        assert stack(a).equals(a)
    # [A B] [A B]* = A A* + B B*
    row = linop.hstack(a, b)
    assert (row @ row.H).equals(a @ a.H + b @ b.H)


def test_identity_and_zero() -> None:
    space = Space([x, z])
    same(linop.identity(space), np.eye(4))
    assert linop.identity(space).H.equals(linop.identity(space))
    none = linop.zero(X, Y)
    same(none, np.zeros((3, 2)))
    assert (none.domain, none.codomain) == (X, Y)
    assert none.H.equals(linop.zero(Y, X))
    assert (str(linop.identity(space)), str(none)) == ("I", "O")


def test_an_adjoint_is_built_once_and_runs_nothing() -> None:
    calls: list[str] = []

    def noted(name: str) -> LinearOperator:
        def run(v: np.ndarray) -> np.ndarray:
            calls.append(name)
            return v

        return linop.local(x, x, run, run)

    op = 2 * (noted("f") @ noted("g")) + noted("h")
    assert op.H is op.H
    assert op.H.H is op
    assert op.adjoint() is op.H
    assert str(op.H) == "2 L* L* + L*"
    assert op.simplify().H is not None
    assert calls == []


def test_applying_takes_and_gives_what_it_is_given() -> None:
    a = linop.local_operators.matrix(np.array([[1.0, 2], [3, 4], [5, 6]]), X, Y)
    v = np.array([1.0, -1])
    same_arrays(a(v), np.array([-1.0, -1, -1]))
    same_arrays(a @ v, a(v))
    same_arrays(a({"x": v}), a(v))
    applied = a(X.vector(v))
    assert applied.space == Y
    same_arrays(applied["y"], a(v))
    several = linop.copy(X, x, z)
    assert set(several(v)) == {"x", "z"}
    none = linop.zero(X, Space([]))
    assert none(v) is None
    same_arrays(none.H(None), np.zeros(2))
    # A list of numbers is an array.
    same_arrays(a([1, -1]), a(v))


def test_scalars_may_be_numpys() -> None:
    a = linop.identity(X)
    for scalar in (np.float64(2), np.int32(2), np.float32(2), 2, 2.0, 2 + 0j, True + 1):
        assert (scalar * a).equals(a + a)
        assert (a * scalar).equals(a + a)
        assert (a / scalar).equals(0.5 * a)


def test_scalars_that_a_space_is_not_closed_under() -> None:
    whole = linop.identity(Space(x, np.int64))
    with pytest.raises(DTypeError, match=r"fraction 0\.5 on a space of dtype int64"):
        whole / 2
    with pytest.raises(DTypeError, match="complex scalar 1j on a space of dtype int64"):
        1j * whole
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ArgumentError, match="finite"):
            bad * linop.identity(X)


def test_powers_are_of_operators_from_a_space_to_itself() -> None:
    for bad in (-1, 0.5, "2"):
        with pytest.raises(ArgumentError, match=f"power: .* given {bad!r}"):
            linop.identity(X) ** bad


# Order of regions: equal spaces may hold theirs in another order, and matrices are read by it.


def reordered() -> tuple[LinearOperator, LinearOperator, Sequence[int]]:
    """diag(1, 2 | 3, 4) on x ⊕ z, and on z ⊕ x."""
    d, e = np.array([1.0, 2]), np.array([3.0, 4])
    one = linop.direct_sum(
        linop.local_operators.diagonal(d, X), linop.local_operators.diagonal(e, Space(z))
    )
    two = linop.direct_sum(
        linop.local_operators.diagonal(e, Space(z)), linop.local_operators.diagonal(d, X)
    )
    return one, two, [2, 3, 0, 1]


def test_operators_on_spaces_in_another_order() -> None:
    one, two, order = reordered()
    assert one.domain == two.domain
    assert one.equals(two)
    D = np.diag([1.0, 2, 3, 4])
    same(one, D)
    same(two, D[order][:, order])
    # The domain of a product is its last factor's, the codomain its first one's.
    same(one @ two, (D @ D)[:, order])
    same(two @ one, (D @ D)[order])
    same(one + two, 2 * D)
    same(two - one, 0 * D)
    same(one + linop.identity(two.domain), D + np.eye(4))
    same(linop.identity(two.domain) + one, (D + np.eye(4))[order][:, order])
    for op in (one @ two, one + two, two + linop.identity(one.domain), (one + two) @ two):
        backend_agrees(op)


def test_simplifying_keeps_the_order_of_regions() -> None:
    one, two, _ = reordered()
    for op in (
        linop.identity(two.domain) @ one,
        one @ linop.identity(two.domain),
        linop.zero(two.domain, two.domain) + one,
        1 * (linop.identity(two.domain) @ one @ linop.identity(two.domain)),
    ):
        assert (dense(op.simplify()) == dense(op)).all()


def test_sums_of_local_operators_of_any_depth() -> None:
    """In a sum, every term has its own copy of the argument: also a term that is deeper."""
    one, two, order = reordered()
    deep = one @ linop.clear(one.domain, z) @ two
    same(deep + two, dense(deep) + dense(one)[:, order])
    backend_agrees(deep + two + linop.identity(one.domain))
    nested = (one + deep) @ (two + deep) + (deep + one)
    backend_agrees(nested)
    two_roads(nested)


# Printing


def test_compositions_sums_and_multiples_print() -> None:
    a = linop.local_operators.matrix(np.ones((2, 2)), X, X, name="A")
    b = linop.local_operators.matrix(np.ones((2, 2)), X, X, name="B")
    one = linop.identity(X)
    printed = {
        "A B": a @ b,
        "A + B": a + b,
        "A - B": a - b,
        "-A": -a,
        "2 A": 2 * a,
        "0.5 A": a / 2,
        "(A + B) A": (a + b) @ a,
        "2 (A + B)": 2 * (a + b),
        "A A A": a**3,
        "A* B* + I": a.H @ b.H + one,
        "A*": a.H,
        "A": a.H.H,
    }
    for text, op in printed.items():
        assert str(op) == text
    assert (a.H + (a + b) @ a)._repr_latex_() == r"$A^{*} + \left(A + B\right) A$"
    summed = linop.direct_sum(a, linop.identity(Space(z)))
    assert str(summed) == "A ⊕ I"
    assert str(summed @ summed) == "(A ⊕ I) (A ⊕ I)"
    assert summed._repr_latex_() == r"$A \oplus I$"
    assert repr(a) == "<2x2 Local with dtype=float64: A>"
    c = linop.local_operators.matrix(np.ones((2, 2), complex), name="C")
    assert str((1 + 2j) * c) == "(1+2j) C"
    assert str(c.conj()) == "conj(C)"


def test_long_products_print_both_ends() -> None:
    steps = linop.local_operators.matrix(np.eye(2), X, X, name="A0")
    for k in range(1, 20):
        steps = linop.local_operators.matrix(np.eye(2), X, X, name=f"A{k}") @ steps
    text = str(steps)
    assert text.startswith("A19 A18 ")
    assert " ⋯ " in text
    assert text.count("A") == 12
    assert r"\cdots" in steps._repr_latex_()


def test_collectives_print_under_their_names() -> None:
    T = TensorSpace(4, Partition(2))
    assert str(linop.gather(T)) == "Ga_{→0}"
    assert str(linop.gather(T).H) == "Ga_{→0}*"
    assert str(linop.gather(T).H.H) == "Ga_{→0}"
    assert linop.gather(T).H._repr_latex_() == r"$Ga_{ \to 0}^{*}$"


# equals(), to_matrix(), to_scipy()


@given(endomorphisms(2))
def test_equality_is_that_of_matrices(ops: tuple[LinearOperator, ...]) -> None:
    a, b = ops
    assert a.equals(b) == (dense(a) == dense(b)).all()


def test_equality_needs_equal_spaces() -> None:
    a = linop.identity(X)
    assert not a.equals(linop.identity(Y))
    assert not a.equals(linop.zero(X, Y))
    assert not a.equals(linop.identity(Space(x, np.float32)))
    with pytest.raises(ArgumentError, match="expected an operator, given 2"):
        a.equals(2)  # type: ignore[arg-type]


def test_equality_that_cannot_be_decided_says_so() -> None:
    def double(v: np.ndarray) -> np.ndarray:
        return 2 * v

    f, g = (linop.local(x, x, double, double, name=n) for n in "fg")
    assert f.equals(f)
    assert (f @ f).equals(f @ f)
    assert f.H.H.equals(f)
    assert (linop.identity(X) @ f).equals(f)
    with pytest.raises(UndecidableError, match=r"cannot decide; the matrix of f, g is not known"):
        f.equals(g)
    with pytest.raises(UndecidableError, match="matrix of f is not known"):
        f.equals(2 * linop.identity(X))
    third = linop.local_operators.diagonal(np.full(2, 1 / 3), X)
    with pytest.raises(UndecidableError, match="which may be rounding"):
        (third + third + third).equals(
            linop.local_operators.diagonal(np.full(2, 3 * (1 / 3 + 1e-17) + 2e-16), X)
        )
    assert not third.equals(linop.identity(X))


@given(st.data(), seeds)
def test_to_scipy_is_the_same_map(data: st.DataObject, seed: int) -> None:
    op = build("random_composition", data.draw(describe("random_composition")))
    assume(stays_exact(op))
    flat = op.to_scipy()
    assert isinstance(flat, scipy.sparse.linalg.LinearOperator)
    assert (flat.shape, flat.dtype) == (op.shape, op.dtype)
    domain, codomain = op.flat_ends  # equal spaces have one order, that of their regions or not
    v, w = domain.integers(seed), codomain.integers(seed + 1)
    same_arrays(np.asarray(flat @ domain.flatten(v)), codomain.flatten(op(v)))
    same_arrays(np.asarray(flat.H @ codomain.flatten(w)), domain.flatten(op.H(w)))
    # Several columns at once, and SciPy's own algebra over it.
    columns = np.stack([domain.flatten(v), domain.flatten(2 * v)], axis=1)
    same_arrays((flat @ columns)[:, 1], codomain.flatten(op(2 * v)))


@pytest.mark.parametrize("dtype", (*COMPUTED, "float16"))
def test_to_matrix_has_the_dtype_of_the_operator(dtype: str) -> None:
    op = linop.identity(Space(x, dtype))
    # SciPy has no sparse matrices of half precision.
    wanted = "float64" if dtype == "float16" else dtype
    assert op.to_matrix().dtype == wanted
    assert op.dtype == dtype


def test_what_others_keep_with_an_operator_is_one_for_all_threads() -> None:
    """Though they ask for it at once; and it is no part of a copy."""
    at_once = threading.Barrier(2)

    class Slow(Keeper):
        @cached_property
        def kept(self) -> dict[Any, Any]:
            at_once.wait()
            return {}

    one, found = Slow(), []
    threads = [threading.Thread(target=lambda: found.append(one.kept)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] is found[1] is one.kept
    op = 2 * linop.identity(Space(Region("x", 2)))
    op.kept["key"] = threading.Lock()  # which does not pickle
    assert pickle.loads(pickle.dumps(op)).kept == {}
