"""Inner products of arrays, and their sums over workers: each in an order that the sizes decide, so
with the same bits on every backend.

Which arrays make up the inner product of two vectors, their space says (`linop.spaces.space`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from linop.spaces.scalars import Array, Scalar

_PIECE = 8192
"""Elements of a piece of an inner product: fewer than those from which BLAS shares them out to
threads (OpenBLAS: 10,000), whose number would decide the order of the sum."""


def dot(x: Array, y: Array) -> Scalar:
    """<x, y>, conjugate-linear in x; low precision is summed in double precision."""
    x, y = _wide(x), _wide(y)
    if x.size <= _PIECE:
        return np.vdot(x, y).item()
    x, y = x.reshape(-1), y.reshape(-1)
    pieces = (slice(k, k + _PIECE) for k in range(0, x.size, _PIECE))
    return sum(np.vdot(x[piece], y[piece]).item() for piece in pieces)


def _wide(array: Array) -> Array:
    """The array in the widest dtype of its kind, in which inner products are summed."""
    kind = array.dtype.kind
    wide = {"i": np.int64, "u": np.uint64, "c": np.complex128}.get(kind, np.float64)
    return array.astype(wide, copy=False)


def sums_by_worker(partials: Sequence[Mapping[int, Scalar]]) -> list[Scalar]:
    """Sums of what each worker has found, in the order of workers."""
    return [sum((partial[w] for w in sorted(partial)), 0) for partial in partials]
