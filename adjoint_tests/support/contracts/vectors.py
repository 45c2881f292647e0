"""Contracts of vectors, as SPMD programs: inner products, norms and comparisons of every dtype, and
least squares, are those of one process. Each is ``contract(backend, *arguments)``."""

from __future__ import annotations

import math
from fractions import Fraction
from importlib.util import find_spec
from typing import Any

import numpy as np

import linop
from linop import Partition, Region, Space, TensorSpace
from linop.backends import Backend
from linop.errors import ArgumentError, LinopError, SpaceError
from linop.spaces.exact import Gaussian, exact

INTEGERS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
FLOATS = ("float16", "float32", "float64", "longdouble", "complex64", "complex128", "clongdouble")
OTHERS = ("bfloat16",) if find_spec("ml_dtypes") else ()
DTYPES = (*INTEGERS, *FLOATS, *OTHERS)


def dtype_of(name: str) -> np.dtype[Any]:
    if name in OTHERS:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)


def drawn(size: int, dtype: np.dtype[Any], seed: int) -> np.ndarray:
    """Numbers of a dtype: for integers from the whole of its range, ends and zero more often."""
    rng = np.random.default_rng(seed)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        some = rng.integers(info.min, info.max, size, dtype, endpoint=True)
        ends = rng.choice(np.array([info.min, info.max, 0, 1], dtype), size)
        return np.where(rng.random(size) < 0.5, some, ends)
    values = rng.standard_normal(size) * 2.0 ** rng.integers(-6, 6, size)
    if dtype.kind == "c":
        values = values + 1j * rng.standard_normal(size)
    array: np.ndarray = values.astype(dtype)
    return array


def products(x: np.ndarray, y: np.ndarray) -> list[Any]:
    """conj(x) y for each element, exactly."""
    pairs = zip(x.ravel(), y.ravel(), strict=True)
    return [_conjugate(exact(a)) * exact(b) for a, b in pairs]


def _conjugate(value: Any) -> Any:
    return value.conjugate() if isinstance(value, Gaussian) else value


def is_inner(found: Any, x: np.ndarray, y: np.ndarray) -> None:
    """Assert that a number is <x, y>: exactly for integers; else up to the rounding of a sum in
    double precision, or in long double."""
    terms = products(x, y)
    wanted = sum(terms, Fraction(0))
    if x.dtype.kind in "iu":
        assert type(found) is int
        assert found == wanted
        return
    bits = np.finfo(np.longdouble if x.dtype.itemsize > 8 and x.dtype.kind == "f" else float).nmant
    if x.dtype == np.clongdouble:
        bits = np.finfo(np.longdouble).nmant
    most = sum(abs(Fraction(t.real)) + abs(Fraction(t.imag)) for t in terms)
    for part in ("real", "imag"):
        error = abs(Fraction(exact(getattr(found, part))) - Fraction(getattr(wanted, part)))
        assert error <= (len(terms) + 4) * Fraction(2) ** -bits * most


def is_norm(found: float, x: np.ndarray) -> None:
    """Assert that a number is ‖x‖, up to the same rounding."""
    assert isinstance(found, float | np.longdouble)
    square = Fraction(sum(Fraction(t.real) for t in products(x, x)))
    error = abs(Fraction(exact(found)) ** 2 - square)
    assert error <= (x.size + 8) * Fraction(2) ** -52 * square


def products_of_blocks(backend: Backend, name: str, size: int, seed: int) -> None:
    """Inner products, norms and equality of distributed vectors are those of the global arrays."""
    workers, dtype = backend.workers or 1, dtype_of(name)
    X = TensorSpace((size,), Partition((workers,)), dtype)
    x, y = drawn(size, dtype, seed), drawn(size, dtype, seed + 1)
    v, w = (backend.vector(X, X.scatter(one)) for one in (x, y))
    is_inner(v.inner(w), x, y)
    is_norm(v.norm(), x)
    assert v.equals(backend.vector(X, X.scatter(x)))
    assert v.equals(w) is bool((x == y).all())
    for region in X.on(backend.worker or 0):
        assert (v == w)[region.name].tolist() == (x == y)[X.block(region)].tolist()


def one_element_differs(backend: Backend, size: int, where: int) -> None:
    """`equals` is False on every worker if one worker has another element."""
    X = TensorSpace((size,), Partition((backend.workers or 1,)))
    x = np.arange(float(size))
    y = x.copy()
    y[where] += 1
    v, w = (backend.vector(X, X.scatter(one)) for one in (x, y))
    assert v.equals(w) is False
    assert v.equals(v.copy()) is True


