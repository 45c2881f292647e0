"""Plans as PyLops-MPI's operators, and vectors as its distributed arrays.

A rank's part of a distributed array is the regions of its worker, one after another, each in C
order. PyLops-MPI has no regions that several workers hold as one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from linop.backends import BoundPlan
from linop.backends.engine.worker import Worker
from linop.errors import ArgumentError, MissingExtraError, SpaceError
from linop.interop.flat_plan import euclidean
from linop.spaces.space import Space
from linop.spaces.vector import Vector


def to_pylops_mpi(plan: BoundPlan, base_comm: Any = None) -> Any:
    """A `pylops_mpi.MPILinearOperator` of a plan on MPI's ranks, for PyLops-MPI's solvers, stacks
    and sums: its arrays are distributed as the plan's regions are.

    Args:
        plan: of the backend ``mpi``.
        base_comm: the backend's communicator; COMM_WORLD by default, as of both.

    Raises:
        ArgumentError: `plan` is none of a worker. SpaceError: a region is replicated.
        MissingExtraError: PyLops-MPI is not installed.

    Example:
        On ranks, under ``mpiexec -n 2``::

            X = linop.TensorSpace((4,), linop.Partition((2,)))
            backend = linop.backends.get("mpi")
            Op = linop.interop.to_pylops_mpi((2 * linop.identity(X)).compile(backend))
            x = linop.interop.to_distributed_array(backend.vector(X, np.ones(2)), backend)
            y = Op @ x  # a DistributedArray: 2 in all places
            dot = y.dot(x)  # 8, on every rank
    """
    package = _package()
    if not (isinstance(plan, BoundPlan) and isinstance(plan.backend, Worker)):
        raise ArgumentError(f"to_pylops_mpi: the plan of a worker expected, given {plan!r}")
    worker, plan = plan.backend, euclidean(plan)
    op = plan.op
    domain, codomain = _Sides(op.domain, worker), _Sides(op.codomain, worker)
    comm = {} if base_comm is None else {"base_comm": base_comm}

    class PlanOperator(package.MPILinearOperator):  # type: ignore[misc,name-defined]
        """A plan of linop."""

        local_shapes_m = domain.shapes
        local_shapes_n = codomain.shapes

        def _matvec(self, x: Any) -> Any:
            return codomain.array(plan(domain.vector(x)), package, self.base_comm)

        def _rmatvec(self, y: Any) -> Any:
            return domain.array(plan.H(codomain.vector(y)), package, self.base_comm)

    return PlanOperator(shape=op.shape, dtype=op.dtype, **comm)


def to_distributed_array(vector: Vector, backend: Worker, base_comm: Any = None) -> Any:
    """A vector of a worker as a `pylops_mpi.DistributedArray`; a copy.

    Raises:
        SpaceError: a region is replicated. MissingExtraError: PyLops-MPI is not installed.

    Example:
        On ranks, under ``mpiexec -n 2``, which have two numbers each::

            X = linop.TensorSpace((4,), linop.Partition((2,)))
            backend = linop.backends.get("mpi")
            x = linop.interop.to_distributed_array(backend.vector(X, np.ones(2)), backend)
            x.global_shape, x.local_shape  # (4,), (2,)
    """
    return _Sides(vector.space, backend).array(vector, _package(), base_comm)


def from_distributed_array(array: Any, space: Space, backend: Worker) -> Vector:
    """A `pylops_mpi.DistributedArray` as a worker's vector of a space; a copy.

    Raises:
        SpaceError: a region is replicated. ArgumentError: the array is distributed otherwise.

    Example:
        A result of PyLops-MPI, for plans and solvers of linop, under ``mpiexec -n 2``::

            X = linop.TensorSpace((4,), linop.Partition((2,)))
            backend = linop.backends.get("mpi")
            array = pylops_mpi.DistributedArray(4)
            array[:] = backend.worker
            x = linop.interop.from_distributed_array(array, X, backend)
            x.inner(x)  # 2, on every rank: the vector is 0, 0, 1, 1
    """
    return _Sides(space, backend).vector(array)


class _Sides:
    """A space as distributed arrays: conversion of a worker's regions to one flat array, and back.

    Raises:
        SpaceError: a region is replicated.
    """

    def __init__(self, space: Space, backend: Worker) -> None:
        if shared := next((r for r in space.regions if r.replicated), None):
            raise SpaceError(
                f"PyLops-MPI's arrays hold each number once; region {shared.name!r} is one of the "
                f"workers {shared.workers}"
            )
        self.space, self.backend = space, backend
        self.regions = space.on(backend.worker)
        sizes = [sum(r.size for r in space.on(w)) for w in range(backend.workers)]
        self.shapes = [(size,) for size in sizes]

    def array(self, vector: Vector, package: Any, comm: Any) -> Any:
        empty = np.zeros(0, self.space.dtype)
        local = np.concatenate([empty, *(vector[r.name].ravel() for r in self.regions)])
        made = package.DistributedArray(
            self.space.size,
            local_shapes=self.shapes,
            dtype=self.space.dtype,
            **({} if comm is None else {"base_comm": comm}),
        )
        made[:] = local
        return made

    def vector(self, array: Any) -> Vector:
        if list(map(tuple, array.local_shapes)) != self.shapes:
            raise ArgumentError(
                f"a distributed array with local shapes {self.shapes} expected, given "
                f"{array.local_shapes}"
            )
        return self.backend.vector(self.space, dict(self._pieces(array.local_array)))

    def _pieces(self, local: Any) -> Iterator[tuple[str, Any]]:
        begin = 0
        for region in self.regions:
            piece = np.array(local[begin : begin + region.size], self.space.dtype)
            yield region.name, piece.reshape(region.shape)
            begin += region.size


def _package() -> Any:
    try:
        import pylops_mpi
    except ImportError as error:
        raise MissingExtraError(
            f"linop.interop with PyLops-MPI needs it: pip install pylops-mpi ({error})"
        ) from None
    return pylops_mpi
