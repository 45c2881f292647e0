"""Sums of several arrays, element by element, whose bits do not depend on who adds what.

`exact_sum` is the exact sum of its terms, rounded once: so it is the same in any order. `tree_sum`
adds neighbours in pairs, then neighbours among these sums, and so on: a complete part of the tree
can be summed before, anywhere, and the rest is as if it had not been.

`exact_sum` transforms the terms by Knuth's TwoSum into a sum and an error for each addition, which
together are the exact sum ("cascaded summation": Ogita, Rump and Oishi, "Accurate Sum and Dot
Product", 2005), adds the errors, and rounds if what is left cannot change the result. Where it can,
as halfway between two numbers, the errors are transformed likewise; elements that are not certain
then, far less than one in a million of usual data, are summed by `math.fsum`.
Superaccumulators (ExBLAS) and binned sums (ReproBLAS) have the same bits in any order, too; they
are for sums whose terms are not all in one place, need 39 and 3 numbers an element, and would have
to be added by code of their own on every road.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from linop.errors import DTypeError
from linop.spaces.scalars import Array

KINDS = ("exact", "tree")
"""Names of the ways to add, by which users know them."""
_EPS = float(np.finfo(np.float64).eps)
_CHUNK = {True: 4096, False: 16384}
"""Elements of float64 (True) and of shorter numbers that are summed at a time, in arrays that stay
in the processor's cache."""


def exact_sum(*terms: Array) -> Array:
    """The exact sum of the terms, rounded once to their dtype, to nearest, ties to even.

    As for a plain sum, it is NaN if a term is NaN, or if infinities of both signs are among them,
    and infinite if an infinity of one sign is, or if the exact sum overflows. A plain sum also
    overflows on the way. Every NaN is the same one. Zero is negative if all terms are negative
    zeros. Complex numbers are summed by parts.

    Args:
        terms: one or more arrays of one shape and dtype: float16, float32, float64, complex64 or
            complex128, which stay as they are.

    Returns:
        An array of their shape and dtype, in new memory.

    Raises:
        DTypeError: another dtype.
    """
    first = terms[0]
    check_exact(first.dtype)
    flat = [np.ascontiguousarray(term).reshape(-1) for term in terms]
    if first.dtype.kind == "c":
        flat = [term.view(term.real.dtype) for term in flat]
    total = np.empty_like(flat[0])
    doubles = total.dtype == np.float64
    part, step = _of_doubles if doubles else _of_shorter, _CHUNK[doubles]
    with np.errstate(all="ignore"):
        for at in range(0, len(total), step):
            part([term[at : at + step] for term in flat], total[at : at + step])
    whole: Array = total.view(first.dtype).reshape(first.shape)
    return whole


def tree_sum(*terms: Array) -> Array:
    """The sum in a fixed binary tree: neighbours in pairs, then neighbours among these sums, and so
    on; the last of an odd number stays for the next level.

    Args:
        terms: one or more arrays of one shape and dtype, which stay as they are.

    Returns:
        An array of their shape and dtype, in new memory.
    """
    level, given = list(terms), {id(term) for term in terms}
    while len(level) > 1:
        pairs = zip(level[::2], level[1::2], strict=False)
        # A sum of sums takes the memory of the first.
        above = [np.add(a, b, out=np.empty_like(a) if id(a) in given else a) for a, b in pairs]
        level = above + level[2 * len(above) :]
    (total,) = level
    return total.copy() if id(total) in given else total


def check_exact(dtype: np.dtype[Any]) -> None:
    """Check that `exact_sum` is defined for a dtype.

    Raises:
        DTypeError: it is not.
    """
    if dtype.kind not in "fc" or dtype.itemsize > (8 if dtype.kind == "f" else 16):
        raise DTypeError(
            f"sums='exact' is of float16, float32, float64, complex64 and complex128; given "
            f"{dtype}. Convert to one of these, or take sums='tree'"
        )


class _Errors:
    """TwoSum of chunks of one length, in memory that is used again."""

    def __init__(self, size: int) -> None:
        self._b, self._c = np.empty(size), np.empty(size)

    def add(self, s: Array, x: Array, error: Array) -> None:
        """s, error = fl(s + x), s + x - fl(s + x): exactly, unless something overflows."""
        b, c = self._b, self._c
        np.add(s, x, out=c)  # the new sum
        np.subtract(c, s, out=b)  # what of x went into it
        np.subtract(x, b, out=error)  # what of x did not
        np.subtract(c, b, out=b)
        np.subtract(s, b, out=b)  # what of s did not
        np.add(error, b, out=error)
        s[...] = c


