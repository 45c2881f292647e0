"""Exact sparse matrices, entry by entry, for the comparison of operators with local maps.

A matrix is a table of boxes of one element each, in one region indexed by the position in the flat
vector; so products and sums are those of `linop.normal_form.boxes`, and are not rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from functools import cache, reduce
from itertools import pairwise
from random import Random
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import scipy

from linop.errors import UndecidableError
from linop.normal_form.boxes import Ints, Table, canonical, concatenate, expand, join
from linop.normal_form.columns import Column, column, exactly, multiples, ones, residues
from linop.spaces.exact import Exact, Rational, text
from linop.spaces.float_formats import machine_epsilon

Nudge: TypeAlias = "Callable[[scipy.sparse.coo_array], Column]"
Factors = Callable[[Nudge], list[Table]]
Shape = tuple[int, int]
Entries = tuple[Ints, Ints, npt.NDArray[np.float64]]
"""Row, column and absolute value of each entry of a matrix."""


def of(rows: Ints, columns: Ints, coef: Column) -> Table:
    """The table of the entries of a matrix; not canonical: duplicates stand for their sum."""
    zeros = np.zeros(len(rows), np.int64)
    at, of = (np.asarray(k, np.int64)[:, None] for k in (rows, columns))
    return Table(zeros, zeros, at, of, np.ones_like(at), coef)


def of_sparse(matrix: scipy.sparse.sparray, rows: Ints, columns: Ints, nudge: Nudge) -> Table:
    """The table of a sparse block of a matrix.

    Args:
        rows, columns: positions in the flat vectors of the block's rows and columns.
        nudge: gives the exact values that are taken for the entries.

    Raises:
        UndecidableError: an entry is not finite.
    """
    coo = scipy.sparse.coo_array(matrix)
    if not np.isfinite(coo.data).all():
        raise UndecidableError("equals: cannot decide; a local operator's matrix is not finite")
    return of(rows[coo.row], columns[coo.col], nudge(coo))


def beside(blocks: Iterable[Table]) -> Table:
    """The table of a matrix made of disjoint blocks; not canonical."""
    none = np.zeros(0, np.int64)
    return concatenate(of(none, none, ones(0)), *blocks)


def product(factors: Sequence[Table]) -> Table:
    """The canonical table of a product of matrices, first applied first."""
    return reduce(lambda right, left: canonical(join(left, right)), factors)


def same(left: Factors, right: Factors, shape: Shape, dtype: np.dtype[Any]) -> bool:
    """True if two products of matrices are equal in the arithmetic of a dtype, entry by entry.

    Local maps' matrices may hold rounded values, as 1/3 in floating point. So two that differ are
    the same up to rounding if small changes of these values, the same wherever a value occurs, make
    the difference vanish or change by its own size, in every entry.

    Args:
        left, right: the factors of each, first applied first, with the entries of local maps
            changed by a function.
        shape: of both products.

    Raises:
        UndecidableError: they are the same up to rounding only.
    """
    found = _difference(left, right, _exact, dtype)
    if not len(found) or dtype.kind in "iu":
        return not len(found)
    if _beyond_rounding(found, left(_scales), right(_scales), shape, dtype):
        return False
    sizes = _squares(found)
    unexplained = sizes
    for draw in range(_DRAWS):
        other = _difference(left, right, _nudge(dtype, draw), dtype)
        moved = _squares(canonical(concatenate(found, _opposite(other))))
        unexplained = {
            at: size for at, size in unexplained.items() if size > _DRAWS**2 * moved.get(at, 0)
        }
        if not unexplained:
            break
    else:
        return False
    worst = max(sizes.values())
    root = (Decimal(worst.numerator) / Decimal(worst.denominator)).sqrt()
    raise UndecidableError(
        f"equals: cannot decide; the matrices differ by {root:.1e}, which may be rounding. Compare "
        f"to_matrix() of both with a tolerance of your own"
    )


def _difference(left: Factors, right: Factors, nudge: Nudge, dtype: np.dtype[Any]) -> Table:
    a, b = product(left(nudge)), product(right(nudge))
    difference = canonical(concatenate(a, _opposite(b)))
    return canonical(replace(difference, coef=residues(difference.coef, dtype)))


def _opposite(table: Table) -> Table:
    return replace(table, coef=multiples(table.coef, -1))


def _exact(coo: scipy.sparse.coo_array) -> Column:
    return exactly(coo.data)


def _scales(coo: scipy.sparse.coo_array) -> Column:
    """For each entry the largest absolute value in its row or column. Entries that are sums, as of
    a product of matrices, have errors of that size."""
    sizes = np.abs(coo.data if coo.data.dtype.kind in "fc" else coo.data.astype(np.float64))
    rows, columns = (np.zeros(n, sizes.dtype) for n in coo.shape)
    np.maximum.at(rows, coo.row, sizes)
    np.maximum.at(columns, coo.col, sizes)
    return exactly(np.maximum(rows[coo.row], columns[coo.col]))


_DRAWS = 4
"""Random changes of the entries of local maps; an error may be as many times their effect."""


def _nudge(dtype: np.dtype[Any], draw: int) -> Nudge:
    """Random changes, of about a quarter of `_rounding` of the scales; the same for equal numbers
    of equal scales, and for conjugate ones."""
    size = Fraction(_rounding(dtype)) / _DRAWS

    @cache
    def changed(number: Exact, scale: Rational) -> Exact:
        rng = Random(f"{draw} {text(number.real)} {text(max(number.imag, -number.imag))}")
        return number + rng.choice((-1, 1)) * Fraction(rng.randint(32, 64), 64) * size * scale

    def nudge(coo: scipy.sparse.coo_array) -> Column:
        pairs = zip(_exact(coo).tolist(), _scales(coo).tolist(), strict=True)
        return column(changed(number, scale) for number, scale in pairs)

    return nudge


def _squares(table: Table) -> dict[tuple[int, int], Fraction]:
    """The squared absolute value of each entry, by row and column."""
    row, offset = expand(table.extent[:, 0])
    coef = table.coef[row].tolist()
    at, of = (table.at[row, 0] + offset).tolist(), (table.of[row, 0] + offset).tolist()
    squares = (Fraction(n.real) ** 2 + Fraction(n.imag) ** 2 for n in coef)
    return dict(zip(zip(at, of, strict=True), squares, strict=True))


def _beyond_rounding(
    difference: Table,
    left: Sequence[Table],
    right: Sequence[Table],
    shape: Shape,
    dtype: np.dtype[Any],
) -> bool:
    """True if an entry of the difference is larger than a bound of what rounding explains: that
    entry of the products of the factors' absolute values, in which nothing cancels.

    Args:
        left, right: the factors, those of local maps with `_scales` for entries.
    """
    rows, columns, sizes = _expanded(difference)
    terms = _magnitudes(left, shape) + _magnitudes(right, shape)
    layers = max(len(left), len(right)) // 2  # every other factor is a movement, which is exact
    bound = layers * _rounding(dtype) * terms[rows, columns]
    return bool((sizes > np.asarray(bound).ravel()).any())


def _rounding(dtype: np.dtype[Any]) -> float:
    """Largest relative error of an entry of a local map's own matrix: 16 eps, as of what was
    computed in the dtype; eps in 16-bit and shorter formats, to which entries are rounded once."""
    return (16 if dtype.itemsize >= 4 else 1) * machine_epsilon(dtype)


def _magnitudes(factors: Sequence[Table], shape: Shape) -> scipy.sparse.csr_array:
    """The product of the absolute values of matrices, in floating point; infinite out of range."""
    parts = [_expanded(factor) for factor in factors]
    sizes = [shape[1], *(_rows(here, later) for here, later in pairwise(parts)), shape[0]]
    total = scipy.sparse.eye_array(shape[1], format="csr")
    for (rows, columns, values), inner, outer in zip(parts, sizes, sizes[1:], strict=False):
        total = scipy.sparse.csr_array((values, (rows, columns)), (outer, inner)) @ total
    total.data[np.isnan(total.data)] = np.inf
    return scipy.sparse.csr_array(total)


def _rows(here: Entries, later: Entries) -> int:
    """The least number of rows of a factor: more would be zero, or meet no column of the next."""
    return 1 + max(*(int(k.max(initial=0)) for k in (here[0], later[1])), 0)


def _expanded(table: Table) -> Entries:
    """The row, the column and the absolute value of each entry of a table."""
    row, offset = expand(table.extent[:, 0])
    sizes = np.array([_size(number) for number in table.coef.tolist()], np.float64)
    return table.at[row, 0] + offset, table.of[row, 0] + offset, sizes[row]


def _size(number: Exact) -> float:
    try:
        return math.hypot(float(number.real), float(number.imag))
    except OverflowError:
        return math.inf
