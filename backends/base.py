"""What all backends share: the backend's interface, bound plans, and how users' arrays come and go.

An SPMD backend (`Worker`) is one worker's end of a `Transport`. A backend that holds all workers in
one process (`Backend` without a worker) takes and gives whole vectors.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from linop.backends.execute import Execution
from linop.errors import ArgumentError, BackendError, RegionError
from linop.lowering import lower, workers_of
from linop.operator import LinearOperator
from linop.region import Region
from linop.scalars import Array, Scalar
from linop.space import Space, Vector, sum_by_worker
from linop.stages import bare_or_dict


class Backend(ABC):
    """Arrays and transport that run plans.

    Attributes:
        name: as in ``linop.backends.get(name)``.
        worker: which worker this process or thread is; None where it holds all of them.
        workers: how many there are; None where there are as many as an operator needs.
    """

    name: str
    worker: int | None = None
    workers: int | None = None

    @abstractmethod
    def compile(self, op: LinearOperator) -> BoundPlan:
        """Bind an operator. Collective: all workers of the backend call it, in the same order.

        Raises:
            BackendError: a worker of the operator is missing here, or workers built different
                operators; on every worker.
        """

    def vector(self, space: Space, arrays: Any) -> Vector:
        """A vector of the regions held here, from arrays as plans take them; its inner products
        sum over all workers (a collective call where there are several)."""
        return Vector(space, held_arrays(space, self.worker, arrays))


class BoundPlan(ABC):
    """An operator bound to a backend: ``plan(x)`` applies it, ``plan.H`` is its adjoint's plan.

    A worker with one region on a side passes and gets a bare array; with several, a dict by region
    name; with none, None. A process that holds all workers does the same with all regions. A
    `Vector` gives a `Vector`. Subclasses say how a run begins and ends.
    """

    def __init__(self, op: LinearOperator, backend: Backend) -> None:
        self.op = op
        self.backend = backend
        self._adjoint: BoundPlan | None = None
        self._running: Any = None
        self._as_vector = False

    @abstractmethod
    def _bind_adjoint(self) -> BoundPlan:
        """The plan of op.H on the same backend; without communication."""

    @abstractmethod
    def _begin(self, arrays: dict[str, Array]) -> Any:
        """Start a run on checked arrays; what `_end` needs, never None."""

    @abstractmethod
    def _end(self, running: Any) -> Mapping[str, Array]:
        """The results of the regions held here, in memory of their own."""

    @property
    def domain(self) -> Space:
        return self.op.domain

    @property
    def codomain(self) -> Space:
        return self.op.codomain

    @property
    def H(self) -> BoundPlan:
        """The plan of the adjoint; ``plan.H.H is plan``. Needs no communication."""
        if self._adjoint is None:
            self._adjoint = self._bind_adjoint()
            self._adjoint._adjoint = self
        return self._adjoint

    def start(self, x: Any = None) -> None:
        """Begin to apply the operator: check the argument, then send what can be sent. The argument
        must not change before `finish`.

        Raises:
            ArgumentError, RegionError, ShapeError, DTypeError: the argument does not fit.
        """
        if self._running is not None:
            raise BackendError(f"{self!r}: start, while an earlier start was not finished")
        arrays = held_arrays(self.domain, self.backend.worker, x)
        self._as_vector = isinstance(x, Vector)
        self._running = self._begin(arrays)

    def finish(self) -> Any:
        """Complete what `start` began, and return the result."""
        if self._running is None:
            raise BackendError(f"{self!r}: finish without a start")
        running, self._running = self._running, None
        results = self._end(running)
        regions = held(self.codomain, self.backend.worker)
        if self._as_vector:
            return self.backend.vector(self.codomain, {r.name: results[r.name] for r in regions})
        return bare_or_dict(regions, [results[r.name] for r in regions])

    def __call__(self, x: Any = None) -> Any:
        self.start(x)
        return self.finish()

    def describe(self) -> str:
        """The steps of this worker (of all, where this process holds all)."""
        worker = self.backend.worker
        workers = workers_of(self.op.stages) if worker is None else (worker,)
        return "\n".join(lower(self.op.stages, w).describe() for w in workers)

    def __repr__(self) -> str:
        return f"<plan of {self.op!r} on {self.backend.name}>"


class Transport(Protocol):
    """How one worker exchanges buffers with the others. Messages between two workers arrive in
    order for a tag; sending does not wait."""

    worker: int
    workers: int

    def receive(self, peer: int, tag: int, buffer: Array) -> Any:
        """Get ready for a message of exactly the buffer's size; what `wait` takes."""

    def send(self, peer: int, tag: int, buffer: Array) -> Any:
        """Begin to send; the buffer is not touched until `wait`."""

    def wait(self, pending: Sequence[Any]) -> None:
        """Until all these sends and receives are done."""

    def gather_all(self, data: bytes) -> list[bytes]:
        """Everybody's data, of equal length, by worker."""


