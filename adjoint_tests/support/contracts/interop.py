"""Contracts of plans as other libraries' operators, as SPMD programs on two or four workers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.optimize
import scipy.sparse.linalg as sl

import linop
from linop import LinearOperator, Partition, TensorSpace, Vector
from linop.backends import Backend
from linop.errors import ArgumentError, DTypeError


def laplacian(grid: tuple[int, int], dtype: Any = np.float64) -> tuple[LinearOperator, np.ndarray]:
    """A symmetric positive definite operator on a cut grid, and its matrix by Kronecker sums."""
    m, n = 6, 5
    X = TensorSpace((m, n), Partition(grid), dtype)
    whole = linop.repartition(X, Partition((1, 1)))
    T = [2 * np.eye(k) - np.eye(k, k=1) - np.eye(k, k=-1) for k in (m, n)]
    M = (np.kron(T[0], np.eye(n)) + np.kron(np.eye(m), T[1])).astype(dtype)
    return whole.H @ linop.local_operators.matrix(M, whole.codomain, whole.codomain) @ whole, M


def solvers_in_step(backend: Backend) -> None:
    """SciPy's solvers on every worker: each has the whole solution, in the tensor's order."""
    A, M = laplacian((2, backend.workers // 2))
    F = linop.interop.scipy(A.compile(backend))
    b = np.arange(1.0, 31.0)
    assert (F.matmat(np.eye(30)) == M).all() and (F.H.matmat(np.eye(30)) == M.T).all()
    x, info = sl.cg(F, b, rtol=1e-12)
    assert info == 0
    np.testing.assert_allclose(M @ x, b, rtol=1e-8)
    top = sl.eigsh(F, k=2, v0=b, return_eigenvectors=False)
    np.testing.assert_allclose(top, np.linalg.eigvalsh(M)[-2:])
    found = scipy.optimize.minimize(
        lambda m: 0.5 * m @ (F @ m) - b @ m,
        np.zeros(30),
        jac=lambda m: F.rmatvec(m) - b,
        options={"gtol": 1e-5},
    )
    np.testing.assert_allclose(M @ found.x, b, atol=1e-4)


def rectangular(backend: Backend) -> None:
    """Spaces of several regions, one of them replicated, and complex numbers."""
    workers = range(backend.workers)
    R = linop.Space(linop.Region("r", (2, 2), workers), np.complex128)
    X = TensorSpace((5,), Partition((backend.workers,)), np.complex128)
    E = linop.repartition(X, Partition((1,), [0]))
    A = np.arange(20).reshape(4, 5) + 1j
    Y = linop.Space(linop.Region("y", (2, 2)), np.complex128)
    there = linop.local_operators.matrix(A, E.codomain, Y)
    spread = linop.copy(Y, Y["y"], R["r"])
    op = linop.deallocate(spread.codomain, Y["y"]) @ spread @ there @ E
    F = linop.interop.scipy(op.compile(backend))
    x, y = np.arange(5) - 2j, np.arange(4) + 1j
    assert (F @ x == A @ x).all() and (F.H @ y == A.conj().T @ y).all()


def vectors_that_differ(backend: Backend) -> None:
    """Workers out of step are told on every worker, and go on."""
    A, M = laplacian((2, backend.workers // 2))
    F = linop.interop.scipy(A.compile(backend))
    last = backend.workers - 1
    with pytest.raises(ArgumentError, match=f"the vector of worker {last} differs"):
        F @ np.full(30, float(backend.worker == last))
    with pytest.raises(DTypeError):  # on every worker, though one alone has complex numbers
        F @ (np.ones(30) * (1j if backend.worker == last else 1))
    assert (F @ np.ones(30) == M @ np.ones(30)).all()


def through_pylops(backend: Backend) -> None:
    """PyLops' sums and solvers of a plan, in the tensor's shape."""
    import pylops

    A, M = laplacian((2, backend.workers // 2))
    P = linop.interop.to_pylops(A.compile(backend))
    assert isinstance(P, pylops.LinearOperator) and P.dims == P.dimsd == (6, 5)
    x = np.arange(30.0).reshape(6, 5)
    np.testing.assert_array_equal(P @ x, (M @ x.ravel()).reshape(6, 5))
    both = 2 * P + pylops.Identity(30)
    np.testing.assert_array_equal(both @ x.ravel(), 2 * M @ x.ravel() + x.ravel())


def through_pylops_mpi(backend: Backend) -> None:
    """PyLops-MPI's solver of a plan, and vectors there and back."""
    import pylops_mpi

    A, M = laplacian((2, backend.workers // 2))
    P = linop.interop.to_pylops_mpi(A.compile(backend))
    X: Any = A.domain
    b = np.arange(1.0, 31.0).reshape(6, 5)
    y = backend.vector(X, X.scatter(b))
    there = linop.interop.to_distributed_array(y, backend)
    assert linop.interop.from_distributed_array(there, X, backend).equals(y)
    start = linop.interop.to_distributed_array(0 * y, backend)
    x = pylops_mpi.cgls(P, there, x0=start, niter=60, tol=0)[0]
    found: Vector = linop.interop.from_distributed_array(x, X, backend)
    wanted = X.scatter(np.linalg.solve(M, b.ravel()).reshape(6, 5))
    assert (found - backend.vector(X, wanted)).norm() < 1e-8
    back = linop.interop.from_distributed_array(P.rmatvec(there), X, backend)
    assert back.equals(A.H.compile(backend)(y))
