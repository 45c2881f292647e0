"""Proximal maps by their definition, with functions written in NumPy: the subgradient inequality,
firm non-expansiveness, Moreau's identity; and on workers.

Tolerances: 1e-9 for maps in closed form, whose arguments are of order 1; for total variation, which
ends by a duality gap, what that gap proves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.optimize
from hypothesis import given
from hypothesis import strategies as st

import linop
from linop import Partition, Region, Space, TensorSpace, Vector
from linop.errors import (
    ArgumentError,
    DTypeError,
    LinopError,
    PartitionError,
    ShapeError,
    SpaceError,
)
from linop.solvers import prox
from support.contracts import proximal
from support.contracts.proximal import MAKERS, numbers
from support.draws import ON_RANKS
from support.requirements import needs_mpi
from support.workers import on_ranks, on_threads


def differences(a: np.ndarray) -> np.ndarray:
    """Of neighbours, in every dimension; zero at the upper border."""
    found: np.ndarray = np.stack(
        [np.diff(a, axis=d, append=np.take(a, [-1], axis=d)) for d in range(a.ndim)]
    )
    return found


def grouped(a: np.ndarray, labels: np.ndarray) -> float:
    return float(sum(np.linalg.norm(a[labels == one]) for one in np.unique(labels)))


def functions(X: TensorSpace) -> dict[str, Callable[[np.ndarray], float]]:
    """The maps' functions of a global array, as textbooks define them."""
    data, upper = (numbers(X.global_shape, X.dtype, seed) for seed in (91, 92))
    infinite = float("inf")
    return {
        "l1": lambda a: 0.7 * abs(a).sum(),
        "l2": lambda a: 0.7 * np.linalg.norm(a),
        "squared_l2": lambda a: 0.35 * np.linalg.norm(a) ** 2,
        "squared_l2 of data": lambda a: np.linalg.norm(a - data) ** 2,
        "box": lambda a: 0.0 if ((a >= -0.2) & (a <= 0.5)).all() else infinite,
        "box of vectors": lambda a: 0.0 if (a <= upper).all() else infinite,
        "user": lambda a: a.sum() if (a >= 0).all() else infinite,
        "group": lambda a: 0.7 * np.linalg.norm(a, axis=1).sum(),
        "labels": lambda a: 0.7 * grouped(a, proximal.labels(X)),
        "nuclear": lambda a: 0.7 * np.linalg.norm(a, "nuc"),
        "total_variation": lambda a: 0.3 * np.linalg.norm(differences(a), axis=0).sum(),
    }


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, TensorSpace, float, int]:
    """A map, a matrix cut by rows, a step, and a seed."""
    name = draw(st.sampled_from(sorted(MAKERS)))
    kinds = ["float64"] if name in proximal.REAL_ONLY else ["float64", "complex128"]
    shape = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    X = TensorSpace(shape, Partition((draw(st.integers(1, 3)),)), draw(st.sampled_from(kinds)))
    return name, X, draw(st.sampled_from([0.01, 0.3, 1.0, 20.0])), draw(st.integers(0, 99))


def inner(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.vdot(a, b).real)


@given(cases())
def test_it_is_the_minimizer(case: tuple[str, TensorSpace, float, int]) -> None:
    """(v - x) / step is a subgradient at x: f(w) >= f(x) + Re <v - x, w - x> / step for all w."""
    name, X, step, seed = case
    f, wanted = MAKERS[name](X, None), functions(X)[name]
    v = numbers(X.global_shape, X.dtype, seed)
    x = X.gather(f.prox(X.scatter(v), step))
    slack = 1e-9 * (1 + 1 / step)
    if name == "total_variation":  # the distance to the minimizer, by the gap, and f's slope
        slack = 1e-5 * (1 + 1 / step) * (1 + np.linalg.norm(v))
    least = wanted(np.clip(x, None, None))
    assert np.isfinite(least)
    for k in range(6):
        change = numbers(X.global_shape, X.dtype, 1000 + seed + k) * 10.0 ** -(k % 3)
        for w in (x + change, v + change, 0 * x, x * (1 + 0.1 * k)):
            assert wanted(w) >= least + inner(v - x, w - x) / step - slack


@given(cases())
def test_values(case: tuple[str, TensorSpace, float, int]) -> None:
    name, X, step, seed = case
    f, wanted = MAKERS[name](X, None), functions(X)[name]
    a = numbers(X.global_shape, X.dtype, seed)
    for one in (a, 0.3 * a, X.gather(f.prox(X.scatter(a), step))):
        found = f(X.scatter(one))
        if np.isfinite(found) or name != "user":  # the user's value knows no domain
            np.testing.assert_allclose(found, wanted(one) if name != "user" else one.sum(), 1e-12)


