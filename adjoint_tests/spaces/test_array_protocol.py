"""Arithmetic, ufuncs and functions of NumPy on vectors, against the same of global arrays."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from linop import Partition, Region, Space, TensorSpace, Vector
from linop.errors import ArgumentError, DTypeError, LinopError, SpaceError
from support.contracts import vectors
from support.requirements import needs_mpi
from support.workers import on_ranks, on_threads

BINARY = [
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
    np.add,
    np.multiply,
    np.divide,
    np.maximum,
    np.hypot,
    np.arctan2,
    np.power,
    np.copysign,
]
COMPARISONS = [operator.lt, operator.le, operator.gt, operator.ge, operator.eq, np.less, np.equal]
UNARY = [np.exp, np.sqrt, np.abs, abs, np.negative, operator.neg, np.square, np.conj, np.sin]
UNARY += [lambda x: 1 / (x + 1), lambda x: 2 - x, lambda x: x**2, lambda x: x * 3.0]
UNARY += [lambda x: 0.5 * x, lambda x: x.real, lambda x: x.imag, lambda x: x.conj()]


@st.composite
def drawn_vectors(draw: st.DrawFn, dtypes: Any = ("f8", "f4", "c16", "c8")) -> tuple[Any, Any, Any]:
    """A tensor space, and two global arrays of it: positive numbers, so that all is defined."""
    shape = draw(st.lists(st.integers(0, 4), min_size=2, max_size=2))
    grid = Partition((draw(st.integers(1, 3)), draw(st.integers(1, 2))))
    X = TensorSpace(shape, grid, draw(st.sampled_from(dtypes)))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    a, b = (rng.integers(1, 9, shape).astype(X.dtype) for _ in range(2))
    return X, a, b + (1j if X.dtype.kind == "c" else 0)


def same(found: Any, wanted: Any) -> None:
    if isinstance(found, Vector):
        assert found.space.dtype == wanted.dtype
        assert isinstance(found.space, TensorSpace)
        found = found.space.gather(found)
        np.testing.assert_array_equal(found, wanted, strict=True)
    else:
        assert found.all() == wanted.all() and found.any() == wanted.any()


@given(drawn_vectors(), st.sampled_from(UNARY))
def test_functions_of_one(drawn: Any, f: Any) -> None:
    X, a, _ = drawn
    same(f(X.scatter(a)), f(a))


@given(drawn_vectors(("f8", "f4", "i4", "u1")), st.sampled_from(BINARY + COMPARISONS))
def test_functions_of_two(drawn: Any, f: Any) -> None:
    X, a, b = drawn
    same(f(X.scatter(a), X.scatter(b.astype(X.dtype))), f(a, b.astype(X.dtype)))


@given(drawn_vectors())
def test_products_and_norms(drawn: Any) -> None:
    X, a, b = drawn
    b = b.astype(X.dtype)
    v, w = X.scatter(a), X.scatter(b)
    assert v.dot(w) == pytest.approx(complex((a * b).sum()), rel=1e-5)
    assert np.dot(v, w) == v.dot(w) and np.vdot(v, w) == v.inner(w)
    assert np.linalg.norm(v) == v.norm() == pytest.approx(np.linalg.norm(a), rel=1e-5)
    assert np.copy(v).equals(v)
    whole, fraction = np.modf(v.real)[::-1]
    same(whole + fraction, a.real)


def test_numbers_stay_in_the_dtype_of_the_space() -> None:
    X = TensorSpace((4,), Partition((2,)), "f4")
    for v in (X.zeros() + 0.5, 0.5 + X.zeros(), np.float64(0.5) * (X.zeros() + 1)):
        assert v.space == X and X.gather(v).tolist() == [0.5] * 4
    whole = X.with_dtype("i8").zeros()
    assert np.exp(whole).space.dtype == np.float64
    for wrong in (lambda: whole + 0.5, lambda: whole * 0.5, lambda: np.add(whole, 0.5)):
        with pytest.raises(DTypeError):
            wrong()


def test_arrays_and_options_are_refused() -> None:
    X, Y = TensorSpace((4,), Partition((2,))), TensorSpace((5,), Partition((2,)))
    v = X.zeros()
    for call, error, words in (
        (lambda: np.add(v, np.ones(4)), ArgumentError, r"X.scatter\(array\)"),
        (lambda: np.ones(4) * v, ArgumentError, "vectors and numbers"),
        (lambda: np.add(v, v, out=v), ArgumentError, "no out"),
        (lambda: np.exp(v, where=True), ArgumentError, "no where"),
        (lambda: np.sum(v), ArgumentError, "gather"),
        (lambda: np.stack([v, v]), ArgumentError, "gather"),
        (lambda: np.linalg.norm(v, 1), ArgumentError, "2-norm"),
        (lambda: v * Y.zeros(), SpaceError, "the spaces differ"),
        (lambda: np.hypot(v, Y.zeros()), SpaceError, "the spaces differ"),
    ):
        with pytest.raises(error, match=words) as caught:
            call()
        assert isinstance(caught.value, LinopError)
    with pytest.raises(TypeError):
        np.add.reduce(v)


def test_functions_of_the_only_region() -> None:
    v = Space(Region("x", 3)).vector(np.array([3.0, 1.0, 2.0]))
    assert np.sort(v).tolist() == [1, 2, 3] and np.sum(v) == 6
    assert np.concatenate([v, v]).shape == (6,)


@pytest.mark.parametrize("workers", [1, 3, 8])
def test_on_threads(workers: int) -> None:
    on_threads(workers, vectors.arithmetic)


@needs_mpi
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_on_ranks(workers: int) -> None:
    on_ranks(workers, vectors.arithmetic)


def test_what_is_no_function_of_elements_is_refused() -> None:
    v = TensorSpace((4,), Partition((2,))).zeros()
    for call in (lambda: np.matmul(v, v), lambda: iter(v)):
        with pytest.raises(TypeError):
            call()
    for call in (lambda: np.vdot(np.ones(4), v), lambda: np.dot(v, 2)):
        with pytest.raises(ArgumentError, match="two vectors of a space"):
            call()
