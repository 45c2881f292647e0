"""The ``reference`` backend: the expression, interpreted literally, one primitive at a time.

The truth the other backends are tested against. It never sees a normal form or a plan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from linop.backends.base import Backend, BoundPlan, Worker, check_agreement, check_workers
from linop.backends.threads import Mailbox, run
from linop.backends.whole import Whole
from linop.errors import SpaceError
from linop.operator import LinearOperator
from linop.scalars import Array
from linop.space import Vector


def get(workers: int | None = None) -> Backend:
    """The backend; it holds all workers: so many, or by default as many as an operator needs."""
    return Reference(workers)


def launch(main: Callable[[Backend], Any], workers: int | None = None) -> list[Any]:
    """Run an SPMD program whose plans are interpreted: each worker's arrays are put together, the
    expression is applied to the whole vector, and each worker gets its part."""
    return run(workers or 1, lambda mailbox: main(ReferenceWorker(mailbox)))


class Reference(Whole):
    """All workers in this process."""

    name = "reference"

    def bind(self, op: LinearOperator) -> Callable[[Vector], Vector]:
        return op


class ReferenceWorker(Worker):
    """One worker of an SPMD program over the reference."""

    def __init__(self, mailbox: Mailbox) -> None:
        super().__init__("reference", mailbox)
        self.mailbox = mailbox

    def compile(self, op: LinearOperator) -> BoundPlan:
        check_agreement(op, self.transport)
        check_workers(op, self)
        return ReferenceWorkerPlan(op, self)


class ReferenceWorkerPlan(BoundPlan):
    """Every worker puts the whole argument together and interprets the whole expression."""

    def __init__(self, op: LinearOperator, backend: ReferenceWorker) -> None:
        super().__init__(op, backend)
        self._worker = backend

    def _bind_adjoint(self) -> BoundPlan:
        return ReferenceWorkerPlan(self.op.H, self._worker)

    def _begin(self, arrays: dict[str, Array]) -> dict[str, Array]:
        return {name: array.copy() for name, array in arrays.items()}

    def _end(self, running: dict[str, Array]) -> dict[str, Array]:
        whole: dict[str, Array] = {}
        for worker, part in enumerate(self._worker.mailbox.gather_all(running)):
            for name, array in part.items():
                if not np.array_equal(whole.setdefault(name, array), array, equal_nan=True):
                    raise SpaceError(
                        f"region {name!r} is replicated, but worker {worker} holds other values "
                        f"than worker {self.domain[name].workers[0]}"
                    )
        result: Vector = self.op(Vector(self.domain, whole))
        return result.arrays
