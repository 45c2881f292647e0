"""The contract of Laplacians, against `numpy.pad` and `numpy.diff`."""

from __future__ import annotations

from typing import Any

import numpy as np

import linop
from linop import TensorSpace
from linop.backends import Backend
from linop.stencils.boundaries import Boundary
from support.contracts.stencils import padded


def is_second_differences(
    backend: Backend, shape: Any, workers: int, boundary: Boundary, seed: int
) -> None:
    """Forward: second differences of the padded array. Adjoint: <A x, y> = <x, A.H y>. Both in
    whole numbers, with ``==``."""
    rng = np.random.default_rng(seed)
    X = TensorSpace(shape, workers, np.int64)
    weights = rng.integers(-3, 4, len(shape))
    x, y = rng.integers(-9, 10, (2, *shape))
    plan = linop.laplacian(X, weights.tolist(), boundary).compile(backend)
    around = padded(x, 1, [boundary] * x.ndim)
    inside = (slice(1, -1),)
    wanted = sum(
        weight * np.diff(around[inside * d + (...,) + inside * (x.ndim - 1 - d)], 2, axis=d)
        for d, weight in enumerate(weights)
    )
    xs, ys, wanteds = (X.scatter(array) for array in (x, y, wanted))
    given, other = (backend.vector(X, v) for v in (xs, ys))
    for name, array in plan(given).arrays.items():
        np.testing.assert_array_equal(array, wanteds[name])
    assert plan(given).inner(other) == given.inner(plan.H(other))
