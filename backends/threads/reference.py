"""The ``reference`` backend: literal interpretation of the expression, one primitive at a time.

Other backends are tested against it, so it uses neither normal forms nor plans.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from linop.backends.engine.arrays.arguments import written
from linop.backends.engine.base import Backend, BoundPlan, check_workers
from linop.backends.engine.compile_agreement import check_agreement
from linop.backends.engine.execution.program import Program
from linop.backends.engine.whole import Whole
from linop.backends.engine.worker import Worker
from linop.backends.threads.backend import run
from linop.backends.threads.mailboxes import Mailbox
from linop.errors import SpaceError
from linop.operators.operator import LinearOperator
from linop.planning.plan import LoweredPlan
from linop.spaces.scalars import Array
from linop.spaces.vector import Vector

_WAY = "nothing: the reference interprets the expression, and takes none of these steps"


def get(workers: int | None = None) -> Backend:
    """The backend, with all workers in this process: a given number, or by default as many as an
    operator needs."""
    return Reference(workers)


def launch(main: Callable[[Backend], Any], workers: int | None = None) -> list[Any]:
    """Run an SPMD program on threads, with interpreted plans: the workers' arrays are gathered, the
    expression is applied to the whole vector, and each worker keeps its regions."""
    return run(workers or 1, lambda mailbox: main(ReferenceWorker(mailbox)))


class Reference(Whole):
    """The reference outside of `launch`: all workers in this process."""

    name = "reference"

    def way(self, program: Program | None = None) -> str:
        del program
        return _WAY

    def bind(self, op: LinearOperator) -> tuple[Callable[[Vector], Vector], Sequence[LoweredPlan]]:
        return op, ()


class ReferenceWorker(Worker):
    """One worker of an SPMD program on the reference backend."""

    def __init__(self, mailbox: Mailbox) -> None:
        super().__init__("reference", mailbox)

    def way(self, program: Program | None = None) -> str:
        del program
        return _WAY

    def _compile(self, op: LinearOperator) -> BoundPlan:
        self._plans = 1 + check_agreement(op, self.transport, self._plans)
        check_workers(op, self)
        return ReferenceWorkerPlan(op, self, 2 * self._plans)


class ReferenceWorkerPlan(BoundPlan):
    """A plan that gathers the whole argument on every worker, and interprets the whole expression
    there."""

    def __init__(self, op: LinearOperator, backend: ReferenceWorker, number: int) -> None:
        super().__init__(op, backend)
        self.number = number
        self._worker = backend
        self._running: tuple[dict[str, Array], Sequence[Array] | None] = {}, None

    def _bind_adjoint(self, op: LinearOperator) -> BoundPlan:
        return ReferenceWorkerPlan(op, self._worker, self.number ^ 1)

    def _begin(self, x: Any, out: Any) -> None:
        arrays = self._arguments(x)
        outs = self._outs(out, arrays)
        part = {r.name: a.copy() for r, a in zip(self._regions_in, arrays, strict=True)}
        self._running = part, outs

    def _end(self) -> Sequence[Array]:
        running, outs = self._running
        whole: dict[str, Array] = {}
        gathered = self._worker.transport.gather_all(running, "call plan", self.op, self.number)
        for worker, part in enumerate(gathered):
            for name, array in part.items():
                if not np.array_equal(whole.setdefault(name, array), array, equal_nan=True):
                    raise SpaceError(
                        f"region {name!r} is replicated, but worker {worker} holds other values "
                        f"than worker {self.domain[name].workers[0]}"
                    )
        begun = time.perf_counter()
        result: Vector = self.op(Vector(self.domain, whole))
        self.counters.calls += 1
        self.counters.seconds += time.perf_counter() - begun
        results = [result.arrays[region.name] for region in self._regions_out]
        return results if outs is None else written(self._regions_out, results, outs)
