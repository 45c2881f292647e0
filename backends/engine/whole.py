"""Base of backends that hold all workers in one process: plans take and return all regions."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from linop.backends.engine.arrays.arguments import written
from linop.backends.engine.arrays.interface import NUMPY, Arrays, arrays_named
from linop.backends.engine.base import Backend, BoundPlan, check_here, check_workers
from linop.errors import ArgumentError
from linop.operators.operator import LinearOperator
from linop.planning.plan import LoweredPlan
from linop.spaces.region import integer
from linop.spaces.scalars import Array
from linop.spaces.vector import Vector


class Whole(Backend):
    """A backend with all workers in this process: a given number, or by default as many as an
    operator needs."""

    def __init__(self, workers: int | None = None, arrays: Arrays = NUMPY) -> None:
        super().__init__(arrays)
        if workers is not None and (workers := integer(workers, "workers")) < 1:
            raise ArgumentError(f"workers is a whole number from 1; given {workers!r}")
        self.workers = workers

    def __reduce__(self) -> Any:
        return _made, (type(self), self.workers, self.arrays.name)

    @abstractmethod
    def bind(self, op: LinearOperator) -> tuple[Callable[[Vector], Vector], Sequence[LoweredPlan]]:
        """Bind an operator.

        Returns:
            A function that applies it to a `Vector` with all regions and returns one in new memory;
                and the plans it runs, from which sent messages and bytes are counted.
        """

    def _compile(self, op: LinearOperator) -> BoundPlan:
        check_workers(op, self)
        check_here(op, self)
        return WholePlan(op, self)


def _made(kind: type[Whole], workers: int | None, arrays: str, *others: Any) -> Whole:
    """The backend that was pickled."""
    return kind(workers, arrays_named(arrays), *others)


def _compiled(op: LinearOperator, backend: Whole) -> BoundPlan:
    return backend.compile(op)


class WholePlan(BoundPlan):
    """A plan over all workers. `start` checks the argument; the whole run is in `finish`."""

    def __init__(self, op: LinearOperator, backend: Whole) -> None:
        super().__init__(op, backend)
        self._whole = backend
        self._apply, plans = backend.bind(op)
        self.counters.sends(plans)
        self._running: tuple[Vector, Sequence[Array] | None] | None = None

    def __reduce_ex__(self, protocol: object) -> Any:
        """The compilation: it needs no other worker."""
        return _compiled, (self.op, self._whole)

    def _bind_adjoint(self, op: LinearOperator) -> BoundPlan:
        return WholePlan(op, self._whole)

    def _begin(self, x: Any, out: Any) -> None:
        arrays = self._arguments(x)
        outs = self._outs(out, arrays)
        names = (region.name for region in self._regions_in)
        self._running = Vector(self.domain, dict(zip(names, arrays, strict=True))), outs

    def _end(self) -> Sequence[Array]:
        assert self._running is not None
        (vector, outs), self._running = self._running, None
        begun = time.perf_counter()
        arrays = self._apply(vector).arrays
        self.counters.calls += 1
        self.counters.seconds += time.perf_counter() - begun
        results = [arrays[region.name] for region in self._regions_out]
        if outs is None:
            return results
        return written(self._regions_out, results, outs, self.backend.arrays)
