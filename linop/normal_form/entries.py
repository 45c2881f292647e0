"""Exact sparse matrices, entry by entry, for the comparison of operators with local maps.

A matrix is a table of boxes of one element each, in one region indexed by the position in the flat
vector; so products and sums are those of `linop.normal_form.boxes`, and are not rounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from functools import reduce
from typing import Any

import numpy as np
import scipy

from linop.errors import UndecidableError
from linop.normal_form.boxes import Ints, Table, canonical, concatenate, join
from linop.normal_form.columns import Column, exactly, largest_square, multiples, ones, residues

_ROUNDING = 16
"""Largest difference, in units of eps times the largest entry, that may be due to rounding of the
local maps' own matrices."""


def of(rows: Ints, columns: Ints, coef: Column) -> Table:
    """The table of the entries of a matrix; not canonical: duplicates stand for their sum."""
    zeros = np.zeros(len(rows), np.int64)
    at, of = (np.asarray(k, np.int64)[:, None] for k in (rows, columns))
    return Table(zeros, zeros, at, of, np.ones_like(at), coef)


def of_sparse(matrix: scipy.sparse.sparray, rows: Ints, columns: Ints) -> Table:
    """The table of a sparse block of a matrix.

    Args:
        rows, columns: positions in the flat vectors of the block's rows and columns.

    Raises:
        UndecidableError: an entry is not finite.
    """
    coo = scipy.sparse.coo_array(matrix)
    if not np.isfinite(coo.data).all():
        raise UndecidableError("equals: cannot decide; a local operator's matrix is not finite")
    return of(rows[coo.row], columns[coo.col], exactly(coo.data))


def beside(blocks: Iterable[Table]) -> Table:
    """The table of a matrix made of disjoint blocks; not canonical."""
    none = np.zeros(0, np.int64)
    return concatenate(of(none, none, ones(0)), *blocks)


def product(factors: Sequence[Table]) -> Table:
    """The canonical table of a product of matrices, first applied first."""
    return reduce(lambda right, left: canonical(join(left, right)), factors)


def same(a: Table, b: Table, dtype: np.dtype[Any]) -> bool:
    """True if two matrices are equal in the arithmetic of a dtype, entry by entry.

    Raises:
        UndecidableError: they differ by no more than `_ROUNDING` eps of the largest entry: local
            maps' matrices may hold rounded values, as 1/3 in floating point.
    """
    difference = canonical(concatenate(a, replace(b, coef=multiples(b.coef, -1))))
    difference = canonical(replace(difference, coef=residues(difference.coef, dtype)))
    if not len(difference) or dtype.kind in "iu":
        return not len(difference)
    worst = largest_square(difference.coef)
    scale = max(largest_square(a.coef), largest_square(b.coef))
    eps = float(np.finfo(dtype if dtype.kind in "fc" else np.float64).eps)
    if worst <= (_ROUNDING * Fraction(eps)) ** 2 * scale:
        raise UndecidableError(
            f"equals: cannot decide; the matrices differ by {_root(worst):.1e}, which may be "
            f"rounding. Compare to_matrix() of both with a tolerance of your own"
        )
    return False


def _root(square: Fraction | int) -> Decimal:
    return (Decimal(square.numerator) / Decimal(square.denominator)).sqrt()
