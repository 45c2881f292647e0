"""Contracts of stencils, and an oracle: numpy.pad and slices of the global array."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import numpy as np

import linop
from linop import COPIES, Partition, TensorSpace
from linop.backends.engine.base import Backend
from linop.local_operators import sliding_sums
from linop.testing.describing import Description, tensor_of, whole_numbers
from linop.testing.factories.stencils import global_coefficients, stencil

NUMPY = {
    "zero": "constant",
    "periodic": "wrap",
    "reflect": "reflect",
    "symmetric": "symmetric",
    "edge": "edge",
}
"""The modes of `numpy.pad`."""


def padded(x: np.ndarray, width: int, boundary: Sequence[str]) -> np.ndarray:
    """A global array with edges, one dimension after the other."""
    for d, mode in enumerate(boundary):
        widths = [(width * (d == k),) * 2 for k in range(x.ndim)]
        full = [n + a + b for n, (a, b) in zip(x.shape, widths, strict=True)]
        x = np.pad(x, widths, NUMPY[mode]) if x.size else np.zeros(full, x.dtype)
    return x


def by_slices(x: np.ndarray, taps: Mapping[Any, Any], boundary: Sequence[str]) -> np.ndarray:
    """The stencil of a global array; coefficients are numbers or global arrays."""
    width = max((abs(k) for offset in taps for k in offset), default=0)
    around, y = padded(x, width, boundary), np.zeros_like(x)
    for offset, weight in taps.items():
        at = tuple(slice(width + k, width + k + n) for k, n in zip(offset, x.shape, strict=True))
        y = y + np.asarray(weight, x.dtype) * around[at]
    return y


def global_taps(described: Description) -> dict[tuple[int, ...], np.ndarray]:
    """The coefficients of a description, as numbers or global arrays."""
    source = described["source"]
    shapes = {"number": ()}
    return {
        offset: global_coefficients(shapes.get(kind, source["shape"]), source["dtype"], seed)
        for offset, kind, seed in described["taps"]
    }


def copies(X: TensorSpace, seed: int) -> Iterator[tuple[np.ndarray, list[int]]]:
    """For each independent copy of a tensor, other numbers, and the workers that hold it."""
    counts = [n for n, role in zip(X.partition.shape, X.axes, strict=True) if role is COPIES]
    for k, at in enumerate(product(*map(range, counts))):
        found = iter(at)
        index = tuple(next(found) if role is COPIES else slice(None) for role in X.axes)
        workers = np.ravel(X.partition.grid[index]).tolist()
        yield whole_numbers(X.global_shape, X.dtype, seed + k, 9), workers


def blocks(X: TensorSpace, arrays: Iterator[tuple[np.ndarray, list[int]]]) -> dict[str, np.ndarray]:
    """Global arrays of copies, cut into the arrays of all regions."""
    return {X.region(w).name: array[(*X.slices(w), ...)] for array, held in arrays for w in held}


def is_its_oracle(backend: Backend, described: Description, seed: int) -> None:
    """A plan of a stencil, and its adjoint, on whole numbers."""
    S, X = stencil(**described), tensor_of(described["source"])
    taps, boundary = global_taps(described), described["boundary"]
    x, y = (blocks(X, copies(X, seed + k)) for k in (0, 99))
    wanted = blocks(X, ((by_slices(a, taps, boundary), held) for a, held in copies(X, seed)))
    expected = X.unflatten(S.to_matrix().conj().T @ X.flatten(X.vector(y)))
    plan = S.compile(backend)
    for run, given, right in ((plan, x, wanted), (plan.H, y, expected.arrays)):
        mine = [r.name for r in X.regions if backend.worker in (None, *r.workers)]
        found = run(backend.vector(X, {name: given[name] for name in mine} or None))
        for name in mine:
            assert found[name].dtype == X.dtype
            assert (found[name] == right[name]).all(), name


@contextmanager
def small_tiles() -> Iterator[None]:
    """Tiles of a few elements, which small arrays have several of."""
    before = sliding_sums.TILE, sliding_sums.OVERLAP
    sliding_sums.TILE, sliding_sums.OVERLAP = 64, 0
    try:
        yield
    finally:
        sliding_sums.TILE, sliding_sums.OVERLAP = before


def coefficients_of_own_blocks(backend: Backend) -> None:
    """Under SPMD a worker gives the coefficients of its own block only."""
    assert backend.workers is not None and backend.worker is not None
    n = backend.workers
    X = TensorSpace((4 * n, 6), Partition((n, 1)), np.int64)
    own = X.slices(backend.worker)
    asked = []

    def slope(at: tuple[slice, ...]) -> np.ndarray:
        asked.append(at)
        rows = np.arange(at[0].start, at[0].stop)[:, None]
        return rows * np.ones((1, 6), np.int64)

    mass = np.arange(24 * n).reshape(4 * n, 6)
    vector = backend.vector(X, mass[own])
    S = linop.stencil(X, {(1, 0): slope, (0, -1): vector, (-2, 0): 3})
    x = whole_numbers(X.global_shape, np.int64, 1, 9)
    plan = S.compile(backend)
    found = plan(x[own])
    taps = {(1, 0): np.arange(4 * n)[:, None] * np.ones((1, 6), int), (0, -1): mass, (-2, 0): 3}
    assert (found == by_slices(x, taps, ["zero", "zero"])[own]).all()
    assert asked == [own]
    y = whole_numbers(X.global_shape, np.int64, 2, 9)
    u, v = backend.vector(X, x[own]), backend.vector(X, y[own])
    assert v.inner(plan(u)) == plan.H(v).inner(u)
