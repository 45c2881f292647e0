"""Updates of vectors in place: the same bits as in new memory, whichever arrays they are of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import linop
from linop import Region, Space, Vector
from linop.solvers import cg, cgls, fista, prox
from linop.solvers.updates import beyond, minus, plus, sum_of_moduli
from support.contracts import interop

SIZES = [(), (0,), (7,), (3, 5), (32768,), (32769,), (300, 333)]


@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
def test_the_same_bits(shape: tuple[int, ...], dtype: str) -> None:
    space = Space(Region("x", shape), dtype)
    x, y = space.random(0), space.random(1)
    for a in (-0.3, 1.7 + 0.2j if dtype == "complex64" else 1e30):
        wanted = plus(y, a, x)
        for into in ("y", "x"):
            mine, other = y.copy(), x.copy()
            found = plus(mine, a, other, mine if into == "y" else other)
            kept, memory = (other, mine) if into == "y" else (mine, other)
            assert _bits(found) == _bits(wanted)
            assert np.shares_memory(found["x"], memory["x"]) or not found.space.size
            assert _bits(kept) == _bits(x if into == "y" else y)


@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
def test_differences_and_extrapolations(shape: tuple[int, ...], dtype: str) -> None:
    """In new memory, in one of the two, and in another vector's, whatever is there."""
    space = Space(Region("x", shape), dtype)
    x, y = space.random(0), space.random(1)
    wanted, beyond_x = y - x, plus(x, 0.7, x - y)
    for into in ("none", "y", "x", "other"):
        mine, other, third = y.copy(), x.copy(), 3 * x
        room = {"none": None, "y": mine, "x": other, "other": third}[into]
        found = minus(mine, other, room)
        assert _bits(found) == _bits(wanted)
        assert room is None or np.shares_memory(found["x"], room["x"]) or not space.size
    for room in (None, 3 * x):
        found = beyond(x, 0.7, y, room)
        assert _bits(found) == _bits(beyond_x)
        assert room is None or np.shares_memory(found["x"], room["x"]) or not space.size


@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
def test_soft_thresholds_and_sums_of_moduli(shape: tuple[int, ...], dtype: str) -> None:
    a = Space(Region("x", shape), dtype).random(2)["x"]
    found = prox.l1(0.3).prox(Space(Region("x", shape), dtype).vector(a), 1.0)["x"]
    wanted = a * np.maximum(1 - 0.3 / np.maximum(abs(a), 1e-30), 0)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6 * (1 + abs(a).max(initial=0)))
    assert found.dtype == a.dtype and found.shape == a.shape
    np.testing.assert_allclose(sum_of_moduli(a), np.abs(a).astype(float).sum(), rtol=1e-12)
    np.testing.assert_allclose(sum_of_moduli(a.T), sum_of_moduli(a), rtol=1e-12)


def test_functions_keep_what_they_return() -> None:
    """FISTA overwrites results of operators and plans, and those of nobody else: here a function
    that returns the same array each time, and one that returns its argument."""
    X = Space(Region("x", 4))
    y = X.vector(np.array([3.0, -1.0, 0.5, 2.0]))

    class Same:
        domain = codomain = X

        def __call__(self, v: Vector) -> Vector:
            return v

        @property
        def H(self) -> Same:
            return self

    wanted = fista(linop.identity(X), y, prox.l1(0.1), tau=0.5, niter=9, tol=0)
    found = fista(Same(), y, prox.l1(0.1), tau=0.5, niter=9, tol=0)
    assert _bits(found.x) == _bits(wanted.x) and found.cost == wanted.cost
    assert y["x"].tolist() == [3.0, -1.0, 0.5, 2.0]


def _bits(vector: Vector) -> bytes:
    return np.ascontiguousarray(vector["x"]).tobytes()


@pytest.mark.parametrize("into", [0, 1])
def test_arrays_with_gaps(into: int) -> None:
    space = Space(Region("x", (300, 200)))
    x, y = (space.vector(space.random(k)["x"].T.copy().T) for k in (0, 1))
    wanted = plus(y, 0.7, x)
    found = plus(y, 0.7, x, (y, x)[into])
    assert (found["x"] == wanted["x"]).all()


@pytest.mark.parametrize("solver", ["cg", "cgls"])
def test_arguments_are_left_as_they_are(solver: str) -> None:
    """b, x0, and what a preconditioner returns, though it be its argument or its own."""
    A, _ = interop.laplacian((1, 1))
    b, x0 = A.domain.random(0), A.domain.random(1)
    given = b.copy(), x0.copy()
    kept: list[Any] = []

    def same(r: Vector) -> Vector:
        kept.append((r, r.copy()))
        return r

    solve = cgls if solver == "cgls" else lambda *a, **k: cg(*a, M=same, rtol=1e-12, **k)
    seen: list[tuple[Vector, Vector]] = []
    found = solve(A, b, x0, callback=lambda x: seen.append((x, x.copy())))
    assert b.equals(given[0]) and x0.equals(given[1])
    assert all(x.equals(then) for x, then in seen) and len(seen) == found.nit
    again = solve(A, b, x0)
    assert again.x.equals(found.x) and again.residuals == found.residuals
