"""Operators of PyLops-MPI as pairs for checks."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from linop.errors import MissingExtraError
from linop.spaces.region import Region
from linop.spaces.scalars import Array
from linop.spaces.space import Space
from linop.testing.subjects.pairs import Pair


def pylops_mpi_operator(op: Any, model: Any = None) -> Pair:
    """An operator of PyLops-MPI, for all checks, on ``linop.backends.get("mpi", comm=…)`` with its
    communicator. Collective: it is applied to zeros, to find out how its results are distributed.

    Args:
        op: an `MPILinearOperator`.
        model: a `DistributedArray` that is distributed as its arguments are; by default, as the
            results of its adjoint are. One that is
            broadcast becomes a replicated region.

    Raises:
        MissingExtraError: PyLops-MPI is not installed.
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
        # Where an operator moves its argument to whole rows first, its results lie like that too.
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
    )


def _applied(function: Any, like: Any, x: Array) -> Any:
    return function(_filled(like, x)).local_array


def _filled(like: Any, values: Any) -> Any:
    """An array that is distributed as another."""
    filled = like.zeros_like()
    filled[:] = values
    return filled


def _space(letter: str, array: Any, dtype: np.dtype[Any]) -> Space:
    """Blocks on their workers, or what all of them have as one replicated region."""
    workers = range(array.size)
    if "BROADCAST" in array.partition.name:
        return Space(Region(letter, array.global_shape, workers), dtype)
    shapes = zip(workers, array.local_shapes, strict=True)
    return Space([Region(f"{letter}{worker}", shape, worker) for worker, shape in shapes], dtype)