def _of_doubles(terms: Sequence[Array], total: Array) -> None:
    """The sum of float64 chunks, in place of `total`."""
    size = len(total)
    two, s, e = _Errors(size), terms[0].copy(), np.zeros(size)
    t, left = np.zeros(size), np.zeros(size)
    for term in terms[1:]:
        two.add(s, term, e)
        t += e
        left += np.abs(e, out=e)
    d, r = e, s.copy()
    two.add(r, t, d)  # r + d + (at most `left` * eps * terms / 2) is the exact sum
    total[...] = r
    if not total.all():
        np.copyto(total, s, where=(t == 0) & (s == 0))  # the sign of zero
    left *= len(terms) * _EPS
    left += np.abs(d, out=t) * (2 * _EPS)  # more than rounding of d ± left takes away
    certain = r + (d + left) == r
    certain &= r + (d - left) == r
    _fully(_doubles_fully, terms, total, certain)


def _doubles_fully(terms: Sequence[Array], total: Array) -> None:
    """As `_of_doubles`, of sums that are nearly halfway between two numbers: the errors are summed
    as the terms are."""
    size = len(total)
    two, s, e = _Errors(size), terms[0].copy(), np.empty(size)
    t, f, left = np.zeros(size), np.empty(size), np.zeros(size)
    for term in terms[1:]:
        two.add(s, term, e)
        two.add(t, e, f)
        left += np.abs(f, out=f)
    d, r = e, s.copy()
    two.add(r, t, d)  # r + d + (at most `left`) is the exact sum
    np.copyto(total, np.where((t == 0) & (s == 0), s, r))
    low, high = _ends(d, left)
    certain = (left == 0) | ((r + low == r) & (r + high == r))
    _slowly(terms, total, np.flatnonzero(~(certain & np.isfinite(r))))


def _of_shorter(terms: Sequence[Array], total: Array) -> None:
    """The sum of chunks of float32 or float16, in place of `total`."""
    s, most = terms[0].astype(np.float64), np.abs(terms[0])
    size = np.empty_like(most)
    for term in terms[1:]:
        s += term
        most += np.abs(term, out=size)
    # Of numbers so small that this underflows, and of float16, s is exact.
    left = most * (len(terms) * _EPS)
    total[...] = s - left
    certain = (s + left).astype(total.dtype) == total
    certain &= total != 0
    _fully(_shorter_fully, terms, total, certain)


def _shorter_fully(terms: Sequence[Array], total: Array) -> None:
    """As `_of_shorter`, of sums that are nearly halfway between two numbers."""
    size = len(total)
    two, s, e, left = _Errors(size), terms[0].astype(np.float64), np.empty(size), np.zeros(size)
    for term in terms[1:]:
        two.add(s, term.astype(np.float64), e)
        left += np.abs(e, out=e)
    low, high = (end.astype(total.dtype) for end in _ends(s, left))
    total[...] = np.where(left == 0, s, low)
    certain = (left == 0) | (low == high)
    _slowly(terms, total, np.flatnonzero(~(certain & np.isfinite(s))))


def _fully(
    how: Callable[[Sequence[Array], Array], None],
    terms: Sequence[Array],
    total: Array,
    certain: Array,
) -> None:
    """Sum the elements that are not certain in another way."""
    if certain.all():
        return
    at = np.flatnonzero(~certain)
    again = np.empty(len(at), total.dtype)
    how([term[at] for term in terms], again)
    total[at] = again


def _ends(about: Array, left: Array) -> tuple[Array, Array]:
    """Numbers below and above ``about ± left``, of which `left` was summed with rounding errors."""
    return (
        np.nextafter(about - 2 * left, -np.inf),
        np.nextafter(about + 2 * left, np.inf),
    )


def _slowly(terms: Sequence[Array], total: Array, at: Array) -> None:
    """Set some elements to their sums, one by one but for those with infinities or NaN."""
    if not len(at):
        return
    given = np.array([term[at] for term in terms])
    finite = np.isfinite(given)
    special = ~finite.all(axis=0)
    kinds = np.where(finite, 0, given).sum(axis=0)
    total[at] = np.where(np.isnan(kinds), np.array(np.nan, total.dtype), kinds)
    for k in np.flatnonzero(~special).tolist():
        total[at[k]] = rounded_total(given[:, k].astype(np.float64).tolist(), total.dtype)


def rounded_total(values: Sequence[float], dtype: np.dtype[Any]) -> Any:
    """The exact sum of finite numbers, rounded once to a float dtype of at most 64 bits; infinite
    if it overflows. A scalar of this dtype."""
    try:
        nearest = math.fsum(values)
    except OverflowError:  # on the way, or in the end
        exact = sum(map(Fraction, values))
        try:
            nearest = float(exact)
        except OverflowError:
            return dtype.type(math.inf if exact > 0 else -math.inf)
        rest = float(exact - Fraction(nearest))
    else:
        rest = 0.0 if dtype.itemsize == 8 else math.fsum([*values, -nearest])
    if rest and dtype.itemsize < 8 and not np.float64(nearest).view(np.int64) & 1:
        # Rounding to odd before the second rounding makes that the only one.
        nearest = math.nextafter(nearest, math.copysign(math.inf, rest))
    with np.errstate(over="ignore"):
        return dtype.type(nearest)