@given(cases())
def test_firmly_non_expansive(case: tuple[str, TensorSpace, float, int]) -> None:
    name, X, step, seed = case
    v, w = (numbers(X.global_shape, X.dtype, s) for s in (seed, seed + 500))
    slack = 1e-5 if name == "total_variation" else 1e-9
    for f in (MAKERS[name](X, None), MAKERS[name](X, None).conjugate()):
        x, y = (X.gather(f.prox(X.scatter(one), step)) for one in (v, w))
        assert inner(x - y, x - y) <= inner(x - y, v - w) + slack * (1 + step**2)


@given(cases())
def test_moreau(case: tuple[str, TensorSpace, float, int]) -> None:
    name, X, step, seed = case
    f, v = MAKERS[name](X, None), X.scatter(numbers(X.global_shape, X.dtype, seed))
    both = f.prox(v, step) + step * f.conjugate().prox(v / step, 1 / step)
    slack = 1e-5 if name == "total_variation" else 1e-12  # it iterates, in other units
    np.testing.assert_allclose(X.gather(both), X.gather(v), atol=slack)
    assert f.conjugate().conjugate() is f


@given(st.integers(0, 99), st.sampled_from([0.1, 1.0, 7.0]))
def test_conjugates_of_norms_are_projections(seed: int, step: float) -> None:
    """Onto the balls of the dual norms, whatever the step."""
    X = TensorSpace((5, 4), Partition((2,)))
    a = numbers((5, 4), float, seed)
    u, s, vh = np.linalg.svd(a, full_matrices=False)
    wanted = {
        prox.l1(0.7): np.clip(a, -0.7, 0.7),
        prox.l2(0.7): a * min(1, 0.7 / np.linalg.norm(a)),
        prox.group(1, 0.7): a * np.minimum(1, 0.7 / np.linalg.norm(a, axis=1, keepdims=True)),
        prox.nuclear(0.7, X): u @ np.diag(np.minimum(s, 0.7)) @ vh,
    }
    for f, projected in wanted.items():
        found = X.gather(f.conjugate().prox(X.scatter(a), step))
        np.testing.assert_allclose(found, projected, atol=1e-12)


# Total variation


@given(st.integers(2, 12), st.integers(0, 99), st.sampled_from([0.05, 0.3, 2.0]))
def test_one_dimension_against_its_dual(n: int, seed: int, step: float) -> None:
    """The dual problem, least squares with bounds, is solved by SciPy's active sets."""
    X = TensorSpace((n,), Partition((1,)))
    v = numbers((n,), float, seed)
    found = prox.total_variation(X, 1.5, niter=2000, rtol=1e-7).prox(X.scatter(v), step)
    D = np.diff(np.eye(n), axis=0)
    dual = scipy.optimize.lsq_linear(1.5 * step * D.T, v, (-1, 1), method="bvls", tol=1e-15)
    np.testing.assert_allclose(np.asarray(found), v - 1.5 * step * D.T @ dual.x, atol=1e-6)


def test_a_looser_tolerance_is_kept() -> None:
    """The result is within rtol ‖v‖ of the minimizer."""
    X = TensorSpace((12, 9), Partition((1, 1)))
    v = X.random(3)
    exact = prox.total_variation(X, 0.4, niter=3000, rtol=1e-7).prox(v, 1.0)
    for rtol in (1e-1, 1e-2, 1e-3):
        found = prox.total_variation(X, 0.4, niter=3000, rtol=rtol).prox(v, 1.0)
        assert 0 < (found - exact).norm() <= rtol * v.norm()


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data())
def test_the_gradient(shape: list[int], data: st.DataObject) -> None:
    grid = tuple(data.draw(st.integers(1, 2)) for _ in shape)
    dtype = data.draw(st.sampled_from(["float32", "float64", "complex128", "int32"]))
    X = TensorSpace(tuple(shape), Partition(grid), dtype)
    op = prox.gradient(X)
    a = X.gather(X.integers(1))
    found = op.codomain.gather(op(X.scatter(a)))
    assert (found == differences(a)).all()
    linop.testing.check_exact(op)
    assert np.linalg.norm(op.to_matrix().toarray(), 2) <= 2 * np.sqrt(len(shape)) + 1e-9


# Workers


@given(st.integers(1, 8), st.sampled_from(sorted(MAKERS)), st.integers(1, 9), st.data())
def test_on_threads(workers: int, name: str, rows: int, data: st.DataObject) -> None:
    kinds = ["float32", "float64"] + ["complex128"] * (name not in proximal.REAL_ONLY)
    dtype, step = data.draw(st.sampled_from(kinds)), data.draw(st.sampled_from([0.1, 1.5]))
    on_threads(workers, proximal.prox_is_that_of_one_process, name, (rows, 3), dtype, step)


@needs_mpi
@ON_RANKS
@given(st.integers(1, 4), st.integers(1, 9), st.sampled_from(sorted(MAKERS)))
def test_on_ranks(ranks: int, rows: int, name: str) -> None:
    on_ranks(ranks, proximal.prox_is_that_of_one_process, name, (rows, 3), "float64", 0.4)


@given(st.integers(1, 8), st.lists(st.integers(1, 9), min_size=1, max_size=3))
def test_gradient_on_threads(workers: int, shape: list[int]) -> None:
    on_threads(workers, proximal.gradient_on_workers, tuple(shape), 3)


