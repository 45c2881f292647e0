"""Inner products of arrays, and their sums over workers.

Products of integers are Python integers, which are exact at any size. Floating-point products are
summed in double precision, those of long double in long double; the order of summation depends on
the sizes alone, so results are bitwise equal on every backend.
`linop.spaces.space` selects the arrays that make up the inner product of two vectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from linop.spaces.scalars import Array, Scalar

_PIECE = 8192
"""Elements per chunk of an inner product: fewer than the number from which BLAS uses threads
(OpenBLAS: 10,000), since the order of the sum would then depend on the number of threads."""

_LIMB = 24
"""Bits per limb of a long integer: `_PIECE` products of two limbs fit in 63 bits."""


def dot(x: Array, y: Array) -> Scalar:
    """<x, y> of arrays of one shape and dtype, conjugate-linear in x.

    Returns:
        An exact `int` for integer dtypes; a `float` or `complex`, summed in double precision, for
        floating ones; a NumPy scalar for long double.
    """
    if x.dtype.kind in "iu":
        return sum(_whole_dot(a, b) for a, b in _pieces(x, y))
    if x.size <= _PIECE:
        return np.vdot(wide(x), wide(y)).item()
    if x is y:
        return sum(np.vdot(a, a).item() for a in map(wide, _pieces_of(x)))
    return sum(np.vdot(wide(a), wide(b)).item() for a, b in _pieces(x, y))


def _pieces(x: Array, y: Array) -> Iterator[tuple[Array, Array]]:
    """Both arrays flattened, in chunks."""
    return zip(_pieces_of(x), _pieces_of(y), strict=True)


def _pieces_of(x: Array) -> Iterator[Array]:
    x = x.reshape(-1)
    return (x[k : k + _PIECE] for k in range(0, x.size, _PIECE))


def wide(array: Array) -> Array:
    """The array in the dtype that sums are formed in: double precision, or long double. A chunk at
    a time, which stays in a core's cache."""
    kind, long = array.dtype.kind, array.dtype.itemsize
    if kind == "c":
        return array.astype(np.clongdouble if long > 16 else np.complex128, copy=False)
    return array.astype(np.longdouble if kind == "f" and long > 8 else np.float64, copy=False)


def _whole_dot(x: Array, y: Array) -> int:
    """The exact inner product of at most `_PIECE` integers."""
    if x.size * _largest(x) * _largest(y) < 2**63:
        return int(np.vdot(x.astype(np.int64, copy=False), y.astype(np.int64, copy=False)))
    return sum(
        int(np.vdot(a, b)) << (i + j) * _LIMB
        for i, a in enumerate(_limbs(x))
        for j, b in enumerate(_limbs(y))
    )


def _largest(array: Array) -> int:
    return max(int(array.max()), -int(array.min()))


def _limbs(array: Array) -> list[Array]:
    """Arrays of int64 whose sum, weighted by powers of 2**_LIMB, is the array. The last one has the
    sign; the others are not negative."""
    wide = array if array.dtype == np.uint64 else array.astype(np.int64, copy=False)
    mask = wide.dtype.type((1 << _LIMB) - 1)
    parts = [wide & mask, wide >> _LIMB & mask, wide >> 2 * _LIMB]
    return [part.astype(np.int64, copy=False) for part in parts]


def norm_of(inner: Callable[[int], Scalar], dtype: np.dtype[Any]) -> float:
    """The square root of <v, v>, without overflow or underflow of the square.

    Args:
        inner: <w, w> of w = 2**k v, for a power k; collective where v is distributed. It is called
            with 0, and again if that product is out of the range of full precision.
        dtype: of v.
    """
    square: Any = inner(0).real
    if dtype.kind in "iu":
        return math.sqrt(square)
    real = wide(np.zeros((), dtype)).real.dtype
    root: Callable[[Any], Any] = np.sqrt if real.itemsize > 8 else math.sqrt
    top = int(np.finfo(real).maxexp)
    low, high = (real.type(2) ** k for k in (256 - top, top - 2))
    narrow = dtype.itemsize < (16 if dtype.kind == "c" else 8)
    if not narrow and not low <= square < high:
        power = (top // 2 + 64) * (1 if square < low else -1)
        scaled = root(inner(power).real)
        if np.isfinite(scaled):  # else some elements are not finite
            return float(scaled * 2.0**-power) if root is math.sqrt else np.ldexp(scaled, -power)
    return root(square)  # type: ignore[no-any-return]


def sums_by_worker(partials: Sequence[Mapping[int, Scalar]]) -> list[Scalar]:
    """Sum each mapping of worker to partial inner product, in increasing order of worker."""
    return [sum((partial[w] for w in sorted(partial)), 0) for partial in partials]


def packed(value: Scalar) -> Any:
    """A number as plain Python numbers, strings and tuples, which control channels carry: complex
    as a pair, long double as its shortest exact text."""
    if isinstance(value, complex | np.complexfloating):
        return packed(value.real), packed(value.imag)
    return str(value) if isinstance(value, np.longdouble) else value


def unpacked(sent: Any) -> Scalar:
    """The number that `packed` has sent."""
    if isinstance(sent, str):
        return np.longdouble(sent)  # type: ignore[return-value]
    if not isinstance(sent, tuple):
        return sent  # type: ignore[no-any-return]
    real, imag = map(unpacked, sent)
    if not isinstance(real, np.longdouble):
        return complex(real, imag)
    pair = np.empty((), np.clongdouble)
    pair.real, pair.imag = real, imag
    return pair[()]
