"""Factories of operators that are built of blocks: of matrices, and of operators of one name."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

import linop
from linop import LinearOperator, Region, Space
from linop.testing.describing import (
    EVERY,
    Description,
    dtype_of,
    holders,
    seeds,
    shapes,
    whole_numbers,
)
from linop.testing.factories.registry import operator_factory

_MATRICES = ("float64", "float32", "int64", "complex128")


@st.composite
def _grids(draw: st.DrawFn, workers: int) -> Description:
    """Sizes of rows and columns, and which blocks there are. Their regions are of `held`; without
    it, blocks are given as matrices."""
    rows, columns = (draw(st.lists(st.integers(0, 3), min_size=1, max_size=3)) for _ in range(2))
    there = [[draw(st.booleans()) for _ in columns] for _ in rows]
    for k in range(max(len(rows), len(columns))):  # at least one in each row and column
        there[k % len(rows)][k % len(columns)] = True
    held = draw(st.none() | holders(workers))
    dtype = draw(st.sampled_from(_MATRICES if held is None else EVERY))
    return {"rows": rows, "columns": columns, "there": there, "held": held, "dtype": dtype}


def _block(m: int, n: int, held: Any, dtype: str, seed: int) -> Any:
    values = whole_numbers((m, n), dtype, seed)
    if held is None:
        return values
    ends = (Space(Region(*side, held), dtype_of(dtype)) for side in (("x", n), ("y", m)))
    return linop.local_operators.matrix(values, *ends)


@operator_factory(_grids, pure=False)
def block(rows: Any, columns: Any, there: Any, held: Any, dtype: str) -> LinearOperator:
    return linop.block(
        [
            [
                _block(m, n, held, dtype, 10 * i + j) if there[i][j] else None
                for j, n in enumerate(columns)
            ]
            for i, m in enumerate(rows)
        ]
    )


@st.composite
def _diagonals(draw: st.DrawFn, workers: int) -> Description:
    """Shapes of blocks, each with the holders of its regions; without any, it is a matrix."""
    plain = draw(st.booleans())
    number = st.integers(0, 3)
    held = st.none() if plain else holders(workers)
    blocks = draw(st.lists(st.tuples(number, number, held), min_size=1, max_size=3))
    return {"blocks": blocks, "dtype": draw(st.sampled_from(_MATRICES if plain else EVERY))}


@operator_factory(_diagonals, pure=False)
def block_diag(blocks: Any, dtype: str) -> LinearOperator:
    return linop.block_diag(
        *(_block(m, n, held, dtype, k) for k, (m, n, held) in enumerate(blocks))
    )


@st.composite
def _factors(draw: st.DrawFn, workers: int) -> Description:
    sides = [[draw(shapes(draw(st.integers(0, 2)), 3)) for _ in range(2)] for _ in range(2)]
    held, dtype = draw(holders(workers)), draw(st.sampled_from(EVERY))
    return {"sides": sides, "held": held, "dtype": dtype, "seed": draw(seeds)}


@operator_factory(_factors, pure=False)
def kron(sides: Any, held: Any, dtype: str, seed: int) -> LinearOperator:
    factors = []
    for k, (source, target) in enumerate(sides):
        domain, codomain = (
            Space(Region(name, shape, held), dtype_of(dtype))
            for name, shape in (("x", source), ("y", target))
        )
        values = whole_numbers((codomain.size, domain.size), dtype, seed + k)
        if np.size(values) and k:
            values[0] = 0
        factors.append(linop.local_operators.matrix(values, domain, codomain))
    return linop.kron(*factors)