@needs_mpi
@ON_RANKS
@given(st.integers(1, 4), st.lists(st.integers(1, 9), min_size=1, max_size=3))
def test_gradient_on_ranks(ranks: int, shape: list[int]) -> None:
    on_ranks(ranks, proximal.gradient_on_workers, tuple(shape), 3)


def test_replicated_regions_count_once() -> None:
    S = Space([Region("a", 2, (0, 1)), Region("b", 3, 1)])
    v = S.vector({"a": np.array([1.0, -2.0]), "b": np.array([3.0, 0, 0])})

    def main(backend: Any) -> list[float]:
        mine = backend.vector(S, v)
        return [prox.l1(2.0)(mine), prox.l2()(prox.l2().prox(mine, 0.1)), prox.box(0, 2)(mine)]

    wanted = [12.0, np.sqrt(14) - 0.1, float("inf")]
    for found in linop.launch(main, 2):
        np.testing.assert_allclose(found, wanted)


# Errors

LINE = TensorSpace((4, 4), Partition((1, 2)))
INTEGERS = TensorSpace((4,), Partition((1,)), int)
COMPLEX = TensorSpace((4,), Partition((1,)), complex)


def none(a: Any, step: float) -> Any:
    return None


@pytest.mark.parametrize(
    ("kind", "words", "call"),
    [
        (
            ArgumentError,
            "l1: sigma: a positive finite number expected, given 0",
            lambda: prox.l1(0),
        ),
        (ArgumentError, "given nan", lambda: prox.l2(np.nan)),
        (ArgumentError, r"l1\(1\): step: .* given -1", lambda: prox.l1().prox(LINE.zeros(), -1)),
        (ArgumentError, "expected a Vector", lambda: prox.l1().prox(np.zeros(3), 1)),  # type: ignore
        (ArgumentError, "expected a Vector", lambda: prox.l1()(np.zeros(3))),  # type: ignore
        (DTypeError, "a floating dtype is expected", lambda: prox.l1()(INTEGERS.zeros())),
        (DTypeError, "not ordered", lambda: prox.box(0, 1).prox(COMPLEX.zeros(), 1)),
        (ArgumentError, "lower is at most upper; given 2 and 1", lambda: prox.box(2, 1)),
        (ArgumentError, "upper is a real number or a Vector", lambda: prox.box(2, "x")),  # type: ignore
        (ArgumentError, "b is a Vector; given ndarray", lambda: prox.squared_l2(1, np.ones(3))),  # type: ignore
        (
            SpaceError,
            "the spaces differ",
            lambda: prox.squared_l2(1, LINE.zeros())(COMPLEX.zeros()),
        ),
        (PartitionError, "dimension 1 .* cut over workers", lambda: prox.group(1)(LINE.zeros())),
        (ShapeError, "no dimension 2 in arrays of 2", lambda: prox.group(2)(LINE.zeros())),
        (ArgumentError, "give dim or labels", prox.group),
        (ArgumentError, "labels are whole numbers", lambda: prox.group(labels=[0.5])),
        (ShapeError, r"labels of shape \(2,\)", lambda: prox.group(labels=[0, 1])(LINE.zeros())),
        (
            PartitionError,
            "the elements of label 0 are in several blocks",
            lambda: prox.group(labels=np.zeros((4, 4), int))(LINE.zeros()),
        ),
        (SpaceError, r"nuclear\(sigma, X, backend\)", lambda: prox.nuclear()(LINE.zeros())),
        (ShapeError, "a matrix expected", lambda: prox.nuclear(1, COMPLEX)),
        (
            ArgumentError,
            "niter is a whole number from 1",
            lambda: prox.total_variation(LINE, niter=0),
        ),
        (SpaceError, "the spaces differ", lambda: prox.total_variation(LINE)(COMPLEX.zeros())),
        (ArgumentError, "has a proximal map and no value", lambda: prox.user(none)(LINE.zeros())),
        (ArgumentError, r"l1\(1\)\*: it has", lambda: prox.l1().conjugate()(LINE.zeros())),
        (ShapeError, "returned NoneType", lambda: prox.user(none).prox(LINE.zeros(), 1)),
        (ArgumentError, "functions expected", lambda: prox.user(3)),  # type: ignore
        (ShapeError, "without dimensions", lambda: prox.gradient(TensorSpace((), Partition(())))),
    ],
)
def test_refused(kind: type[LinopError], words: str, call: Callable[[], object]) -> None:
    with pytest.raises(kind, match=words):
        call()


def test_results_are_memory_of_their_own() -> None:
    S = Space(Region("x", 3))
    v: Vector = S.vector(np.array([0.1, 0.2, 0.3]))
    maps = [prox.box(), prox.box(-1), prox.user(lambda a, step: a), prox.l1(), prox.squared_l2()]
    for f in maps:
        f.prox(v, 1.0)["x"][:] = 9
    assert v["x"].tolist() == [0.1, 0.2, 0.3]
