"""Contracts of proximal maps and the solvers that use them, as SPMD programs: the result is that of
one process. The maps are named, so that ranks build them too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import linop
from linop import Partition, TensorSpace
from linop.backends import Backend
from linop.solvers import prox
from support.once import once

Maker = Callable[[TensorSpace, Any], prox.ProximalMap]
"""Makes a map for a space, and a backend or None."""


def _vector(X: TensorSpace, backend: Any, seed: int) -> linop.Vector:
    """The numbers of a seed, which do not depend on the blocks, on this worker or all."""
    v = X.scatter(numbers(X.global_shape, X.dtype, seed))
    return v if backend is None else backend.vector(X, v)


def numbers(shape: tuple[int, ...], dtype: Any, seed: int) -> np.ndarray:
    """Normal numbers, some of them zero."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape)
    if np.dtype(dtype).kind == "c":
        values = values + 1j * rng.standard_normal(shape)
    array: np.ndarray = (values * (rng.random(shape) < 0.9)).astype(dtype)
    return array


def labels(X: TensorSpace) -> np.ndarray:
    """Whole numbers that no two blocks of a tensor have in common; three a block."""
    found = np.zeros(X.global_shape, int)
    for k, region in enumerate(X.regions):
        found[X.block(region)] = 3 * k + np.arange(region.size).reshape(region.shape) % 3
    return found


def _soft(a: np.ndarray, step: float) -> np.ndarray:
    return np.where(a > step, a - step, 0)


ELEMENTWISE: dict[str, Maker] = {
    "l1": lambda X, b: prox.l1(0.7),
    "squared_l2": lambda X, b: prox.squared_l2(0.7),
    "squared_l2 of data": lambda X, b: prox.squared_l2(2.0, _vector(X, b, 91)),
    "box": lambda X, b: prox.box(-0.2, 0.5),
    "box of vectors": lambda X, b: prox.box(None, _vector(X, b, 92)),
    "user": lambda X, b: prox.user(_soft, lambda a: float(a.sum())),
    "group": lambda X, b: prox.group(1, 0.7),
    "labels": lambda X, b: prox.group(labels=labels(X), sigma=0.7),
}
"""Methods whose results are the same bits on any number of workers, if dimension 1 is not cut."""
OTHERS: dict[str, Maker] = {
    "l2": lambda X, b: prox.l2(0.7),
    "nuclear": lambda X, b: prox.nuclear(0.7, X, b),
    "total_variation": lambda X, b: prox.total_variation(X, 0.3, niter=150, rtol=1e-8, backend=b),
}
MAKERS = {**ELEMENTWISE, **OTHERS}
REAL_ONLY = ("box", "box of vectors", "user")


@once(kept=2)
def of_one_process(X: TensorSpace, name: str, step: float) -> tuple[Any, ...]:
    """Value, result of the map and of its conjugate, for whole vectors."""
    f, v = MAKERS[name](X, None), _vector(X, None, 5)
    return f(v), f.prox(v, step), f.conjugate().prox(v, step)


def prox_is_that_of_one_process(
    backend: Backend, name: str, shape: tuple[int, ...], dtype: str, step: float
) -> None:
    """A map, its conjugate and its value on blocks, against those of the whole vectors."""
    X = TensorSpace(shape, Partition((backend.workers or 1,)), dtype)
    f, v = MAKERS[name](X, backend), _vector(X, backend, 5)
    exact, (value, *both) = name in ELEMENTWISE, of_one_process(X, name, step)
    for wanted, found in zip(both, (f.prox(v, step), f.conjugate().prox(v, step)), strict=True):
        assert found.shared is not None
        close = 0 if exact else 1e-9 if np.finfo(dtype).eps < 1e-10 else 1e-3
        for region, array in found.arrays.items():
            assert array.dtype == X.dtype
            np.testing.assert_allclose(array, wanted[region], rtol=0, atol=close)
    # Sums over workers are rounded in another order.
    np.testing.assert_allclose(f(v), value, rtol=1e-5)


def gradient_on_workers(backend: Backend, shape: tuple[int, ...], seed: int) -> None:
    """The differences of neighbours, and their adjoint, exactly."""
    X = TensorSpace(shape, Partition((backend.workers or 1,)))
    op = prox.gradient(X)
    plan = op.compile(backend)
    v, w = X.integers(seed), op.codomain.integers(seed + 1)
    for found, wanted in (
        (plan(backend.vector(X, v)), op(v)),
        (plan.H(backend.vector(op.codomain, w)), op.H(w)),
    ):
        for region, array in found.arrays.items():
            assert (array == wanted[region]).all()