class Worker(Backend):
    """One worker of an SPMD program over a transport."""

    def __init__(self, name: str, transport: Transport) -> None:
        self.name = name
        self.transport = transport
        self.worker: int = transport.worker
        self.workers: int = transport.workers
        self._plans = 0

    def compile(self, op: LinearOperator) -> BoundPlan:
        # Agreement first: it is collective, and who needs a missing worker may not be all.
        check_agreement(op, self.transport)
        check_workers(op, self)
        self._plans += 1
        return WorkerPlan(op, self, tag=2 * self._plans)

    def vector(self, space: Space, arrays: Any) -> Vector:
        given = held_arrays(space, self.worker, arrays)

        def total(partial: dict[int, Scalar]) -> Scalar:
            # The worker that counts a region is the first of its holders.
            return sum_over_workers(partial.get(self.worker, 0), space, self.transport)

        return Vector(space, given, total)


class WorkerPlan(BoundPlan):
    """One worker's bound plan over a transport."""

    def __init__(self, op: LinearOperator, backend: Worker, tag: int) -> None:
        super().__init__(op, backend)
        self.plan = lower(op.stages, backend.worker)
        self._worker = backend
        self._tag = tag

    def _bind_adjoint(self) -> BoundPlan:
        return WorkerPlan(self.op.H, self._worker, self._tag + 1)

    def _begin(self, arrays: dict[str, Array]) -> Execution:
        running = Execution(self.plan, self._worker.transport, self._tag, arrays)
        running.to_first_wait()
        return running

    def _end(self, running: Execution) -> dict[str, Array]:
        return running.to_end()


def held(space: Space, worker: int | None) -> Sequence[Region]:
    """The regions of a space that a worker holds; all of them, where one process holds all."""
    return space.regions if worker is None else space.on(worker)


def held_arrays(space: Space, worker: int | None, x: Any) -> dict[str, Array]:
    """The arrays of the regions held here, from what a user passed.

    Raises:
        ArgumentError, RegionError, ShapeError, DTypeError: it does not fit; the message says what
            was expected.
    """
    regions = held(space, worker)
    me = "this process" if worker is None else f"worker {worker}"
    if isinstance(x, Vector):
        space.same_as(x.space, f"argument on {me}")
        x = x.arrays
    if isinstance(x, Mapping):
        missing = [r.name for r in regions if r.name not in x]
        for name in x:
            space[name]
        if missing:
            raise RegionError(
                f"{me}: no array for the regions {missing}; it holds {_list(regions)}"
            )
        given = {r.name: x[r.name] for r in regions}
    elif not regions:
        if x is not None and np.size(x):
            raise ArgumentError(f"{me} holds no region here; pass None, not an array")
        given = {}
    elif len(regions) > 1 or x is None:
        what = "None" if x is None else f"a bare {type(x).__name__}"
        raise ArgumentError(f"{me}: {what} given; it holds {_list(regions)}")
    else:
        given = {regions[0].name: x}
    return {r.name: space.check(r, given[r.name]) for r in regions}


def check_workers(op: LinearOperator, backend: Backend) -> None:
    """Check that the backend has every worker that an operator names.

    Raises:
        BackendError: it has not.
    """
    needed = workers_of(op.stages)
    if backend.workers is not None and needed and needed[-1] >= backend.workers:
        missing = [w for w in needed if w >= backend.workers]
        raise BackendError(
            f"backend {backend.name!r} has workers 0 to {backend.workers - 1}; {op!r} needs "
            f"{missing[:8]} too: start more, or build the operator on fewer"
        )


def check_agreement(op: LinearOperator, transport: Transport) -> None:
    """Check, together, that all workers built the same operator.

    Raises:
        BackendError: they did not; on every worker.
    """
    # First a cheap digest of how it was made; the same operator may have been made in two ways.
    if len(set(transport.gather_all(op.stages.digest))) == 1:
        return
    digests = transport.gather_all(op.stages.fingerprint)
    if len(set(digests)) > 1:
        groups = [[w for w, d in enumerate(digests) if d == one] for one in dict.fromkeys(digests)]
        raise BackendError(
            f"workers built different operators: {' / '.join(map(str, groups))} agree among "
            f"themselves; worker {transport.worker} built {op!r}. Build it from the same arguments "
            f"on every worker"
        )


def sum_over_workers(value: Scalar, space: Space, transport: Transport) -> Scalar:
    """The sum of one number of every worker, in the order of workers: the same bits everywhere."""
    form = {"i": "=q", "u": "=Q", "c": "=dd"}.get(space.dtype.kind, "=d")
    numbers = (value.real, value.imag) if form == "=dd" else (value,)
    parts = [
        struct.unpack(form, data) for data in transport.gather_all(struct.pack(form, *numbers))
    ]
    return sum_by_worker({w: complex(*p) if len(p) > 1 else p[0] for w, p in enumerate(parts)})


def _list(regions: Sequence[Region]) -> str:
    return ", ".join(f"{r.name!r} of shape {r.shape}" for r in regions)
