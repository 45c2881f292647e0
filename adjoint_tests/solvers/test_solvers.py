"""The public solver `cgls`, against PyLops, SciPy and the normal equations, and on workers.

Tolerances: the problems have condition numbers below 10, so that ten digits survive every way of
rounding that orders of summation bring in.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pylops
import pytest
import scipy.sparse.linalg
from pylops.optimization.basic import cgls as pylops_cgls

import linop
from linop import LinearOperator, Partition, Region, Space, TensorSpace, Vector
from linop.backends import Backend
from linop.errors import ArgumentError, SpaceError

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
TIGHT = {"niter": 60, "tol": 1e-26}
"""Until nothing changes any more."""

each_dtype = pytest.mark.parametrize("dtype", [np.float64, np.complex128])
each_damp = pytest.mark.parametrize("damp", [0.0, 0.7])


def tall(dtype: Any = np.float64, workers: int = 3) -> LinearOperator:
    """Local matrices after a halo exchange: 5 equations a worker for its 3 unknowns and halo."""
    X = TensorSpace((3 * workers,), Partition((workers,)), dtype)
    H = linop.halo_exchange(X, 3, padding=1)
    rng = np.random.default_rng(7)
    blocks = []
    for region in H.codomain:
        shape = (5, region.size)
        values = rng.standard_normal(shape) + 1j * rng.standard_normal(shape)
        values = (values if dtype == np.complex128 else values.real) + 2 * np.eye(*shape)
        target = Space(Region(f"y{region.workers[0]}", 5, region.workers), dtype)
        blocks.append(
            linop.local_operators.matrix(values.astype(dtype), Space(region, dtype), target)
        )
    return linop.direct_sum(*blocks) @ H


def dense(op: LinearOperator) -> np.ndarray:
    array: np.ndarray = op.to_matrix().toarray()
    return array


def minimum(op: LinearOperator, y: Vector, damp: float) -> np.ndarray:
    """The solution of the normal equations."""
    A = dense(op)
    normal = A.conj().T @ A + damp**2 * np.eye(A.shape[1])
    solution: np.ndarray = np.linalg.solve(normal, A.conj().T @ op.codomain.flatten(y))
    return solution


@each_dtype
@each_damp
@pytest.mark.parametrize("niter", [0, 1, 4, 30])
def test_iterates_are_those_of_pylops(dtype: Any, damp: float, niter: int) -> None:
    op = tall(dtype)
    y = op.codomain.random(1)
    x, istop, iterations, rnorm, damped, cost = linop.solvers.cgls(
        op, y, niter=niter, damp=damp, tol=1e-9
    )
    other = pylops.MatrixMult(dense(op), dtype=dtype)
    flat = op.codomain.flatten(y)
    wanted = pylops_cgls(other, flat, niter=niter, damp=damp, tol=1e-9)
    np.testing.assert_allclose(op.domain.flatten(x), wanted[0], **CLOSE)
    assert (istop, iterations) == wanted[1:3]
    np.testing.assert_allclose(cost, wanted[5], **CLOSE)
    # PyLops' fourth is the squared gradient, whatever its documentation says.
    assert rnorm == cost[-1]
    np.testing.assert_allclose(damped, wanted[4], **CLOSE)


@each_dtype
@each_damp
def test_iterates_from_a_guess_are_those_of_pylops(dtype: Any, damp: float) -> None:
    """With damping, they are those of [A; damp I] x = [y; 0]: PyLops' own first gradient has damp
    where damp² belongs."""
    op = tall(dtype)
    y, x0 = op.codomain.random(1), op.domain.random(2)
    x, istop, iterations, _, damped, _ = linop.solvers.cgls(op, y, x0, niter=4, damp=damp)
    stacked = np.vstack([dense(op), damp * np.eye(op.shape[1])]).astype(dtype)
    other = pylops.MatrixMult(stacked, dtype=dtype)
    flat = np.concatenate([op.codomain.flatten(y), np.zeros(op.shape[1], dtype)])
    wanted = pylops_cgls(other, flat, op.domain.flatten(x0), niter=4)
    np.testing.assert_allclose(op.domain.flatten(x), wanted[0], **CLOSE)
    assert (istop, iterations) == wanted[1:3] == (2, 4)
    np.testing.assert_allclose(damped, wanted[5][-1], **CLOSE)


@each_dtype
@each_damp
@pytest.mark.parametrize("guess", [False, True])
def test_the_solution_is_that_of_the_normal_equations(dtype: Any, damp: float, guess: bool) -> None:
    op = tall(dtype)
    y = op.codomain.random(1)
    x0 = op.domain.random(2) if guess else None
    x, istop, *_ = linop.solvers.cgls(op, y, x0, damp=damp, **TIGHT)
    assert istop == 1
    np.testing.assert_allclose(op.domain.flatten(x), minimum(op, y, damp), **CLOSE)


@each_damp
def test_the_solution_is_that_of_lsqr(damp: float) -> None:
    op = tall()
    y = op.codomain.random(1)
    x, _, _, rnorm, damped, _ = linop.solvers.cgls(op, y, damp=damp, **TIGHT)
    options = {"damp": damp, "atol": 1e-14, "btol": 1e-14}
    found = scipy.sparse.linalg.lsqr(op.to_scipy(), op.codomain.flatten(y), **options)
    np.testing.assert_allclose(op.domain.flatten(x), found[0], **CLOSE)
    np.testing.assert_allclose((rnorm, damped), found[3:5], **CLOSE)


@each_damp
def test_a_consistent_system_is_solved(damp: float) -> None:
    op = tall()
    truth = op.domain.integers(3)
    x, istop, *_, cost = linop.solvers.cgls(op, op(truth), damp=damp, **TIGHT)
    assert istop == 1
    if not damp:
        np.testing.assert_allclose(op.domain.flatten(x), op.domain.flatten(truth), **CLOSE)
        assert cost[-1] < 1e-10


def same_bits(given: Vector, wanted: Vector) -> None:
    """Every region held in `given` has the bits it has in `wanted`."""
    for name, array in given.arrays.items():
        assert array.tobytes() == wanted[name].tobytes()


@each_damp
@pytest.mark.parametrize("guess", [False, True])
def test_workers_find_what_one_process_finds(damp: float, guess: bool) -> None:
    op = tall()
    y, x0 = op.codomain.random(1), op.domain.random(2)

    def solved(plan: Any, y: Vector, x0: Vector) -> Any:
        return linop.solvers.cgls(plan, y, x0 if guess else None, damp=damp, niter=7)

    def main(backend: Backend) -> Any:
        mine = backend.vector(op.codomain, y.arrays), backend.vector(op.domain, x0.arrays)
        return solved(op.compile(backend), *mine)

    x, *said = solved(op, y, x0)
    for name in ("threads", "reference"):
        alone, *words = solved(op.compile(linop.backends.get(name)), y, x0)
        np.testing.assert_allclose(op.domain.flatten(alone), op.domain.flatten(x), **CLOSE)
        np.testing.assert_allclose(words[4], said[4], **CLOSE)
        results = linop.launch(main, workers=3, backend=name)
        for worker, (part, *told) in enumerate(results):
            assert list(part.arrays) == [r.name for r in op.domain.on(worker)]
            same_bits(part, alone)
            assert told == words  # every worker is told the same


def test_workers_without_a_part_take_part() -> None:
    op = tall(workers=2)
    y = op.codomain.random(1)

    def main(backend: Backend) -> Any:
        x, *said = linop.solvers.cgls(op.compile(backend), backend.vector(op.codomain, y.arrays))
        return list(x.arrays), said

    results = linop.launch(main, workers=4)
    assert [names for names, _ in results] == [["x@0"], ["x@1"], [], []]
    assert all(said == results[0][1] for _, said in results)


def test_arguments_are_not_changed() -> None:
    op = tall()
    y, x0 = op.codomain.random(1), op.domain.random(2)
    before = y.copy(), x0.copy()
    x, *_ = linop.solvers.cgls(op, y, x0, niter=0)
    for array in x.arrays.values():
        array += 1
    linop.solvers.cgls(op, y, x0, niter=3, damp=1.0)
    same_bits(y, before[0])
    same_bits(x0, before[1])


def test_nothing_is_left_to_do() -> None:
    op = tall()
    x, istop, iterations, rnorm, damped, cost = linop.solvers.cgls(op, op.codomain.zeros())
    assert (istop, iterations, rnorm, damped, cost) == (1, 0, 0, 0, [0])
    assert not op.domain.flatten(x).any()


def test_callback_and_show(capsys: pytest.CaptureFixture[str]) -> None:
    op = tall()
    y = op.codomain.random(1)
    seen: list[Vector] = []
    x, *_ = linop.solvers.cgls(op, y, niter=3, callback=seen.append)
    assert len(seen) == 3
    same_bits(seen[-1], x)
    same_bits(seen[0], linop.solvers.cgls(op, y, niter=1)[0])
    assert capsys.readouterr().out == ""

    def main(backend: Backend) -> None:
        linop.solvers.cgls(
            op.compile(backend), backend.vector(op.codomain, y.arrays), niter=3, show=True
        )

    linop.launch(main, workers=3)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines] == [["cgls", str(k), "residual"] for k in (1, 2, 3)]


@pytest.mark.parametrize("y", ["ones", None, 3])
def test_data_that_is_no_vector(y: Any) -> None:
    with pytest.raises(ArgumentError, match=r"cgls: expected a Vector, given .*backend\.vector"):
        linop.solvers.cgls(tall(), y)


def test_data_and_guess_of_other_spaces() -> None:
    op = tall()
    with pytest.raises(SpaceError, match="the spaces differ"):
        linop.solvers.cgls(op, op.domain.random(0))
    with pytest.raises(SpaceError, match="the spaces differ"):
        linop.solvers.cgls(op, op.codomain.random(0), op.codomain.random(0))


def test_a_part_of_a_vector_needs_a_backend() -> None:
    op = tall()
    y = op.codomain.random(1)

    def main(backend: Backend) -> None:
        mine = op.codomain.vector({r.name: y[r.name] for r in op.codomain.on(backend.worker or 0)})
        linop.solvers.cgls(op.compile(backend), mine)

    # The plan makes its results with the backend, but the data's norm is wanted first or last.
    with pytest.raises(SpaceError, match=r"for one worker's part backend\.vector\(space, arrays\)"):
        linop.launch(main, workers=3)
