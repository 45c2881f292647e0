"""Differences of neighbours in all dimensions of a block with its halo, as a local operator."""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np
import scipy

from linop.local_operators.functions import local_operator
from linop.normal_form.maps import Function
from linop.operators.operator import LinearOperator
from linop.spaces.array_modules import Namespace
from linop.spaces.scalars import sparse_dtype
from linop.spaces.space import Space

Shape = tuple[int, ...]


def differences(wider: Space, target: Space) -> LinearOperator:
    """x[i+1] - x[i] in every dimension; zero for elements without a next one.

    Args:
        wider: of one region, of n dimensions: a block, and the next element at the upper side of
            each dimension unless the tensor ends there.
        target: of one region, of shape (n, *block).
    """
    whole, (_, *block) = wider.regions[0].shape, target.regions[0].shape
    slices = [_slices(tuple(block), whole, d) for d in range(len(block))]
    wide = sparse_dtype(wider.dtype)

    def port(namespace: Namespace) -> tuple[Function, Function]:
        module = namespace.module

        def forward(x: Any) -> Any:
            y = module.zeros((len(block), *block), x.dtype)
            for part, (rows, lower, upper) in zip(y, slices, strict=True):
                module.subtract(x[upper], x[lower], out=part[rows])
            return y

        def adjoint(y: Any) -> Any:
            x = module.zeros(whole, wide)
            for part, (rows, lower, upper) in zip(y, slices, strict=True):
                x[upper] += part[rows]
                x[lower] -= part[rows]
            return x.astype(y.dtype, copy=False)

        return forward, adjoint

    return local_operator(
        wider, target, port, "D", lambda: _matrix(tuple(block), whole).astype(wide)
    )


def _slices(block: Shape, wider: Shape, d: int) -> tuple[Any, Any, Any]:
    """Elements with a next one in dimension d: in the block, in the wider block, and their next
    ones there."""
    count = max(min(block[d], wider[d] - 1), 0)
    rows, lower, upper = ([slice(n) for n in block] for _ in range(3))
    rows[d], lower[d], upper[d] = slice(count), slice(count), slice(1, count + 1)
    return tuple(rows), tuple(lower), tuple(upper)


def _matrix(block: Shape, wider: Shape) -> scipy.sparse.csr_array:
    sizes = list(zip(block, wider, strict=True))
    inside = [scipy.sparse.eye_array(n, m, format="csr", dtype=np.int8) for n, m in sizes]
    along = [[*inside[:d], _line(*sizes[d]), *inside[d + 1 :]] for d in range(len(block))]
    rows = [reduce(scipy.sparse.kron, factors) for factors in along]
    # Products of matrices without entries are of float64, whatever their factors.
    return scipy.sparse.csr_array(scipy.sparse.vstack(rows)).astype(np.int8)


def _line(n: int, m: int) -> scipy.sparse.csr_array:
    """The n differences of a line of m elements."""
    k = np.arange(max(min(n, m - 1), 0))
    values = np.repeat(np.array([-1, 1], np.int8), k.size)
    where = np.tile(k, 2), np.concatenate([k, k + 1])
    return scipy.sparse.csr_array((values, where), shape=(n, m))
