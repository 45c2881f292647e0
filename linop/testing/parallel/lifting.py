"""Movements of data between ranks as linop's operators, composed of its memory operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import scipy.sparse as sp

import linop
from linop import LinearOperator, Region, Space, Subset
from linop.operators.memory import adds

_NEAREST = 4096
"""Coefficients are fractions with denominators of at most this: the numbers of ranks, and of
elements, by which programs divide."""


def space_of(letter: str, sizes: Mapping[int, Sequence[int]]) -> Space:
    """The space of tensors of several ranks, (n,) each: ``x1.2`` is the one at position 1 on rank
    2. Its order is that of ranks, then of positions.

    Args:
        sizes: of the tensors, by rank.
    """
    return Space(
        [
            Region(f"{letter}{k}.{rank}", (size,), rank)
            for rank, each in sizes.items()
            for k, size in enumerate(each)
            if size
        ]
    )


def place_of(space: Space, index: int) -> tuple[int, int, int]:
    """The rank, position and element of an index in the order of a `space_of`."""
    for region in space.regions:
        if index < region.size:
            position = region.name[1:].partition(".")[0]
            return region.workers[0], int(position), index
        index -= region.size
    raise IndexError(index)


def operator(matrix: Any, domain: Space, codomain: Space) -> LinearOperator:
    """The operator of a sparse matrix between spaces of `space_of`, whose regions have other names:
    D_x Σ k S_{a→b} A_y (paper, equations 3 to 6), a sum over its coefficients k of additions of
    runs of elements a of x to b of y."""
    entries = sp.coo_matrix(matrix)
    rows, columns = (one.astype(np.int64) for one in entries.coords)
    values = entries.data.astype(float)
    kinds = np.unique(values)
    exact = [Fraction(float(k)).limit_denominator(_NEAREST) for k in kinds]
    if not any(exact):
        return linop.zero(domain, codomain)
    joined = Space((*domain.regions, *codomain.regions))
    enter = linop.allocate(domain, *codomain.regions)
    leave = linop.deallocate(joined, *domain.regions)
    terms = []
    for k, coefficient in zip(kinds, exact, strict=True):
        if not coefficient:
            continue
        of = values == k
        sources, targets = _runs(rows[of], columns[of], domain, codomain)
        moved = leave @ adds(joined, sources, targets) @ enter
        terms.append(moved if coefficient == 1 else coefficient * moved)
    return reduce(add, terms)


def _runs(
    rows: np.ndarray, columns: np.ndarray, domain: Space, codomain: Space
) -> tuple[list[Subset], list[Subset]]:
    """The subsets between which entries of a matrix move elements, of one run of elements each."""
    sides = []
    ends = np.zeros(len(rows), bool)
    diagonals = np.lexsort((rows, rows - columns))
    rows, columns = rows[diagonals], columns[diagonals]
    for space, index in ((domain, columns), (codomain, rows)):
        firsts = np.cumsum([0, *(region.size for region in space.regions)])
        at = np.searchsorted(firsts, index, side="right") - 1
        sides.append((space, at, index - firsts[at]))
        ends[1:] |= (np.diff(at) != 0) | (np.diff(index) != 1)
    ends[:1] = True
    begun = np.flatnonzero(ends)
    lengths = np.diff([*begun, len(rows)])
    found = [
        [
            space.regions[at[k]][int(offset[k]) : int(offset[k] + n)]
            for k, n in zip(begun, lengths, strict=True)
        ]
        for space, at, offset in sides
    ]
    return found[0], found[1]
