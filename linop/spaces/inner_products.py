"""Inner products of arrays, and their sums over workers.

The order of summation depends on the sizes alone, so results are bitwise equal on every backend.
`linop.spaces.space` selects the arrays that make up the inner product of two vectors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from linop.spaces.scalars import Array, Scalar

_PIECE = 8192
"""Elements per chunk of an inner product: fewer than the number from which BLAS uses threads
(OpenBLAS: 10,000), since the order of the sum would then depend on the number of threads."""


def dot(x: Array, y: Array) -> Scalar:
    """<x, y> of arrays of one shape, conjugate-linear in x, summed in double precision or wider."""
    x, y = _wide(x), _wide(y)
    if x.size <= _PIECE:
        return np.vdot(x, y).item()
    x, y = x.reshape(-1), y.reshape(-1)
    pieces = (slice(k, k + _PIECE) for k in range(0, x.size, _PIECE))
    return sum(np.vdot(x[piece], y[piece]).item() for piece in pieces)


def _wide(array: Array) -> Array:
    """The array in int64, uint64, float64 or complex128: the dtype that sums are formed in."""
    kind = array.dtype.kind
    wide = {"i": np.int64, "u": np.uint64, "c": np.complex128}.get(kind, np.float64)
    return array.astype(wide, copy=False)


def sums_by_worker(partials: Sequence[Mapping[int, Scalar]]) -> list[Scalar]:
    """Sum each mapping of worker to partial inner product, in increasing order of worker."""
    return [sum((partial[w] for w in sorted(partial)), 0) for partial in partials]
