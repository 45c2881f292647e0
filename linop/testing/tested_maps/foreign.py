"""Conversion to `TestedMap` of everything that checks accept: operators and plans of linop, pairs
of functions, matrices, operators of SciPy, PyLops and PyLops-MPI.

No package is imported here to recognise its operators.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import scipy

from linop import backends
from linop.backends.engine.base import Backend, BoundPlan
from linop.errors import ArgumentError
from linop.local_operators.scipy_operators import declared_dtype
from linop.operators.operator import LinearOperator
from linop.spaces.region import naturals
from linop.spaces.scalars import Array, plain
from linop.testing.tested_maps.distributed import pylops_mpi_operator
from linop.testing.tested_maps.pairs import Pair
from linop.testing.tested_maps.tested_map import Function, TestedMap, only_whole


def checkable(op: Any) -> bool:
    """True if `tested_map` accepts the object."""
    known = isinstance(op, TestedMap | BoundPlan | LinearOperator | Pair)
    return known or (not isinstance(op, type) and _adapted(op) is not None)


def tested_map(what: str, op: Any, backend: Backend | str = "reference") -> TestedMap:
    """An operator bound to a backend, as a `TestedMap`. Collective on a backend of one worker.

    Args:
        what: the name of the caller, for messages.
        op: an operator; a plan or subject keeps its own backend.
        backend: a backend or its name.

    Raises:
        ArgumentError: `op` is of no supported class.
    """
    if isinstance(op, TestedMap):
        return op
    if isinstance(op, BoundPlan):
        return _of_plan(op)
    known = op if isinstance(op, LinearOperator | Pair) else _adapted(op)
    if known is None:
        more = ""
        if callable(op):
            more = "; a function does not say what it maps: see linop.testing.pair"
        elif isinstance(op, tuple | list) and op and all(map(callable, op)):
            more = (
                "; functions do not say what they map: give linop.testing.pair(forward, adjoint, "
                "domain, codomain), with the shapes of their arguments or with spaces"
            )
        raise ArgumentError(f"{what}: expected an operator, given {op!r}{more}")
    chosen = backends.get(backend) if isinstance(backend, str) else backend
    return known.bound(chosen) if isinstance(known, Pair) else _of_plan(known.compile(chosen))


def _of_plan(plan: BoundPlan) -> TestedMap:
    def adjoint(y: Any) -> Any:
        return plan.H(y)  # built on first use

    return TestedMap(
        repr(plan.op),
        plan.domain,
        plan.codomain,
        plan,
        adjoint,
        plan.backend,
        real=not plan.op.clinear,
        exact=plan.op.stages.pure,
        op=plan.op,
    )


# Matrices, and objects with matvec and rmatvec


def in_dtype(op: Any, dtype: np.dtype[Any]) -> Pair:
    """A matrix, or an operator of SciPy or PyLops, as a pair on spaces of a dtype."""
    known = _adapted(op, dtype)
    assert known is not None
    return known


def _adapted(op: Any, dtype: np.dtype[Any] | None = None) -> Pair | None:
    """A matrix, or an operator of SciPy, PyLops or PyLops-MPI, as a pair; otherwise None.

    Args:
        dtype: of its spaces; by default its own.
    """
    if any(cls.__module__.startswith("pylops_mpi") for cls in type(op).__mro__):
        return pylops_mpi_operator(op)
    if (isinstance(op, np.ndarray) and op.ndim == 2) or scipy.sparse.issparse(op):
        matrix = op if scipy.sparse.issparse(op) else np.asarray(op)  # np.matrix has its own @
        if isinstance(op, np.ma.MaskedArray):
            plain(op, "a matrix to be checked")
        adjoint = matrix.conj().T
        return _flat(op, lambda x: matrix @ x, lambda y: adjoint @ y, dtype)
    if hasattr(op, "matvec") and hasattr(op, "rmatvec") and hasattr(op, "shape"):
        return _flat(op, op.matvec, op.rmatvec, dtype)
    return None


def _flat(
    op: Any, forward: Function, adjoint: Function, dtype: np.dtype[Any] | None = None
) -> Pair:
    """A pair from two functions of flat arrays. The shapes of the spaces are those that a PyLops
    operator declares (``dims``, ``dimsd``); otherwise 1-d.

    Args:
        dtype: by default the declared one; float64 if there is none, or SciPy guessed it.
    """
    is_matrix = not hasattr(op, "matvec")
    dtype = dtype or (op.dtype if is_matrix else declared_dtype(op)) or np.dtype(np.float64)
    dims, dimsd = getattr(op, "dims", op.shape[1]), getattr(op, "dimsd", op.shape[0])
    kind, (m, n) = type(op).__name__, op.shape
    known = not is_matrix and op.dtype == dtype
    name = repr(op) if known else f"<{m}x{n} {kind} with dtype={dtype}>"
    return Pair(
        partial(_applied, forward, naturals(dimsd, "dimsd")),
        partial(_applied, adjoint, naturals(dims, "dims")),
        dims,
        dimsd,
        (dtype, dtype),
        name.removeprefix("<").partition(" ")[2].removesuffix(">"),
        flat=True,
        memory="host",  # it computes on NumPy arrays, also on a device backend
        said="" if is_matrix else only_whole(dtype),
        adapted=op,
    )


def _applied(function: Function, shape: tuple[int, ...], x: Array) -> Any:
    result = function(x.ravel())
    fits = isinstance(result, np.ndarray) and result.size == np.prod(shape, dtype=int)
    return result.reshape(shape) if fits else result
