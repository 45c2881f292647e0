"""The Kronecker product of two local operators."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy

from linop.errors import SpaceError
from linop.local_operators.flat import product
from linop.local_operators.functions import local_operator, single_region
from linop.local_operators.matrices import matrix
from linop.local_operators.relabelling import as_map
from linop.local_operators.scipy_operators import from_scipy
from linop.normal_form.maps import Function, LocalMap
from linop.operators.expressions import Local
from linop.operators.operator import LinearOperator
from linop.provenance import records_origin
from linop.spaces.array_modules import HOST, Namespace
from linop.spaces.region import Region
from linop.spaces.scalars import Array, sparse_dtype
from linop.spaces.space import Space

_SMALL = 2**18
"""Entries of a factor's matrix up to which it multiplies all lines at once: with 200 × 200 arrays,
1 ms where a call for each line takes 11 ms. Larger ones may be fast transforms."""


@records_origin
def kron(A: Any, B: Any, *, name: str | None = None) -> LinearOperator:
    """The Kronecker product A ⊗ B, in the order of `numpy.kron`: of an array, A applies along the
    first dimensions, those of its own domain, and B along the others.

    Its matrix is not formed: applying it costs what applying A and B to each line costs. Of maps
    whose matrix is unknown it computes with NumPy's arrays alone; on a device, that of others is
    formed, sparse.

    Args:
        A, B: operators inside one worker's memory, the same one, with one region on each side; or
            matrices, or SciPy's or PyLops' operators.
        name: the symbol; by default that of A and that of B, with ``⊗`` between.

    Returns:
        An operator between regions that have A's names, and A's shapes followed by B's.

    Raises:
        SpaceError: a side of A or B has not one region; they are on different workers, or have
            different dtypes. ArgumentError, ShapeError: one is no operator or matrix.

    Example:
        >>> A = linop.kron(np.array([[0.0, 1.0], [1.0, 0.0]]), np.array([[1.0, 1.0]]))
        >>> (A @ np.array([1.0, 2.0, 3.0, 4.0])).tolist()
        [7.0, 3.0]
        >>> A.todense().tolist() == np.kron([[0, 1], [1, 0]], [[1, 1]]).tolist()
        True
    """
    left, right = (as_map(_operator(one)) for one in (A, B))
    ends = []
    for a, b in ((left.domain, right.domain), (left.codomain, right.codomain)):
        if a.dtype != b.dtype:
            raise SpaceError(
                f"kron: operators of one dtype expected, given {a.dtype} and {b.dtype}"
            )
        one, other = single_region("kron", a), single_region("kron", b)
        if (one.workers, one.memory) != (other.workers, other.memory):
            raise SpaceError(f"kron: both operators on one worker expected, given {a} and {b}")
        region = Region(one.name, one.shape + other.shape, one.workers, one.memory)
        ends.append(Space(region, a.dtype))
    domain, codomain = ends
    known = left.matrix is not None and right.matrix is not None

    def whole() -> scipy.sparse.csr_array:
        product = scipy.sparse.kron(left.to_matrix(), right.to_matrix())
        return scipy.sparse.csr_array(
            product, dtype=sparse_dtype(domain.dtype)
        )  # zeros are float64

    def port(namespace: Namespace) -> tuple[Function, Function]:
        if namespace.ndarray is not np.ndarray:  # the matrix after all: there, lines are slow
            there = matrix(whole(), domain, codomain)
            assert isinstance(there, Local)
            return there.map.on(namespace).forward, there.map.on(namespace).backward
        return _product(left, right, codomain), _product(left.adjoint, right.adjoint, domain)

    symbol = name or f"({left.symbol} ⊗ {right.symbol})"
    return local_operator(
        domain, codomain, port, symbol, whole if known else None, known, fresh=False
    )


def _product(left: LocalMap, right: LocalMap, codomain: Space) -> Function:
    """The product of two maps as a function of an array."""
    a, b, shape = left.domain.size, right.domain.size, codomain.regions[0].shape
    across, along = _on_lines(left), _on_lines(right)

    def apply(x: Array) -> Array:
        y: Array = across(along(np.reshape(x, (a, b))).T).T
        return y.reshape(shape)

    return apply


def _on_lines(local: LocalMap) -> Function:
    """A map applied to each row of a 2-d array: at once, if its matrix is known and small."""
    dtype, shape = local.domain.dtype, local.domain.regions[0].shape
    size = local.domain.size * local.codomain.size
    if local.matrix is not None and size <= _SMALL:
        known, wide = local.to_matrix(), sparse_dtype(dtype)
        multiply = product(HOST, known.toarray() if 4 * known.nnz > size else known)
        return lambda x: multiply(x.T.astype(wide, copy=False)).T.astype(dtype, copy=False)

    def apply(x: Array) -> Array:
        y = np.empty((len(x), local.codomain.size), dtype)
        for k, line in enumerate(np.ascontiguousarray(x)):
            y[k] = np.ravel(local([line.reshape(shape)])[0])
        return y

    return apply


def _operator(one: Any) -> LinearOperator:
    if isinstance(one, LinearOperator):
        return one
    return from_scipy(one) if hasattr(one, "matvec") else matrix(one)
