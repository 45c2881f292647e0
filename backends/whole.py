"""Backends whose one process holds all workers: plans take and give all regions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

from linop.backends.base import Backend, BoundPlan, check_workers
from linop.errors import ArgumentError
from linop.operator import LinearOperator
from linop.scalars import Array
from linop.space import Vector


class Whole(Backend):
    """A backend that holds every worker: so many, or by default as many as an operator needs."""

    def __init__(self, workers: int | None = None) -> None:
        if workers is not None and (not isinstance(workers, int) or workers < 1):
            raise ArgumentError(f"workers is a whole number from 1; given {workers!r}")
        self.workers = workers

    @abstractmethod
    def bind(self, op: LinearOperator) -> Callable[[Vector], Vector]:
        """What applies the operator to a vector with all regions, giving one in new memory."""

    def compile(self, op: LinearOperator) -> BoundPlan:
        check_workers(op, self)
        return WholePlan(op, self)


class WholePlan(BoundPlan):
    """A plan over all workers, run when it is finished."""

    def __init__(self, op: LinearOperator, backend: Whole) -> None:
        super().__init__(op, backend)
        self._whole = backend
        self._apply = backend.bind(op)

    def _bind_adjoint(self) -> BoundPlan:
        return WholePlan(self.op.H, self._whole)

    def _begin(self, arrays: dict[str, Array]) -> Vector:
        return Vector(self.domain, arrays)

    def _end(self, running: Vector) -> dict[str, Array]:
        return self._apply(running).arrays
