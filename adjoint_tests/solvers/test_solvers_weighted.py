"""Solvers in spaces of weights and of operators' inner products, against dense solutions of the
weighted problems by NumPy and SciPy; on threads and ranks, against one process."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
from hypothesis import given
from hypothesis import strategies as st

import linop
from linop import LinearOperator, Space
from linop.errors import SpaceError
from support.contracts.weighted_spaces import flat, gram, local, mass_matrix, near, solve_on_workers
from support.requirements import needs_mpi
from support.workers import on_ranks, on_threads

solvers = linop.solvers
DTYPES = ("float64", "complex128")
sizes, seeds = st.integers(2, 12), st.integers(0, 2**16)
dtypes, inners = st.sampled_from(DTYPES), st.sampled_from(["weights", "operator", "none"])


def space(name: str, n: int, dtype: str, inner: str, rng: np.random.Generator) -> Space:
    """A space of one region with an inner product of a kind."""
    X = Space(linop.Region(name, n), dtype)
    if inner == "weights":
        return X.with_inner(rng.uniform(0.2, 5, n))
    if inner == "none":
        return X
    M = mass_matrix(n)
    return X.with_inner(linop.inner_product(local(M, X, X), local(np.linalg.inv(M), X, X)))


def drawn(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    values = rng.standard_normal(shape)
    return values + 1j * rng.standard_normal(shape) if dtype == "complex128" else values


def rectangular(n: int, seed: int, dtype: str, inner: str) -> LinearOperator:
    """An operator of full rank between two spaces of inner products of a kind."""
    rng = np.random.default_rng(seed)
    X, Y = space("x", n, dtype, inner, rng), space("y", n + 4, dtype, "weights", rng)
    return local(drawn(rng, (n + 4, n), dtype) + 3 * np.eye(n + 4, n), X, Y)


def dense(op: LinearOperator) -> np.ndarray:
    found: np.ndarray = op.to_matrix("regions").toarray()
    return found


@given(sizes, seeds, dtypes, inners, st.sampled_from(["cgls", "lsqr", "lsmr"]))
def test_least_squares(n: int, seed: int, dtype: str, inner: str, name: str) -> None:
    """min ‖A x - y‖_Y² + damp² ‖x‖_X²."""
    A = rectangular(n, seed, dtype, inner)
    y = A.codomain.random(seed)
    # LSMR's own limit is n, as SciPy's: orthogonality lost to rounding takes a step or two more.
    close = {"tol": 1e-13} if name == "cgls" else {"atol": 1e-13, "btol": 1e-13}
    found = getattr(solvers, name)(A, y, damp=0.5, **close, maxiter=200)
    M, G, W = dense(A), gram(A.domain), gram(A.codomain)
    wanted = np.linalg.solve(M.conj().T @ W @ M + 0.25 * G, M.conj().T @ W @ flat(y))
    near(flat(found[0]), wanted)


@given(sizes, seeds, dtypes, inners, st.sampled_from(["cg", "minres", "gmres", "bicgstab"]))
def test_normal_equations(n: int, seed: int, dtype: str, inner: str, name: str) -> None:
    """A.H @ A is self-adjoint and positive definite in its space."""
    A = rectangular(n, seed, dtype, inner)
    N = A.H @ A
    b = A.domain.random(seed)
    x, _ = getattr(solvers, name)(N, b, rtol=1e-12)
    near(flat(x), np.linalg.solve(dense(N), flat(b)), 1e-5)


@given(st.integers(4, 12), seeds, dtypes, inners)
def test_spectra(n: int, seed: int, dtype: str, inner: str) -> None:
    """Eigenvalues of the pencil A^H W A - λ G, and singular values, which are their roots."""
    A = rectangular(n, seed, dtype, inner)
    M, G, W = dense(A), gram(A.domain), gram(A.codomain)
    wanted = np.sort(scipy.linalg.eigh(M.conj().T @ W @ M, G, eigvals_only=True))[::-1]
    values, vectors = solvers.lanczos(A.H @ A, 2, which="LA")
    near(values[::-1], wanted[:2])
    near([one.inner(other) for one in vectors for other in vectors], [1, 0, 0, 1])
    _, values, _ = solvers.lanczos(A, 2, singular=True)
    near(values[::-1], np.sqrt(wanted[:2]))


@given(sizes, seeds, dtypes, inners)
def test_gauss_newton_and_lbfgs(n: int, seed: int, dtype: str, inner: str) -> None:
    """The minimizer of ‖A x - y‖²/2 + ‖x‖²/2, of which the gradient is A.H (A x - y) + x."""
    A = rectangular(n, seed, dtype, inner)
    y = A.codomain.random(seed)
    M, G, W = dense(A), gram(A.domain), gram(A.codomain)

    def value(x: linop.Vector) -> tuple[float, linop.Vector]:
        rest = A(x) - y
        value = (rest.inner(rest).real + x.inner(x).real) / 2
        return value, A.H(rest) + x

    found = solvers.lbfgs(value, A.domain.zeros(), maxiter=400, rtol=1e-10)
    wanted = np.linalg.solve(M.conj().T @ W @ M + G, M.conj().T @ W @ flat(y))
    near(flat(found.x), wanted, 1e-4)
    found = solvers.gauss_newton(lambda x: A(x) - y, lambda x: A, A.domain.random(1))
    near(flat(found.x), np.linalg.solve(M.conj().T @ W @ M, M.conj().T @ W @ flat(y)), 1e-4)


@given(st.integers(2, 4), seeds, st.sampled_from(["weights", "none"]))
def test_fista_with_weights(n: int, seed: int, inner: str) -> None:
    """‖A x - y‖²/2 + Σ g_i |x_i|: g_i times the optimality of element i."""
    A = rectangular(n, seed, "float64", inner)
    y = A.codomain.random(seed)
    f = solvers.prox.l1(0.5)
    x = solvers.fista(A, y, f, niter=1000, tol=1e-10)[0]
    slope = flat(A.H(A(x) - y))
    values = flat(x)
    assert (np.abs(slope) <= 0.5 + 1e-3).all()
    near(slope[values != 0], -0.5 * np.sign(values[values != 0]), 1e-3)
    near(f(x), 0.5 * np.diag(gram(A.domain)) @ np.abs(values))


@given(sizes, seeds, dtypes, inners)
def test_l2_and_squares(n: int, seed: int, dtype: str, inner: str) -> None:
    """Their proximal maps are of the space's norm."""
    A = rectangular(n, seed, dtype, inner)
    v, b = A.domain.random(seed), A.codomain.random(seed)
    size = np.sqrt((flat(v).conj() @ gram(A.domain) @ flat(v)).real)
    near(v.norm(), size, 1e-12)
    near(solvers.prox.l2(2.0)(v), 2 * size, 1e-12)
    near(flat(solvers.prox.l2(0.5)._prox(v, 1.0)), flat(v) * max(0, 1 - 0.5 / size), 1e-12)
    f = solvers.prox.squared_l2(3.0, b, A, niter=500, rtol=1e-13)
    M, G, W = dense(A), gram(A.domain), gram(A.codomain)
    left, right = 3 * M.conj().T @ W @ M + G, 3 * M.conj().T @ W @ flat(b) + G @ flat(v)
    near(flat(f.prox(v, 1.0)), np.linalg.solve(left, right), 1e-5)


def test_proximal_maps_that_are_not_known() -> None:
    X = linop.TensorSpace((4, 2), linop.Partition((1,)), inner=2.0)
    M = mass_matrix(4)
    R = Space(linop.Region("x", 4))
    Y = R.with_inner(linop.inner_product(local(M, R, R)))
    prox = solvers.prox
    for f, where in (
        (prox.group(0), X),
        (prox.nuclear(), Space(linop.Region("x", (2, 2)), inner=2.0)),
        (prox.total_variation(X), X),
        (prox.l1(), Y),
        (prox.box(0, 1), Y),
    ):
        with pytest.raises(SpaceError, match="its proximal map is not known for the inner product"):
            f.prox(where.zeros(), 1.0)
    near(flat(prox.box(0, 1).prox(X.random(0), 1.0)), np.clip(flat(X.random(0)), 0, 1))


# On workers


@pytest.mark.parametrize("workers", [1, 3])
def test_on_threads(workers: int) -> None:
    on_threads(workers, solve_on_workers, workers)


@needs_mpi
def test_on_ranks() -> None:
    on_ranks(2, solve_on_workers, 2)
