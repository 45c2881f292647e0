"""The Kronecker product of two local operators."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy

from linop.errors import SpaceError
from linop.local_operators.functions import Local, local_operator, single_region
from linop.local_operators.matrices import matrix
from linop.local_operators.relabelling import as_map
from linop.local_operators.scipy_operators import from_scipy
from linop.normal_form.maps import Function, LocalMap
from linop.operators.operator import LinearOperator
from linop.provenance import records_origin
from linop.spaces.array_modules import Namespace
from linop.spaces.region import Region
from linop.spaces.scalars import Array
from linop.spaces.space import Space


@records_origin
def kron(A: Any, B: Any, *, name: str | None = None) -> LinearOperator:
    """The Kronecker product A ⊗ B, in the order of `numpy.kron`: of an array, A applies along the
    first dimensions, those of its own domain, and B along the others.

    Its matrix is never formed: applying it costs what applying A and B to each line costs. Maps
    whose matrix is unknown, and their Kronecker products, compute with NumPy's arrays.

    Args:
        A, B: operators inside one worker's memory, the same one, with one region on each side; or
            matrices, or SciPy's or PyLops' operators.
        name: the symbol; by default that of A and that of B, with ``⊗`` between.

    Returns:
        An operator between regions that have A's names, and A's shapes followed by B's.

    Raises:
        SpaceError: a side of A or B has not one region; they are on different workers, or have
            different dtypes. ArgumentError, ShapeError: one is no operator or matrix.
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
        return scipy.sparse.csr_array(scipy.sparse.kron(left.to_matrix(), right.to_matrix()))

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
    (a, m), (b, n) = ((one.domain, one.codomain.size) for one in (left, right))

    def apply(x: Array) -> Array:
        half = _by_line(right, np.reshape(x, (a.size, *b.regions[0].shape))).reshape(a.size, n)
        across = np.ascontiguousarray(half.T).reshape(n, *a.regions[0].shape)
        return _by_line(left, across).reshape(n, m).T.reshape(codomain.regions[0].shape)

    return apply


def _by_line(local: LocalMap, x: Array) -> Array:
    """A map applied to each line ``x[k]``."""
    y = np.empty((len(x), *local.codomain.regions[0].shape), local.codomain.dtype)
    for k, line in enumerate(x):
        (y[k],) = local([np.asarray(line)])
    return y


def _operator(one: Any) -> LinearOperator:
    if isinstance(one, LinearOperator):
        return one
    return from_scipy(one) if hasattr(one, "matvec") else matrix(one)
