"""Sums of several arrays, element by element, whose bits do not depend on who adds what.

`exact_sum` is the exact sum of its terms, rounded once: so it is the same in any order. `tree_sum`
adds neighbours in pairs, then neighbours among these sums, and so on: a complete part of the tree
can be summed before, anywhere, and the rest is as if it had not been.

`exact_sum` takes terms apart at a multiple of a unit that is coarse enough for sums of multiples to
be exact, and fine enough for sums of the rests to be so (as in Rump, Ogita and Oishi, "Accurate
Floating-Point Summation", 2008, and ReproBLAS), and rounds once. Terms shorter than float64 are
added in float64. Both are exact unless terms that are near each other in memory differ by very
much: 2^46 times, for four terms of float64. There, it rounds if the errors, of which a bound is
known, cannot change the result. Where they can, as halfway between two numbers, Knuth's TwoSum
transforms the terms into a sum and an error for each addition ("cascaded summation": Ogita, Rump
and Oishi, "Accurate Sum and Dot Product", 2005); and elements that are not certain then are summed
by `math.fsum`.
Superaccumulators (ExBLAS) and binned sums (ReproBLAS) have the same bits in any order, too; they
are for sums whose terms are not all in one place, need 39 and 3 numbers an element, and would have
to be added by code of their own on every road.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from linop.errors import DTypeError
from linop.spaces.scalars import Array

KINDS = ("exact", "tree")
"""Names of the ways to add, by which users know them."""
_EPS = float(np.finfo(np.float64).eps)
_CHUNK = 16384
"""Elements that are summed at a time, in arrays that stay in the processor's cache."""
_LEAST, _MOST = -900, 1021
"""Exponents of units: that of their errors is a normal number, and no sum overflows."""


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
    if len(flat) == 1:
        flat.append(np.full_like(total, -0.0))  # x + -0 is x, of both zeros, too
    part = _of_doubles if total.dtype == np.float64 else _of_shorter
    certain = np.empty(total.shape, bool)
    chunk = min(len(total), _CHUNK)
    memory, size = np.empty((4, chunk)), np.empty(chunk, total.dtype)
    with np.errstate(all="ignore"):
        for at in range(0, len(total), _CHUNK):
            some = slice(at, at + _CHUNK)
            of_some, n = [term[some] for term in flat], len(total[some])
            span = _span(of_some, size[:n])
            part(of_some, span, total[some], certain[some], memory[:, :n])
        _fully(flat, total, certain)
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


def _span(terms: Sequence[Array], size: Array) -> tuple[float, int, int]:
    """The largest magnitude of finite terms; k and u such that all are less than 2^k and multiples
    of 2^u. NaN for others. `size` is written."""
    info = np.finfo(size.dtype)
    top, bottom, bits = 0.0, math.inf, size.view(f"u{size.itemsize}")
    for term in terms:
        np.abs(term, out=size)
        most, least = float(size.max()), float(size.min())
        if not most < math.inf:
            return math.nan, 0, 0
        if least == 0:  # of the others: positive numbers are ordered as their bits are
            bits -= 1  # so zero, which no unsigned number is below, becomes the largest
            least = float((bits.min() + bits.dtype.type(1)).view(size.dtype))
        if most:
            top, bottom = max(top, most), min(bottom, least)
    if top == 0:
        return 0.0, 0, 0
    of_subnormals = int(info.minexp) - int(info.nmant)
    unit = max(math.frexp(bottom)[1] - 1 - int(info.nmant), of_subnormals)
    return top, math.frexp(top)[1], unit


