"""Contracts of tensors of which each worker gives its own block, and of vectors that are joined of
parts; on any backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pylops

import linop
from linop import Partition, TensorSpace
from linop.backends import Backend


def of_tensors(backend: Backend) -> None:
    """The blocks of all workers are those of one tensor."""
    k = int(backend.worker or 0)
    mine = pylops.Diagonal(np.full((2, 3, 4), 2.0 + k))
    op = linop.block_diag(mine, backend=backend)
    assert isinstance(op.domain, TensorSpace) and op.domain == op.codomain
    assert op.domain.global_shape == (2 * backend.workers, 3, 4)
    x = np.arange(24.0).reshape(2, 3, 4)
    assert (op.compile(backend)(x) == (2 + k) * x).all()
    both = linop.vstack(mine, backend=backend)
    assert both.domain.global_shape == (2, 3, 4)
    S = linop.shift(op.domain, 1) @ op  # other operators go on from there
    assert S.codomain.global_shape == op.domain.global_shape


def regularised(backend: Any) -> None:
    """The data of a regularised problem: least squares of both, as of one stacked matrix."""
    X = TensorSpace((12,), Partition((backend.workers,)))
    second = linop.stencil(X, [1, -2, 1])
    R = linop.block([[linop.identity(X)], [second]]).compile(backend)
    d = backend.vector(X, np.arange(12.0)[X.slices(backend.worker)])
    y = R.op.codomain.join(d, 0 * d)
    assert y.inner(y) == float((np.arange(12.0) ** 2).sum())
    first, zero = R.op.codomain.split(y)
    assert first.inner(first) == y.inner(y) and zero.norm() == 0
    x = linop.solvers.cgls(R, y, niter=40, tol=1e-20).x
    D = np.eye(12, k=1) + np.eye(12, k=-1) - 2 * np.eye(12)
    wanted = np.linalg.solve(np.eye(12) + D.T @ D, np.arange(12.0))
    np.testing.assert_allclose(next(iter(x.arrays.values())), wanted[X.slices(backend.worker)])
