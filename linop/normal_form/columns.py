"""Columns of exact numbers: the coefficients of a table of transfers, as whole-array arithmetic.

A column is of dtype int64, or of dtype object where it has a fraction, a complex number, or an
integer of more than 62 bits. Nothing is ever rounded. Columns have few different numbers, and those
of objects are computed once for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from linop.spaces.exact import Exact, Gaussian, exact, rounded, text, wrapped

Column = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]

_LARGE = 2**62


def ones(n: int) -> Column:
    """A column of so many ones."""
    return np.ones(n, np.int64)


def column(numbers: Iterable[Exact]) -> Column:
    """The column of exact numbers."""
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
    """The products of numbers, one by one."""
    if _ints(a, b) and _bound(a) * _bound(b) < _LARGE:
        return a * b
    (these, i), (those, j) = _distinct(a), _distinct(b)
    pairs, which = np.unique(i * len(those) + j, return_inverse=True)
    left, right = np.divmod(pairs, len(those))
    made = [these[k] * those[m] for k, m in zip(left.tolist(), right.tolist(), strict=True)]
    return column(made)[which]


def sums(a: Column, first: Ints) -> Column:
    """The sums of runs of a column, given by their first positions."""
    if _ints(a) and _bound(a) * len(a) < _LARGE:
        return np.add.reduceat(a, first)
    return column(np.add.reduceat(a.astype(object), first).tolist())


def each(a: Column, function: Callable[[Exact], Exact]) -> Column:
    """A function of every number."""
    numbers, which = _distinct(a)
    return column(map(function, numbers))[which]


def multiples(a: Column, factor: Exact) -> Column:
    """The numbers times a factor."""
    return a if factor == 1 else each(a, lambda number: number * factor)


def conjugates(a: Column) -> Column:
    """The complex conjugates."""
    return a if _ints(a) else each(a, lambda number: number.conjugate())


def residues(a: Column, dtype: np.dtype[Any]) -> Column:
    """The numbers as the arithmetic of a dtype has them: modulo 2^bits for integers. The column
    itself if they are so already."""
    if dtype.kind not in "iu" or not len(a):
        return a
    limits = np.iinfo(dtype)
    if _ints(a) and limits.min <= a.min() and a.max() <= limits.max:
        return a
    return each(a, lambda number: wrapped(number, dtype))


def exactly(numbers: npt.NDArray[Any]) -> Column:
    """The column of the numbers of an array, all finite."""
    values, which = np.unique(numbers, return_inverse=True)
    return column(map(exact, values.tolist()))[which]


def nearest(a: Column, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """The numbers rounded to a dtype; see `linop.spaces.exact.rounded`."""
    numbers, which = _distinct(a)
    return np.array([rounded(number, dtype) for number in numbers], dtype)[which]


def representable(a: Column, dtype: np.dtype[Any]) -> Column:
    """The exact values of the nearest numbers of a dtype: what arrays are multiplied by."""
    return each(a, lambda number: exact(rounded(number, dtype)))


def largest_square(a: Column) -> Fraction | int:
    """The largest square of a magnitude."""
    return max((n.real**2 + n.imag**2 for n in _distinct(a)[0]), default=0)


def kinds(a: Column) -> Ints:
    """A number for each number of a column, the same for equal ones."""
    return _distinct(a)[1]


def encoded(a: Column) -> tuple[str, Ints]:
    """Key that tells columns apart, whatever they are made of: the numbers in them, and which is
    where."""
    numbers, which = _distinct(a)
    texts = sorted(map(text, numbers))
    place = {name: k for k, name in enumerate(texts)}
    return " ".join(texts), np.array([place[text(n)] for n in numbers], np.int64)[which]


def _ints(*columns: Column) -> bool:
    return all(a.dtype == np.int64 for a in columns)


def _bound(a: Column) -> int:
    """The largest magnitude in a column of integers."""
    return max(-int(a.min()), int(a.max())) if len(a) else 0


def _magnitude(numbers: list[Any]) -> Any:
    return max(map(abs, numbers), default=0)


def _distinct(a: Column) -> tuple[list[Any], Ints]:
    """The different numbers of a column, and which of them is where."""
    if _ints(a):
        if len(a) and a.min() == a.max():
            return [int(a[0])], np.zeros(len(a), np.int64)
        values, which = np.unique(a, return_inverse=True)
        return values.tolist(), which
    # Most are the same objects: so only a few are compared as numbers.
    same = np.fromiter(map(id, a), np.int64, len(a))
    _, first, which = np.unique(same, return_index=True, return_inverse=True)
    number: dict[Any, int] = {}
    codes = np.array([number.setdefault(value, len(number)) for value in a[first]], np.int64)
    return list(number), codes[which]
