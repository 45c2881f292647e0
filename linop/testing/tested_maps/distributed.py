"""Conversion of PyLops-MPI operators to a `Pair`, for checks."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from linop.errors import MissingExtraError
from linop.spaces.region import Region
from linop.spaces.scalars import Array
from linop.spaces.space import Space
from linop.testing.tested_maps.pairs import Pair


def pylops_mpi_operator(op: Any, model: Any = None) -> Pair:
    """A PyLops-MPI operator as a pair for all checks, on ``linop.backends.get("mpi", comm=…)`` with
    the operator's communicator. Collective: the operator is applied to zeros, to find the
    distribution of its results.

    Args:
        op: an `MPILinearOperator`.
        model: a `DistributedArray` distributed like the operator's arguments; by default, like the
            results of its adjoint. A broadcast one becomes a replicated region.

    Raises:
        MissingExtraError: PyLops-MPI is not installed.

    Example:
        On ranks, under ``mpiexec -n 2``::

            Op = pylops_mpi.MPIFirstDerivative((100,))
            backend = linop.backends.get("mpi")
            print(linop.testing.check_adjoint(linop.testing.pylops_mpi_operator(Op), backend))
    """
    try:
        from pylops_mpi import DistributedArray
    except ImportError:
        raise MissingExtraError(
            "linop.testing.pylops_mpi_operator needs PyLops-MPI: pip install pylops-mpi"
        ) from None
    dtype = np.dtype(op.dtype if op.dtype is not None else np.float64)
    if model is None:
        shapes = getattr(op, "local_shapes_m", None)
        model = DistributedArray(op.shape[1], op.base_comm, local_shapes=shapes, dtype=dtype)
        # Operators that redistribute their argument to whole rows return results distributed so.
        model = op.rmatvec(_filled(op.matvec(_filled(model, 0)), 0))
    model = _filled(model, 0)
    data = _filled(op.matvec(model), 0)
    return Pair(
        partial(_applied, op.matvec, model),
        partial(_applied, op.rmatvec, data),
        _space("x", model, dtype),
        _space("y", data, dtype),
        (dtype, dtype),
        f"{type(op).__name__} with dtype={dtype}",
        flat=True,
        adapted=op,
    )


def _applied(function: Any, like: Any, x: Array) -> Any:
    return function(_filled(like, x)).local_array


def _filled(like: Any, values: Any) -> Any:
    """A new array with these values, distributed like another one."""
    filled = like.zeros_like()
    filled[:] = values
    return filled


def _space(letter: str, array: Any, dtype: np.dtype[Any]) -> Space:
    """The space of a distributed array: a region per worker, or one replicated region if it is
    broadcast."""
    workers = range(array.size)
    if "BROADCAST" in array.partition.name:
        return Space(Region(letter, array.global_shape, workers), dtype)
    shapes = zip(workers, array.local_shapes, strict=True)
    return Space([Region(f"{letter}{worker}", shape, worker) for worker, shape in shapes], dtype)
