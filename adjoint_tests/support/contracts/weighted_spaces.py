"""Contracts of inner products: adjoints and inner products on any backend are those of the whole
vectors in one process, and of their matrices."""

from __future__ import annotations

from typing import Any

import numpy as np

import linop
from linop import LinearOperator, Space, Vector
from linop.backends import Backend
from linop.local_operators import matrix
from linop.testing.describing import Description
from support.operators.catalogue import build

FLOATS = ("float64", "float32", "complex128", "complex64")


def powers_of_two(space: Space, seed: int, most: int = 2) -> dict[str, np.ndarray]:
    """Weights by which products of whole numbers stay exact, by region name."""
    rng = np.random.default_rng(seed)
    real = np.zeros((), space.dtype).real.dtype
    return {
        region.name: np.asarray(2.0 ** rng.integers(-most, most, region.shape, endpoint=True), real)
        for region in space.regions
    }


def weighted(op: LinearOperator, seed: int) -> LinearOperator:
    """The operator between the same regions, with weights on the domain, the codomain, or both."""
    X, Y, sides = op.domain, op.codomain, seed % 3
    X2 = X if sides == 1 else X.with_inner(powers_of_two(X, seed))
    same = X == Y and not sides
    Y2 = X2 if same else Y if sides == 2 else Y.with_inner(powers_of_two(Y, seed + 1))
    return linop.identity(Y, Y2) @ op @ linop.identity(X2, X)


def gram(space: Space) -> np.ndarray:
    """G, of what `Space.inner_product` was given, in the order of regions."""
    inner: Any = space.inner_product
    if inner is None:
        return np.eye(space.size)
    if hasattr(inner, "G"):
        return inner.G.to_matrix("regions").toarray()
    each = [np.broadcast_to(inner.of(space, r), r.shape).ravel() for r in space.regions]
    return np.diag(np.concatenate([np.zeros(0), *each]).astype(np.float64))


def adjoint_of_matrix(op: LinearOperator) -> np.ndarray:
    """G_X^-1 A^H G_Y, by NumPy."""
    A = op.to_matrix("regions").toarray()
    found: np.ndarray = np.linalg.solve(gram(op.domain), A.conj().T @ gram(op.codomain))
    return found


def mass_matrix(n: int) -> np.ndarray:
    """The mass matrix of linear elements on n nodes inside, of width 1: well conditioned."""
    return (4 * np.eye(n) + np.eye(n, k=1) + np.eye(n, k=-1)) / 6


def with_mass(X: linop.TensorSpace, dim: int = 0) -> linop.TensorSpace:
    """The space with the mass matrix of its first dimension, a stencil, and a Chebyshev inverse."""
    step = tuple(int(d == dim) for d in range(X.ndim))
    back = tuple(-k for k in step)
    mass = linop.stencil(X, {(0,) * X.ndim: 2 / 3, step: 1 / 6, back: 1 / 6}, name="M")
    return X.with_inner(linop.inner_product(mass, spectrum=(1 / 3, 1)))


def agrees(backend: Backend, op: LinearOperator, seed: int, tolerance: float = 0.0) -> None:
    """Plans of an operator and its adjoint, and inner products and norms of vectors on workers, are
    those of one process."""
    x, y = op.domain.integers(seed), op.codomain.integers(seed + 1)
    here, there = backend.vector(op.domain, x.arrays), backend.vector(op.codomain, y.arrays)
    plan = op.compile(backend)
    forward, back = plan(here), plan.H(there)
    again = op.H.compile(backend)(there)
    wanted = op.H(y)
    for name, array in back.arrays.items():
        _near(array, wanted[name], tolerance)
        assert (array == again[name]).all()
    left, right = forward.inner(there), here.inner(back)
    _near(left, op(x).inner(y), tolerance)
    size = max(1.0, abs(left), forward.norm() * there.norm(), here.norm() * back.norm())
    assert abs(left - right) <= tolerance * size, (left, right)
    _near(np.linalg.norm(here), x.norm(), tolerance)


def mass_on_workers(backend: Backend, shape: tuple[int, ...], workers: int, dtype: str) -> None:
    """The same in spaces of the mass matrix, whose products need messages."""
    grid = linop.Partition((workers, *(1,) * (len(shape) - 1)))
    X = with_mass(linop.TensorSpace(shape, grid, dtype))
    R = linop.repartition(X.euclidean, linop.Partition((1,) * (len(shape) - 1) + (workers,)))
    into = linop.identity(X, X.euclidean)
    for op in (R @ into, into @ linop.riesz(X), linop.stencil(X, {(1,) * len(shape): 2.0})):
        agrees(backend, op, 1, 256 * float(np.finfo(dtype).eps))


def _near(given: Any, wanted: Any, tolerance: float) -> None:
    error = np.abs(np.asarray(given) - np.asarray(wanted))
    size = max(1.0, float(np.abs(wanted).max(initial=0)) if np.ndim(wanted) else abs(wanted))
    assert np.max(error, initial=0) <= tolerance * size, (given, wanted)


def local(A: np.ndarray, X: Space, Y: Space) -> LinearOperator:
    """A matrix between spaces of one region."""
    return matrix(A, X, Y)


def flat(vector: Vector) -> np.ndarray:
    """All elements in the order of regions."""
    return vector.space.flatten(vector, "regions")


def of_the_catalogue(
    backend: Backend,
    name: str,
    description: Description,
    weights: int,
    seed: int,
    tolerance: float,
) -> None:
    """`agrees`, of an operator of the catalogue with weights."""
    agrees(backend, weighted(build(name, description), weights), seed, tolerance)


def near(given: Any, wanted: Any, rtol: float = 1e-6) -> None:
    """Equal but for a part of the element, and of the largest one."""
    np.testing.assert_allclose(given, wanted, rtol=rtol, atol=rtol * np.abs(wanted).max(initial=1))


def solve_on_workers(backend: Backend, workers: int) -> None:
    """CG and LSQR of a stencil on tensors of weights, and of mass matrices: the iterations of one
    process."""
    grid = linop.Partition((workers,))
    X = linop.TensorSpace((12,), grid, inner=np.linspace(1, 2, 12))
    mass = linop.stencil(X.euclidean, {0: 2 / 3, 1: 1 / 6, -1: 1 / 6})
    Y = X.with_inner(linop.inner_product(mass, spectrum=(1 / 3, 1)))
    for space in (X, Y):
        A = linop.stencil(space, {0: 2.5, 1: -1.0})
        y = space.random(1)
        plan, there = A.compile(backend), backend.vector(space, y.arrays)
        found, wanted = linop.solvers.lsqr(plan, there), linop.solvers.lsqr(A, y)
        assert abs(found.nit - wanted.nit) <= 1
        for name, array in found.x.arrays.items():
            near(array, wanted.x[name])
        if space is Y:  # as LSQR, with more steps to compile
            continue
        N = A.H @ A
        found, wanted = linop.solvers.cg(N.compile(backend), there), linop.solvers.cg(N, y)
        assert abs(found.nit - wanted.nit) <= 1
        for name, array in found.x.arrays.items():
            near(array, wanted.x[name], 1e-3)
