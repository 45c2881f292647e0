"""Whole-array arithmetic on columns of exact numbers: the coefficients of tables of transfers.

A column, of shape (n,), has dtype int64, or dtype object if it has a fraction, a complex number, or
an integer of more than 62 bits. Only `nearest` and `representable` round. Columns have few distinct
values; functions of an object column are evaluated once per distinct value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from linop.spaces.exact import Exact, Gaussian, exact, rounded, text, wrapped

Column = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]

_LARGE = 2**62
_LONGEST = 2048
"""Bits of a numerator or denominator up to which arithmetic is fast."""


def ones(n: int) -> Column:
    """A column of n ones."""
    return np.ones(n, np.int64)


def column(numbers: Iterable[Exact]) -> Column:
    """The column of some exact numbers: int64 if all fit, else object."""
    given = list(numbers)
    if all(type(number) is int for number in given) and _magnitude(given) < _LARGE:
        return np.array(given, np.int64)
    whole = all(not isinstance(n, Gaussian) and n.denominator == 1 for n in given)
    if whole and _magnitude(given) < _LARGE:
        return np.array([int(n) for n in given], np.int64)  # type: ignore[arg-type]
    made = np.empty(len(given), object)
    made[:] = given
    return made


def products(a: Column, b: Column) -> Column:
    """The element-wise products of two columns of one length."""
    if _ints(a, b) and _bound(a) * _bound(b) < _LARGE:
        return a * b
    (these, i), (those, j) = _distinct(a), _distinct(b)
    pairs, which = np.unique(i * len(those) + j, return_inverse=True)
    left, right = np.divmod(pairs, len(those))
    made = [these[k] * those[m] for k, m in zip(left.tolist(), right.tolist(), strict=True)]
    return column(made)[which]


def sums(a: Column, first: Ints) -> Column:
    """The sums of consecutive runs of a column; `first`: the position at which each run starts."""
    if _ints(a) and _bound(a) * len(a) < _LARGE:
        return np.add.reduceat(a, first)
    return column(np.add.reduceat(a.astype(object), first).tolist())


def each(a: Column, function: Callable[[Exact], Exact]) -> Column:
    """Apply a function to every number."""
    numbers, which = _distinct(a)
    return column(map(function, numbers))[which]


def multiples(a: Column, factor: Exact) -> Column:
    """The column times a scalar."""
    return a if factor == 1 else each(a, lambda number: number * factor)


def conjugates(a: Column) -> Column:
    """The complex conjugates of a column."""
    return a if _ints(a) else each(a, lambda number: number.conjugate())


def residues(a: Column, dtype: np.dtype[Any]) -> Column:
    """The column reduced modulo 2^bits to the range of an integer dtype; the same object if nothing
    changes, or for other dtypes."""
    if dtype.kind not in "iu" or not len(a):
        return a
    limits = np.iinfo(dtype)
    if _ints(a) and limits.min <= a.min() and a.max() <= limits.max:
        return a
    return each(a, lambda number: wrapped(number, dtype))


def exactly(numbers: npt.NDArray[Any]) -> Column:
    """The column of the exact values of an array of finite numbers."""
    values, which = np.unique(numbers, return_inverse=True)
    return column(map(exact, values.tolist()))[which]


def nearest(a: Column, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """An array of the numbers rounded to a dtype; raises as `linop.spaces.exact.rounded`."""
    numbers, which = _distinct(a)
    return np.array([rounded(number, dtype) for number in numbers], dtype)[which]


def representable(a: Column, dtype: np.dtype[Any]) -> Column:
    """The exact values of the numbers after rounding to a dtype: the factors used at run time."""
    return each(a, lambda number: exact(rounded(number, dtype)))


def outgrown(a: Column, dtype: np.dtype[Any]) -> bool:
    """True if a column has a number so long that computing with it is slow, or so large that a
    product of two may leave the range of the dtype."""
    if _ints(a):
        return False
    largest = _LONGEST if dtype.kind in "iu" else _largest_power(dtype) // 2
    parts = [part for number in _distinct(a)[0] for part in (number.real, number.imag)]
    sizes = [(p.numerator.bit_length(), p.denominator.bit_length()) for p in parts]
    return any(max(n, d) > _LONGEST or n - d > largest for n, d in sizes)


def kinds(a: Column) -> Ints:
    """A code for each number of a column, equal exactly for equal numbers."""
    return _distinct(a)[1]


def encoded(a: Column) -> tuple[str, Ints]:
    """Canonical encoding of a column, independent of its dtype, for digests: the sorted texts of
    its distinct numbers, and for each entry the index of its text."""
    numbers, which = _distinct(a)
    texts = sorted(map(text, numbers))
    rank = {name: k for k, name in enumerate(texts)}
    return " ".join(texts), np.array([rank[text(n)] for n in numbers], np.int64)[which]


def _largest_power(dtype: np.dtype[Any]) -> int:
    """The power of two above the finite numbers of a dtype of floats."""
    return 128 if dtype.kind == "V" else int(np.finfo(dtype).maxexp)  # V: bfloat16's kind


def _ints(*columns: Column) -> bool:
    return all(a.dtype == np.int64 for a in columns)


def _bound(a: Column) -> int:
    """The largest magnitude in an int64 column; 0 if it is empty."""
    return max(-int(a.min()), int(a.max())) if len(a) else 0


def _magnitude(numbers: list[Any]) -> Any:
    return max(map(abs, numbers), default=0)


def _distinct(a: Column) -> tuple[list[Any], Ints]:
    """The distinct numbers of a column, and for each entry the index of its number."""
    if _ints(a):
        if len(a) and a.min() == a.max():
            return [int(a[0])], np.zeros(len(a), np.int64)
        values, which = np.unique(a, return_inverse=True)
        return values.tolist(), which
    # Most entries are the same objects: compared by identity first, the rest as numbers.
    same = np.fromiter(map(id, a), np.int64, len(a))
    _, first, which = np.unique(same, return_index=True, return_inverse=True)
    number: dict[Any, int] = {}
    codes = np.array([number.setdefault(value, len(number)) for value in a[first]], np.int64)
    return list(number), codes[which]
