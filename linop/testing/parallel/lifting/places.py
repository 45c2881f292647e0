"""Tensors of ranks as spaces, and what each rank does to them in its own memory (views, slices,
copies, sums, multiples) as movements between them, by arrays of positions: no matrix is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import numpy.typing as npt

import linop
from linop import LinearOperator, Movement, Region, Space, Subset
from linop.normal_form.boxes import Ints, Table, expand
from linop.normal_form.columns import Column, column
from linop.normal_form.columns import kinds as kinds_of
from linop.operators.named_movement import NamedMovement, out_of_place
from linop.provenance import records_origin
from linop.spaces.exact import Exact, gaussian

_LARGEST_DENOMINATOR = 2**16
"""Factors are read as fractions up to this: the numbers of ranks, and of elements, by which
programs divide."""
_ROUNDED = 2.0**-46
"""The relative error up to which a factor is the fraction: some roundings of float64."""


class UndecidedError(Exception):
    """A pair cannot be proven or disproven."""


def space_of(
    letter: str, sizes: Mapping[int, Sequence[int]], dtype: npt.DTypeLike = np.float64
) -> Space:
    """The space of tensors of several ranks, (n,) each: ``x1.2`` is the one at position 1 on rank
    2. Its order is that of ranks, then of positions. Tensors without elements are left out.

    Args:
        sizes: of the tensors, by rank.
    """
    return Space(
        [
            Region(f"{letter}{k}.{rank}", (size,), rank)
            for rank, each in sizes.items()
            for k, size in enumerate(each)
            if size
        ],
        dtype,
    )


def place_of(space: Space, index: int) -> tuple[int, int, int]:
    """The rank, position and element of an index in the order of a `space_of`."""
    for region in space.regions:
        if index < region.size:
            return region.workers[0], position_of(region), index
        index -= region.size
    raise IndexError(index)


def position_of(region: Region) -> int:
    """The position of a tensor among those of its rank."""
    return int(region.name[1:].partition(".")[0])


def exactly(values: np.ndarray) -> tuple[Column, bool]:
    """Factors that a program multiplies by, (n,), as exact numbers; and False if one is no fraction
    of small numbers, such as 1 / sqrt(3): its value is then that of the rounded float."""
    if len(values) and (values == values[0]).all():  # mostly, and much quicker
        numbers, which = values[:1], np.zeros(len(values), np.int64)
    else:
        numbers, which = np.unique(values, return_inverse=True)
    found: list[Exact] = []
    sure = True
    for number in numbers.tolist():
        parts = [_nearest(one) for one in (number.real, number.imag)]
        sure = sure and all(is_near for _, is_near in parts)
        found.append(gaussian(parts[0][0], parts[1][0]))
    return column(found)[which.reshape(-1)], sure


def _nearest(number: float) -> tuple[Fraction | int, bool]:
    """The fraction that a float stands for, and True if it is one of small numbers."""
    if number.is_integer():
        return int(number), True
    near = Fraction(number).limit_denominator(_LARGEST_DENOMINATOR)
    is_near = abs(float(near) - number) <= _ROUNDED * abs(number)
    return (near if is_near else Fraction(number)), is_near


def movement(
    domain: Space, codomain: Space, rows: Ints, columns: Ints, numbers: Column
) -> Movement:
    """The movement with these entries, summed where several are of one place.

    Args:
        domain, codomain: of regions of one dimension.
        rows, columns: positions in the order of their regions, (n,).
        numbers: coefficients, (n,), exact.
    """
    kinds = kinds_of(numbers)
    order = np.lexsort((rows, rows - columns, kinds))
    rows, columns, numbers, kinds = rows[order], columns[order], numbers[order], kinds[order]
    (dst, at), (src, of) = _inside(codomain, rows), _inside(domain, columns)
    begins = np.ones(len(rows), bool)
    begins[1:] = np.diff(rows) != 1
    for one in (columns - rows, dst, src, kinds):
        begins[1:] |= np.diff(one) != 0
    first = np.flatnonzero(begins)
    extent = np.diff(np.append(first, len(rows)))
    boxes = at[first, None], of[first, None], extent[:, None]
    return Movement(domain, codomain, Table(dst[first], src[first], *boxes, numbers[first]))


def _inside(space: Space, index: Ints) -> tuple[Ints, Ints]:
    """The numbers of regions, and positions in them, of positions in a space."""
    firsts = np.cumsum([0, *(region.size for region in space.regions)])[:-1]
    at = np.searchsorted(firsts, index, side="right") - 1
    return at, index - (firsts[at] if len(firsts) else 0)


@records_origin
def local(
    symbol: str, domain: Space, codomain: Space, rows: Ints, columns: Ints, numbers: Column
) -> LinearOperator:
    """A `movement` as an operator of a name, composed of memory operators: D_x Σ k S_{a→b} A_y
    (paper, equations 3 to 6), a sum over its coefficients k of additions of runs of elements a of x
    to b of y."""
    if not len(rows):
        return linop.zero(domain, codomain)
    name, _, subscript = symbol.partition("_")
    made = movement(domain, codomain, rows, columns, numbers)
    return NamedMovement(name, subscript, made, lambda: _composed(made))


def _composed(made: Movement) -> LinearOperator:
    pairs: dict[Exact, list[tuple[Subset, Subset]]] = {}
    for one in made:
        pairs.setdefault(one.coefficient, []).append((one.source, one.target))
    terms = []
    for k, each in pairs.items():
        moved = out_of_place(made.domain, made.codomain, each)
        terms.append(moved if k == 1 else k * moved)
    return reduce(add, terms) if terms else linop.zero(made.domain, made.codomain)


# What a movement says of elements


def entries(made: Movement) -> tuple[Ints, Ints, np.ndarray]:
    """Rows, columns and coefficients, (n,) each, the last as floats, of a movement between spaces
    of regions of one dimension; in the order of regions."""
    table = made.table
    starts = [
        np.cumsum([0, *(region.size for region in space.regions)])
        for space in (made.codomain, made.domain)
    ]
    which, within = expand(table.extent[:, 0])
    rows = starts[0][table.dst[which]] + table.at[which, 0] + within
    columns = starts[1][table.src[which]] + table.of[which, 0] + within
    return rows, columns, _rounded(table.coef)[which]


def _rounded(numbers: Column) -> np.ndarray:
    """Exact numbers as floats, or as complex ones if one is."""
    if numbers.dtype != object:
        return numbers.astype(float)
    is_complex = any(one.imag for one in numbers)
    return np.array([complex(one) if is_complex else float(one) for one in numbers])


def applied(made: Movement, x: np.ndarray, magnitudes: bool = False) -> np.ndarray:
    """A movement of a flat vector; with ``magnitudes``, that of the absolute values of both."""
    rows, columns, numbers = entries(made)
    terms = numbers * x[columns]
    if magnitudes:
        terms = np.abs(terms)
    parts = (terms.real, terms.imag) if np.iscomplexobj(terms) else (terms,)
    sums = [np.bincount(rows, one, made.codomain.size) for one in parts]
    return sums[0] if len(sums) == 1 else sums[0] + 1j * sums[1]


def workers_of(space: Space) -> Ints:
    """The first worker of each region."""
    return np.array([region.workers[0] for region in space.regions], np.int64)


def moves(made: Movement) -> bool:
    """True if a rank gets something of another one."""
    table = made.table
    to, of = workers_of(made.codomain)[table.dst], workers_of(made.domain)[table.src]
    return bool((to != of).any())


def sums_of_ranks(made: Movement) -> bool:
    """True if each element that a movement makes is a sum of elements of several ranks."""
    table = made.table
    ranks = workers_of(made.domain)[table.src]
    touched = False
    for number, region in enumerate(made.codomain.regions):
        into = table.dst == number
        count = np.zeros(region.size, np.int64)
        for rank in np.unique(ranks[into]):
            count += _covered(table, into & (ranks == rank), region.size)
        touched |= bool(count.any())
        if (count == 1).any():
            return False
    return touched


def _covered(table: Table, chosen: np.ndarray, size: int) -> np.ndarray:
    """(size,) True for elements that boxes of the chosen rows cover."""
    edges = np.zeros(size + 1, np.int64)
    start = table.at[chosen, 0]
    np.add.at(edges, start, 1)
    np.add.at(edges, start + table.extent[chosen, 0], -1)
    covered: np.ndarray = np.cumsum(edges[:-1]) > 0
    return covered


def coefficient(made: Movement, row: int, column: int) -> Exact:
    """The entry of a movement at a position of its codomain and of its domain."""
    (dst,), (at,) = _inside(made.codomain, np.array([row]))
    (src,), (of,) = _inside(made.domain, np.array([column]))
    table = made.table
    within = at - table.at[:, 0]
    found = (table.dst == dst) & (table.src == src) & (of - table.of[:, 0] == within)
    found &= (within >= 0) & (within < table.extent[:, 0])
    total: Any = 0
    for k in table.coef[found].tolist():
        total = total + k
    exact: Exact = total
    return exact


def largest(made: Movement) -> tuple[int, int, float]:
    """The first of the largest entries of a movement: its position in the codomain, that in the
    domain, and its magnitude; zero magnitude if it has none."""
    table = made.table
    if not len(table):
        return 0, 0, 0.0
    sizes = np.abs(_rounded(table.coef))
    (to, of) = (
        np.cumsum([0, *(region.size for region in space.regions)])
        for space in (made.codomain, made.domain)
    )
    rows, columns = to[table.dst] + table.at[:, 0], of[table.src] + table.of[:, 0]
    first = np.lexsort((columns, rows, -sizes))[0]
    return int(rows[first]), int(columns[first]), float(sizes[first])


def count(made: Movement) -> int:
    """The number of entries of a movement that are not zero."""
    return int(made.table.extent.prod(axis=1).sum())
