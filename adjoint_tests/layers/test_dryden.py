"""A convolution cut in space as operators: `examples/dryden.py`, for kernels and grids of any
size, with a misprint of one of its equations as a planted fault."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import linop
from linop import Partition, TensorSpace
from support.examples import example

pytestmark = pytest.mark.slow

dryden = example("dryden")


class Case(NamedTuple):
    samples: int
    channels: int
    filters: int
    F: int
    space: tuple[int, int]
    grid: tuple[int, int, int]

    @property
    def X(self) -> TensorSpace:
        batch, *space = self.grid
        shape = self.samples, self.channels, *self.space
        return TensorSpace(shape, Partition((batch, 1, *space)))

    def weights(self) -> Any:
        return dryden.whole_numbers(self.filters, self.channels, self.F, self.F, seed=0)


SMALL = st.integers(1, 2)
CASES = st.builds(
    Case,
    SMALL,
    SMALL,
    st.integers(1, 3),
    st.sampled_from([1, 3, 5]),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.tuples(SMALL, SMALL, SMALL),
)


@given(case=CASES)
def test_equations(case: Case) -> None:
    """Windows are shifts; the gradients are the adjoints, and the sums that the paper writes."""
    X, F, w = case.X, case.F, case.weights()
    Y = dryden.renamed(X, "y", case.filters)
    back = linop.repartition(dryden.renamed(X, "s"), X)
    for a, b in dryden.offsets(F):
        shift = dryden.shifted(X, a, b)
        assert (dryden.window(X, F, a, b) @ dryden.halos(X, F)).equals(shift)
        assert (back @ shift).H.equals(back @ dryden.shifted(X, -a, -b))
    A = dryden.forward(X, w)
    x, g = (dryden.whole_numbers(*V.global_shape, seed=1) for V in (X, Y))
    B = dryden.of_weights(X, x, case.filters, F)
    for op in (A, B):
        linop.testing.assert_dot_exact(op, trials=1)
    linop.testing.assert_dot_exact(A, adjoint=dryden.printed(Y, X, w, dryden.by_index), trials=1)
    y = Y.gather(A(X.scatter(x)))
    assert (y == outputs(x, w)).all()
    assert (Y.gather(B(B.domain.unflatten(w.ravel()))) == y).all()
    gradient = B.domain.flatten(B.H(Y.scatter(g))).reshape(w.shape)
    assert (gradient == of_weights_by_index(g, x, F)).all()


def outputs(x: Any, w: Any) -> Any:
    """The first equation, as printed."""
    y, half = np.zeros((len(x), len(w), *x.shape[2:])), w.shape[-1] // 2
    padded = dryden.edged(x, half)
    for k, f, i, j in np.ndindex(y.shape):
        y[k, f, i, j] = sum(
            padded[k, c, i + a + half, j + b + half] * w[f, c, a + half, b + half]
            for c in range(x.shape[1])
            for a, b in dryden.offsets(w.shape[-1])
        )
    return y


def of_weights_by_index(g: Any, x: Any, F: int) -> Any:
    """The third equation, as printed."""
    dw = np.zeros((g.shape[1], x.shape[1], F, F))
    padded = dryden.edged(x, F // 2)
    for f, c, a, b in np.ndindex(dw.shape):
        dw[f, c, a, b] = sum(
            g[k, f, i, j] * padded[k, c, i + a, j + b]
            for k in range(len(g))
            for i in range(g.shape[2])
            for j in range(g.shape[3])
        )
    return dw


@given(case=CASES)
def test_the_misprint_is_found(case: Case) -> None:
    """Unless there is one filter, of one element, and one column: there the misprint is right."""
    X, w = case.X, case.weights()
    Y = dryden.renamed(X, "y", case.filters)
    A = dryden.forward(X, w)
    report = linop.testing.check_dot_exact(A, adjoint=dryden.printed(Y, X, w, dryden.misprint))
    right = case.filters == 1 and case.F == 1 and case.space[1] == 1
    assert bool(report) is right, report
    if not right:
        worst = report.worst
        column, row = (A.domain, worst.source), (A.codomain, worst.target)
        assert worst.wanted == entry(A, column, row)
        assert worst.found == entry(dryden.printed(Y, X, w, dryden.misprint), row, column)


def entry(op: Any, column: Any, row: Any) -> Any:
    """An entry of an operator, by space and element of its column and row."""
    unit = column[0].zeros()
    unit[column[1].region][column[1].index] = 1
    return op(unit)[row[1].region][row[1].index]


@pytest.mark.parametrize("workers", [1, 2, 4, 8])
def test_on_threads(workers: int) -> None:
    """The gradient of the input, with messages."""
    grid = {1: (1, 1, 1), 2: (1, 1, 2), 4: (1, 2, 2), 8: (2, 2, 2)}[workers]
    case = Case(2, 2, 3, 3, (4, 5), grid)
    linop.testing.assert_dot_exact(dryden.forward(case.X, case.weights()), "threads", trials=1)