def _of_doubles(
    terms: Sequence[Array],
    span: tuple[float, int, int],
    total: Array,
    certain: Array,
    memory: Array,
) -> None:
    """The sum of two or more float64 chunks, in place of `total`, and where it is certain."""
    top, k, u = span
    many = len(terms)
    above = many.bit_length()  # many < 2^above
    e = max(k + above + 2, _LEAST)
    if not (top < math.inf and e <= _MOST):
        certain[...] = False
        return
    # From `start` on, sums stay between 2^e and 2^(e + 1): each addition rounds to a multiple of
    # 2^(e - 52), which is exact, and leaves a rest of at most 2^(e - 53), which is exact, too.
    start = math.ldexp(1.5, e)
    s, new, rest, spare = memory
    np.add(terms[0], start, out=s)
    np.subtract(s, start, out=new)
    np.subtract(terms[0], new, out=rest)
    for term in terms[1:]:
        np.add(s, term, out=new)
        np.subtract(new, s, out=s)
        np.subtract(term, s, out=s)
        rest += s
        s, new = new, s
    s -= start
    if e - 53 + above <= 53 + u:  # sums of rests, multiples of 2^u, are exact
        np.add(s, rest, out=total)
        certain[...] = True
    else:
        _between(s, rest, math.ldexp(many * many, e - 105), total, certain, spare)
    if not total.all():  # a zero is positive by now; it is negative if all its terms are
        signs = terms[0].view(np.int64).copy()
        for term in terms[1:]:
            signs &= term.view(np.int64)
        np.copyto(total, -0.0, where=(signs < 0) & (total == 0))


def _between(
    s: Array, rest: Array | float, error: float, total: Array, certain: Array, spare: Array
) -> None:
    """Round s + rest, of which an error is known that is at most half of the given one; certain
    where all numbers as near as that are rounded to the same. `spare` may be written."""
    np.subtract(rest, error, out=spare)
    spare += s
    total[...] = spare
    np.add(rest, error, out=spare)
    spare += s
    np.equal(spare.astype(total.dtype), total, out=certain)


def _doubles_fully(terms: Sequence[Array], total: Array) -> None:
    """As `_of_doubles`, of sums that are nearly halfway between two numbers: the errors are summed
    as the terms are."""
    s, t = terms[0], np.zeros(len(total))
    left = np.zeros(len(total))
    for term in terms[1:]:
        s, e = _two_sum(s, term)
        t, f = _two_sum(t, e)
        left += np.abs(f)
    r, d = _two_sum(s, t)  # r + d + (at most `left`) is the exact sum
    np.copyto(total, np.where((t == 0) & (s == 0), s, r))  # the sign of zero
    low, high = _ends(d, left)
    certain = (left == 0) | ((r + low == r) & (r + high == r))
    _slowly(terms, total, np.flatnonzero(~(certain & np.isfinite(r))))


def _of_shorter(
    terms: Sequence[Array],
    span: tuple[float, int, int],
    total: Array,
    certain: Array,
    memory: Array,
) -> None:
    """As `_of_doubles`, of float32 or float16."""
    top, k, u = span
    many = len(terms)
    if not top < math.inf:
        certain[...] = False
        return
    s, spare, *_ = memory
    np.add(terms[0], terms[1], out=s, dtype=np.float64)
    for term in terms[2:]:
        s += term
    if k + many.bit_length() <= 53 + u:  # sums, multiples of 2^u, are exact
        total[...] = s
        certain[...] = True
        return
    _between(s, 0.0, many * many * _EPS * top, total, certain, spare)


def _shorter_fully(terms: Sequence[Array], total: Array) -> None:
    """As `_of_shorter`, of sums that are nearly halfway between two numbers."""
    s, left = terms[0].astype(np.float64), np.zeros(len(total))
    for term in terms[1:]:
        s, e = _two_sum(s, term.astype(np.float64))
        left += np.abs(e)
    low, high = (end.astype(total.dtype) for end in _ends(s, left))
    total[...] = np.where(left == 0, s, low)
    certain = (left == 0) | (low == high)
    _slowly(terms, total, np.flatnonzero(~(certain & np.isfinite(s))))


def _two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """fl(a + b) and a + b - fl(a + b): exactly, unless something overflows; then the second is NaN
    or infinite."""
    s = a + b
    of_b = s - a  # what of b went into it
    return s, (a - (s - of_b)) + (b - of_b)


def _fully(terms: Sequence[Array], total: Array, certain: Array) -> None:
    """Sum the elements that are not certain in another way."""
    if certain.all():
        return
    how = _doubles_fully if total.dtype == np.float64 else _shorter_fully
    doubts = np.flatnonzero(~certain)
    for first in range(0, len(doubts), _CHUNK):
        at = doubts[first : first + _CHUNK]
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
