"""Checks of maps between spaces with inner products, given with the spaces, with the check, or with
a pair of functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import linop
from linop.backends import Backend
from linop.errors import ArgumentError
from linop.testing import (
    check_adjoint,
    check_dot_exact,
    check_equal,
    check_exact,
    check_self_adjoint,
    pair,
)
from support.workers import on_threads

sizes, seeds = st.integers(1, 6), st.integers(0, 2**16)


def drawn(m: int, n: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A matrix of whole numbers, not of zeros, and weights that are powers of two, not all 1: those
    of the domain at most 1, those of the codomain at least, so that the adjoint has whole numbers,
    too."""
    rng = np.random.default_rng(seed)
    M = rng.integers(-3, 4, (m, n)).astype(float)
    M[0, 0] = 3.0
    u, v = 2.0 ** rng.integers(-2, 1, n), 2.0 ** rng.integers(0, 3, m)
    u[0], v[0] = 0.5, 4.0
    return M, u, v


@given(sizes, sizes, seeds)
def test_pairs_and_matrices(m: int, n: int, seed: int) -> None:
    M, u, v = drawn(m, n, seed)
    adjoint = (M.T * v) / u[:, None]
    right = pair(lambda x: M @ x, lambda y: adjoint @ y, n, m, inner=(u, v))
    for report in (
        check_adjoint(right),
        check_dot_exact(right),
        check_exact(right),
        check_adjoint(right.H),
        check_adjoint(M, adjoint=adjoint, inner=(u, v)),
        check_dot_exact(M, adjoint=adjoint, inner=(u, v)),
    ):
        assert report, str(report)
    for report in (
        check_adjoint(M, inner=(u, v)),
        check_dot_exact(M, inner=(u, v)),
        check_adjoint(M, adjoint=adjoint),
        check_exact(pair(lambda x: M @ x, lambda y: M.T @ y, n, m, inner=(u, v))),
    ):
        assert not report
        assert report.worst is not None


@given(sizes, seeds)
def test_operators(n: int, seed: int) -> None:
    M, u, v = drawn(n, n, seed)
    X, Y = linop.Space(linop.Region("x", n), inner=u), linop.Space(linop.Region("y", n), inner=v)
    A = linop.local_operators.matrix(M, X, Y)
    for report in (check_adjoint(A), check_dot_exact(A), check_exact(A), check_exact(A.H)):
        assert report, str(report)
    assert check_self_adjoint(A.H @ A)
    assert check_equal(A.H @ A, A.H @ A)
    # Its own adjoint, in the inner product that is given with the check.
    symmetric = M + M.T
    assert check_adjoint(symmetric / u[:, None], adjoint=symmetric / u[:, None], inner=(u, u))
    assert not check_exact(A, A.euclidean_adjoint)


def on_workers(backend: Backend, weight: Any) -> None:
    X = linop.TensorSpace((6, 2), linop.Partition((3,)), inner=np.arange(1.0, 13).reshape(6, 2))
    Y = linop.TensorSpace((6, 2), linop.Partition((1, 2)), name="y", inner=weight)
    op = linop.repartition(X, Y)
    assert check_adjoint(op, backend)
    assert check_exact(op, backend=backend)
    assert not check_adjoint(op, backend, adjoint=op.euclidean_adjoint)
    assert not check_adjoint(op, backend, inner=(None, None))


def test_on_workers() -> None:
    on_threads(3, on_workers, 2.0)
    on_threads(3, on_workers, np.arange(2.0, 14).reshape(6, 2))


def test_errors() -> None:
    for inner in (2.0, (1.0, 2.0, 3.0), [1.0, 2.0]):
        with pytest.raises(ArgumentError, match="inner: a pair expected, the inner products of"):
            check_adjoint(np.eye(2), inner=inner)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="positive and finite weights expected"):
        check_adjoint(np.eye(2), inner=(None, -1.0))
