"""Arithmetic without linop: sums of products, exactly modulo the dtype or with a bound, and numbers
rounded once."""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from oracle.cases import want

Array = NDArray[Any]
Taps = list[tuple[Array, Array, Array]]
"""For each nonzero entry of every row of a matrix, in any grouping: (rows, columns, values)."""

INTEGERS = tuple(np.dtype(f"{u}int{bits}") for u in ("", "u") for bits in (8, 16, 32, 64))
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = (
    *(np.dtype(name) for name in ("float16", "float32", "float64", "longdouble")),
    BFLOAT16,
)
COMPLEX = tuple(np.dtype(name) for name in ("complex64", "complex128", "clongdouble"))
C = 4
"""The constant of the error bound, c·n·eps·(|A||x|)."""


def eps(dtype: np.dtype[Any]) -> float:
    """The unit in the last place of 1."""
    return float(ml_dtypes.finfo(dtype).eps)


def product_is(taps: Taps, x: Array, y: Array, what: str) -> None:
    """Check y = A x: integers exactly modulo the dtype, floats within the bound; what does not
    depend on NaN or infinity is finite."""
    x, y = x.reshape(-1), y.reshape(-1)
    if x.dtype.kind in "iu":
        total = np.zeros(y.shape, np.uint64)
        for rows, columns, values in taps:
            np.add.at(total, rows, values.astype(np.uint64) * x[columns].astype(np.uint64))
        wrong = np.flatnonzero(total.astype(y.dtype) != y)
        where = wrong[:3].tolist()
        want(
            not wrong.size,
            f"{what}: {wrong.size} of {y.size} wrong, at {where}: {y[where]} for "
            f"{total.astype(y.dtype)[where]}",
        )
        return
    wide: Any = np.clongdouble if x.dtype.kind == "c" else np.longdouble
    total, bound = np.zeros(y.shape, wide), np.zeros(y.shape, np.longdouble)
    count = np.zeros(y.shape, np.int64)
    for rows, columns, values in taps:
        terms = values.astype(wide) * x[columns].astype(wide)
        np.add.at(total, rows, terms)
        np.add.at(bound, rows, np.abs(terms))
        np.add.at(count, rows, 1)
    finite = np.isfinite(total) & np.isfinite(bound) & (bound < float(ml_dtypes.finfo(x.dtype).max))
    allowed = C * (count + 1) * eps(x.dtype) * bound + 4 * float(ml_dtypes.finfo(x.dtype).tiny)
    with np.errstate(all="ignore"):
        error = np.abs(y.astype(wide) - total)
    wrong = np.flatnonzero(finite & ~(error <= allowed))
    where = wrong[:3].tolist()
    want(
        not wrong.size,
        f"{what}: {wrong.size} of {y.size} wrong, at {where}: {y[where]} for {total[where]}",
    )


def transposed(taps: Taps) -> Taps:
    """Of the conjugate transpose."""
    return [(columns, rows, np.conj(values)) for rows, columns, values in taps]


def sliding_taps(
    shape: tuple[int, ...],
    kernel: Array,
    stride: tuple[int, ...],
    padding: tuple[tuple[int, int], ...],
    dilation: tuple[int, ...],
) -> tuple[Taps, tuple[int, ...]]:
    """The cross-correlation of torch.nn as a matrix: its taps, and the shape of the output."""
    wide = [d * (k - 1) + 1 for d, k in zip(dilation, kernel.shape, strict=True)]
    out = tuple(
        max(0, (n + a + b - w) // s + 1)
        for n, (a, b), w, s in zip(shape, padding, wide, stride, strict=True)
    )
    taps: Taps = []
    grids = np.indices(out).reshape(len(out), -1)
    for offset in product(*(range(k) for k in kernel.shape)):
        if not kernel[offset]:
            continue
        read = [
            g * s + o * d - a
            for g, s, o, d, (a, _) in zip(grids, stride, offset, dilation, padding, strict=True)
        ]
        inside = np.all([(0 <= r) & (r < n) for r, n in zip(read, shape, strict=True)], axis=0)
        rows = np.flatnonzero(inside)
        columns = np.ravel_multi_index([r[inside] for r in read], shape)
        taps.append((rows, columns, np.full(rows.size, kernel[offset])))
    return taps, out


def matrix_taps(matrix: Array) -> Taps:
    """The nonzero entries of a dense matrix."""
    rows, columns = np.nonzero(matrix)
    return [(rows, columns, matrix[rows, columns])]


def rounded_once(value: Fraction, dtype: np.dtype[Any]) -> Any:
    """The number of a float dtype that is nearest; of two, the one whose last bit is 0."""
    near = np.array(float(value)).astype(dtype)
    around = [near, *(np.asarray(_step(near, up)) for up in (True, False))]
    finite = [n for n in around if np.isfinite(n.astype(np.float64))]
    far = [abs(Fraction(float(n.astype(np.longdouble))) - value) for n in finite]
    nearest = [n for n, d in zip(finite, far, strict=True) if d == min(far)]
    even = [n for n in nearest if not int(n.view(f"u{dtype.itemsize}")) & 1]
    return (even or nearest)[0]


def _step(number: Array, up: bool) -> Array:
    """The next number of its dtype, away from zero or towards it."""
    bits = number.view(f"u{number.dtype.itemsize}")
    return (bits + np.array(1 if up else -1).astype(bits.dtype)).view(number.dtype)