def least_squares(backend: Backend, size: int) -> tuple[linop.LinearOperator, TensorSpace]:
    """An operator on blocks with neighbours, and its space."""
    X = TensorSpace((size,), Partition((backend.workers or 1,)))
    H = linop.halo_exchange(X, 3, padding=1)
    weights = linop.local_operators.diagonal(np.arange(1.0, X.region(0).size + 1), X.regions[0])
    some = linop.direct_sum(weights, *map(linop.identity, map(Space, X.regions[1:])))
    return H.H @ H + some, X


def one_worker_stops_all(backend: Backend, size: int, stopper: int, at: int, how: str) -> None:
    """A callback of one worker ends the iteration on all of them, with the same x."""
    op, X = least_squares(backend, size)
    plan, y = op.compile(backend), X.random(0)
    calls = []

    def ask(x: Any) -> bool:
        calls.append(x)
        if len(calls) < at:
            return False
        if how == "raise":
            raise StopIteration
        return True

    own = backend.worker == stopper
    mine = backend.vector(X, y)
    x, istop, iterations, *_ = linop.solvers.cgls(plan, mine, tol=0, callback=ask if own else None)
    assert (istop, iterations) == (3, at)
    assert x.equals(linop.solvers.cgls(plan, mine, tol=0, niter=at)[0])
    assert len(calls) == at * own


def says_where_it_is_not_finite(backend: Backend, size: int, where: int, value: float) -> None:
    """NaN on one worker is the same error on all."""
    op, X = least_squares(backend, size)
    plan, y = op.compile(backend), np.ones(size)
    y[where] = value
    said = refused(ArgumentError, plan, backend.vector(X, X.scatter(y)))
    region = next(r for r in X if X.block(r)[0].start <= where < X.block(r)[0].stop)
    place = f"[{where - X.block(region)[0].start}] of region {region.name!r}"
    assert f"the data y is not finite: {value} at {place} (1 of {size} elements" in said
    said = refused(
        ArgumentError, plan, backend.vector(X, X.zeros()), backend.vector(X, X.scatter(y))
    )
    assert f"the initial guess x0 is not finite: {value} at {place}" in said


def vectors_of_one_process(backend: Backend, size: int) -> None:
    """A vector that is not the backend's is refused before a message, with the cure; of one worker
    it is as good."""
    op, X = least_squares(backend, size)
    plan, y = op.compile(backend), X.scatter(np.arange(float(size)))
    wanted = linop.solvers.cgls(op, y)[0]
    if backend.workers == 1:
        found = linop.solvers.cgls(plan, y)[0]
    else:
        for given in ((y,), (backend.vector(X, y), y)):
            said = refused(SpaceError, plan, *given)
            name = "y" if len(given) == 1 else "x0"
            assert f"backend.vector(Op.{'codomain' if name == 'y' else 'domain'}, {name})" in said
        found = linop.solvers.cgls(plan, backend.vector(X, y))[0]
    for name, array in found.arrays.items():
        np.testing.assert_allclose(array, wanted[name], rtol=1e-12)


def refused(kind: type[LinopError], plan: Any, *given: Any) -> str:
    """The text of the error that `cgls` raises."""
    try:
        linop.solvers.cgls(plan, *given)
    except kind as error:
        return str(error)
    raise AssertionError("nothing was refused")


def space_of(name: str, size: int) -> Space:
    """A space of two regions, one of them replicated."""
    half = size // 2
    return Space([Region("a", half), Region("b", size - half, (0, 1))], dtype_of(name))


def scaled(power: int, norm: float) -> float:
    """2**power times a norm."""
    return math.ldexp(norm, power)


def arithmetic(backend: Backend) -> None:
    """Norms and products of what NumPy's functions compute element by element, on all workers."""
    X = TensorSpace((3, 5), Partition((backend.workers,)), "c16")
    v, w = (backend.vector(X, X.random(seed)) for seed in (0, 1))
    a, b = (X.gather(X.random(seed)) for seed in (0, 1))
    u, wanted = np.exp(-abs(v * w)) + 1, np.exp(-abs(a * b)) + 1
    np.testing.assert_allclose(np.linalg.norm(u), np.linalg.norm(wanted), rtol=1e-12)
    np.testing.assert_allclose((v * w).dot(v.conj()), (a * b * a.conj()).sum(), rtol=1e-12)
    assert u.equals(1 + np.exp(-np.abs(w * v)))
