"""The interface of backends and of bound plans.

An SPMD backend (`linop.backends.engine.worker`) is one worker of a program. A single-process
backend (`linop.backends.engine.whole`) holds all workers; its plans take and return whole vectors.
Execution is in `linop.backends.engine.execution`.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from linop.backends.engine.arrays.arguments import held, held_arrays, out_arrays
from linop.backends.engine.arrays.interface import NUMPY, Arrays, arrays_of_map
from linop.backends.engine.counters import CounterTable, Ledger
from linop.backends.engine.execution.calls import IN_PLACE, MISSED, NEW, OUT, Fast
from linop.backends.engine.execution.program import Program
from linop.backends.engine.tracing import Recording, traced
from linop.backends.together.transport import Transport
from linop.errors import ArgumentError, BackendError, LinopError
from linop.normal_form.maps import bare_or_dict
from linop.operators.operator import LinearOperator
from linop.operators.reproducible import Reproducible, refuse_loops, reproducible
from linop.planning.lowering import lower, workers_of
from linop.planning.placement import Placement
from linop.planning.plan import LoweredPlan
from linop.provenance import Keeper
from linop.spaces.distributed import Distributed
from linop.spaces.scalars import Array
from linop.spaces.space import Space
from linop.spaces.vector import Vector

Result = TypeVar("Result")


class Backend(Keeper, ABC):
    """Arrays and a transport that run plans.

    Attributes:
        name: as in ``linop.backends.get(name)``.
        worker: index of the worker that this process or thread is; None if it holds all of them.
        workers: number of workers; None if there are as many as an operator needs.
        arrays: array module of the plans' arguments and results.
        debug: True if calls are compared at every call, and plans are proven.
        sums: how plans form sums (`linop.operators.reproducible`), unless `compile` is told.
        ended: True if the program is over, and its plans are no longer needed.
        started: plans with an unfinished run, kept alive since messages still arrive.
        placement: the machine of each worker, the same on all workers; None if they are on one.
            Set before the first plan is compiled.

    Example:
        >>> X = linop.Space(linop.Region("x", (2,)))
        >>> linop.backends.get("threads").compile(2 * linop.identity(X))(np.ones(2)).tolist()
        [2.0, 2.0]
    """

    name: str
    worker: int | None = None
    workers: int | None = None
    debug = False
    sums = "fixed"
    ended = False
    placement: Placement | None = None

    def __init__(self, arrays: Arrays = NUMPY) -> None:
        self.arrays = arrays
        self.ledger = Ledger()
        self.tracing: Recording | None = None
        self.started: set[BoundPlan] = set()

    def compile(self, op: LinearOperator, sums: str | None = None) -> BoundPlan:
        """Bind an operator. Collective: all workers of the backend call it, in the same order.

        Args:
            sums: as of `linop.operators.reproducible.reproducible`; by default the backend's.

        Raises:
            BackendError: the backend lacks a worker of the operator, or workers built different
                operators; on every worker. ArgumentError, DTypeError: as of `reproducible`.
        """
        # Plans of plans stand above this module, and are imported where an operator needs them.
        if not getattr(op, "clinear", True):
            from linop.backends.engine.parts_plan import PartsPlan

            return PartsPlan(op, self.compile(op.over_reals(), sums))
        if getattr(op, "loops", False):
            if sums not in (None, self.sums):
                refuse_loops(op, sums)
            from linop.backends.engine.driving import driving

            return driving(op, self)
        if sums is None and not isinstance(op, Reproducible):
            sums = self.sums
        return self._compile(op if sums is None else reproducible(op, sums))

    @abstractmethod
    def _compile(self, op: LinearOperator) -> BoundPlan:
        """`compile`, of an operator of one dtype, without loops."""

    def vector(self, space: Space, arrays: Any) -> Vector:
        """A vector of the arrays held here; inner products sum over all workers (collectively).
        Workers make the vectors of a space in the same order, so that a vector is known by its
        number on all of them; a worker without a region of the space makes it of None."""
        given = held_arrays(space, self.worker, arrays, self.arrays)
        return Vector(space, given, self.shared(space))

    def shared(self, space: Space) -> Distributed | None:
        """Identity of a new vector; None if this process holds all workers."""
        del space
        return None

    def __reduce__(self) -> Any:
        raise ArgumentError(
            f"backend {self.name!r} of a running program cannot be pickled, nor what is made on "
            f"it: plans, layers, parallel modules, axes of a mesh. Pickle operators, and compile "
            f"them there; of a net that linop.strategies has made parallel pickle "
            f"linop.strategies.full_module(net), which all workers call; save other models' state "
            f"by linop.layers.save(model, path), and load it into a model that is made anew"
        )

    def __deepcopy__(self, memo: object) -> Backend:
        """The backend itself: copies of an object share the backend and its workers."""
        return self

    def counters(self) -> CounterTable:
        """Calls, messages, bytes and seconds of all operators compiled here, released plans
        included; of this worker, or of all workers if they are here. ``print`` shows a table."""
        return self.ledger.table()

    def trace(self, path: str | PathLike[str]) -> AbstractContextManager[None]:
        """Record a trace inside ``with backend.trace("run.json"):``, and write it as a timeline
        that Perfetto, chrome://tracing and Speedscope open: one row per worker, one event per call
        of a plan, and in it one per step, with peers and bytes. Collective at entry and exit;
        worker 0 writes the file. Nothing is written if the block raises.

        Workers on one machine share its clock. Rows of different machines are shifted so that the
        trace begins on all of them at once (entry synchronises the workers).

        Raises:
            BackendError: a trace is being recorded already. ArgumentError: the file cannot be
                written. Both on every worker.
        """
        return traced(self, Path(path), self._meeting())

    @abstractmethod
    def way(self, program: Program | None = None) -> str:
        """Transport of a program's messages (None: the expected one) and its reason, as text."""

    def _meeting(self) -> Transport | None:
        """Transport of the program's workers; None if this process holds all of them."""
        return None


class BoundPlan(Keeper, ABC):
    """An operator bound to a backend: ``plan(x)`` applies it, ``plan.H`` is its adjoint's plan.

    A worker with one region in the domain (codomain) passes (gets) a bare array; with several, a
    dict by region name; with none, None. A process that holds all workers does the same with all
    regions. A `Vector` gives a `Vector`. Results have memory of their own, or are written to
    ``out`` (arrays of the result's shape and dtype, fastest if contiguous) and returned.

    One run at a time: a second call before the first has finished, from any thread, is an error;
    runs of different plans, ``plan.H`` included, may overlap. ``with plan:`` ends in `release`.

    Example:
        >>> X = linop.TensorSpace((4,), linop.Partition((2,)))
        >>> def program(backend):
        ...     plan = linop.gather(X, 0).compile(backend)  # worker 1 gets nothing
        ...     y = plan(np.full(2, 1.0 * backend.worker))
        ...     return y if y is None else y.tolist(), plan.H(y).tolist()
        >>> linop.launch(program, workers=2)
        [([0.0, 0.0, 1.0, 1.0], [0.0, 0.0]), (None, [1.0, 1.0])]
    """

    def __init__(self, op: LinearOperator, backend: Backend) -> None:
        self.op = op
        self.backend = backend
        self.number = 0
        """Number of the plan, the same on all workers; its adjoint's is greater by one."""
        self.counters = backend.ledger.open(self, op)
        self._here = backend.worker
        self._adjoint: BoundPlan | None = None
        self.lock = threading.Lock()
        self._fast: list[Fast | None] = [None, None, None]
        self._released = False
        self._started = False
        self._given: Any = None
        self._regions_in = tuple(held(op.domain, self._here))
        self._regions_out = tuple(held(op.codomain, self._here))
        self._shape = self._regions_in[0].shape if len(self._regions_in) == 1 else None
        self._shape_out = self._regions_out[0].shape if len(self._regions_out) == 1 else None
        self._dtype = op.dtype
        kinds = {backend.arrays.of(region.memory) for region in self._regions_in}
        self._kind: type[Any] = (kinds.pop() if len(kinds) == 1 else backend.arrays).ndarray

    def __reduce_ex__(self, protocol: object) -> Any:
        """Plans of single-process backends pickle as the compilation that made them (`WholePlan`).

        Raises:
            ArgumentError: one worker's plan, which a process alone cannot compile again.
        """
        raise ArgumentError(
            f"{self!r} cannot be pickled: a plan has this worker's buffers and messages; pickle "
            f"its operator, plan.op, and compile that on all workers where it arrives"
        )

    def __deepcopy__(self, memo: object) -> BoundPlan:
        """The plan itself: copies of an object share its plans."""
        return self

    def __copy__(self) -> BoundPlan:
        return self

    # Interface for subclasses

    @property
    def is_broken(self) -> bool:
        """True if an error has interrupted a run of several workers: later calls raise."""
        return False

    @abstractmethod
    def _bind_adjoint(self, op: LinearOperator) -> BoundPlan:
        """The plan of the adjoint, which is `op`, on the same backend; without communication."""

    def give_up(self, names: Collection[str]) -> frozenset[str]:
        """Allow runs to overwrite arguments, whose regions are given by name. Before the first
        call; without communication, since this concerns the memory of this process alone.

        Returns:
            Those that runs do overwrite; they are no longer to be called with arrays of others.
        """
        del names
        return frozenset()

    @abstractmethod
    def _begin(self, x: Any, out: Any) -> None:
        """Start a run."""

    @abstractmethod
    def _end(self) -> Sequence[Array]:
        """Complete the run, and return its results in the order of the regions held here."""

    def _run(self, x: Any, out: Any) -> Any:
        """A run, from argument to result."""
        self._begin(x, out)
        return self._wrapped(self._end(), x)

    # Interface for users

    @property
    def domain(self) -> Space:
        return self.op.domain

    @property
    def codomain(self) -> Space:
        return self.op.codomain

    @property
    def H(self) -> BoundPlan:
        """The plan of the adjoint, bound without communication; ``plan.H.H is plan``."""
        if self._adjoint is None:
            self._adjoint = self._bind_adjoint(self.op.H)
            self._adjoint._adjoint = self
            self._adjoint.counters.is_adjoint_of(self.op)
        return self._adjoint

    def __call__(self, x: Any = None, *, out: Any = None) -> Any:
        fast = self._fast[NEW if out is None else OUT if out is not x else IN_PLACE]
        if fast is not None:
            result = fast(x, out)
            if result is not MISSED:
                return result
        if not self.lock.acquire(False):
            raise self._busy("called")
        try:
            if self.backend.tracing is not None:
                return self._traced("", self._recorded, x, out)
            return self._run(x, out)
        finally:
            self.lock.release()

    @property
    def receives_early(self) -> bool:
        """True if no sender waits for this worker's next call to begin, after the first one; then
        `start` of a worker that only receives gains nothing."""
        return False

    def in_any_order(self) -> None:
        """Allow calls to have another place among those of other plans on other workers, and do
        without what compares them: for plans whose calls have an order of their own, as by a
        schedule that all workers know. Before the first call, on all workers."""

    def start(self, x: Any = None, *, out: Any = None) -> None:
        """Start a run without waiting: check the argument, then post all messages that do not
        depend on others. The argument must not change before `finish`. An unfinished run keeps its
        memory as long as the backend lives.

        Raises:
            ArgumentError, RegionError, ShapeError, DTypeError: the argument does not fit; on every
                worker. BackendError: an earlier run is not finished.
        """
        if not self.lock.acquire(False):
            raise self._busy("start")
        try:
            self._traced("start ", self._begin, x, out)
            self._given = Vector(x.space, {}, x.shared) if isinstance(x, Vector) else None
            self.backend.started.add(self)
            self._started = True
        except BaseException as error:
            self._dropped(error)
            self.lock.release()
            raise

    def finish(self) -> Any:
        """Complete the run that `start` began, and return its result. Workers that have started
        several plans may have started them in any order; those of several stages they finish in one
        order, as messages of later stages leave in `finish`. Between machines, plans of one
        stage may have several (`linop.planning.hierarchy`).

        Raises:
            BackendError: there is no such run.
        """
        if not self._started:
            raise BackendError(f"{self!r}: finish without a start")
        self._started = False
        try:
            self.backend.started.discard(self)
            return self._wrapped(self._traced("finish ", self._end), self._given)
        except BaseException as error:
            self._dropped(error)
            raise
        finally:
            self.lock.release()

    def _dropped(self, error: BaseException) -> None:
        """Break the plan if an exception, such as an interrupt between two lines of linop, has left
        a run that cannot be finished."""

    def meet(self, call: int) -> None:  # nothing to check in one process
        """Check collectively that all workers are about to make the call of this number.

        Raises:
            BackendError: they are not; on every worker of the operator.
        """

    def enter(self, wrong: LinopError | None) -> None:
        """Before calls of `validated`: raise an error of this worker, on all that wait for it."""
        if wrong is not None:
            raise wrong

    def validated(self, arrays: Sequence[Array], outs: Sequence[Array]) -> None:
        """A call with arrays that fit, in the order of the regions held here, that writes the
        results to others, which share no memory with them."""
        self(bare_or_dict(self._regions_in, arrays), out=bare_or_dict(self._regions_out, outs))

    def _recorded(self, x: Any, out: Any) -> Any:
        """`_run` with each step recorded in the trace, where runs have steps."""
        self._begin(x, out)
        return self._wrapped(self._end(), x)

    def _traced(self, what: str, work: Callable[..., Result], *arguments: Any) -> Result:
        """Run a function, and record it as an event if a trace is being recorded."""
        tracing, counters = self.backend.tracing, self.counters
        if tracing is None:
            return work(*arguments)
        name, sent = str(self.op), counters.bytes_each
        about = {"operator": name, "messages": counters.messages_each, "bytes": sent}
        return tracing.timed(self._here, what + name, "plan", about, partial(work, *arguments))

    def _free(self) -> None:  # default: nothing to release
        """Release requests, communicators and shared memory."""

    def _busy(self, what: str) -> BackendError:
        if self._released:
            return BackendError(f"{self!r}: {what}, but it was released; compile it again")
        return BackendError(
            f"{self!r}: {what}, while an earlier run is not finished; finish it first, or compile "
            f"another plan for runs that overlap; one for each thread, compiled and called once "
            f"before the threads begin, in one order on all workers"
        )

    def _wrapped(self, results: Sequence[Array], given: Any) -> Any:
        regions = self._regions_out
        if not isinstance(given, Vector):
            return bare_or_dict(regions, results)
        shared = given.shared and given.shared.derived(f"plan {self.number}")
        return Vector(
            self.codomain,
            {r.name: a for r, a in zip(regions, results, strict=True)},
            shared or self.backend.shared(self.codomain),
        )

    def _arguments(self, x: Any) -> Sequence[Array]:
        """The argument's arrays, validated, in the order of the regions held here."""
        if self._fits(x):
            return () if x is None else (x,)
        arrays = held_arrays(self.domain, self._here, x, self.backend.arrays).values()
        # A memory-mapped array is used as a plain one, so that copies of it are in memory.
        return tuple(np.asarray(a) if isinstance(a, np.memmap) else a for a in arrays)

    def _outs(self, out: Any, given: Sequence[Array]) -> Any:
        """The validated ``out`` arrays, or None; see `out_arrays`."""
        if out is None:
            return None
        names = (region.name for region in self._regions_in)
        by_name = dict(zip(names, given, strict=True))
        return out_arrays(self.codomain, self._here, out, by_name, self.backend.arrays)

    def _fits(self, x: Any) -> bool:
        """Fast check: True if `x` is an array of the only region's shape and dtype, or None without
        regions."""
        if type(x) is not self._kind:
            return x is None and not self._regions_in
        return x.shape == self._shape and (x.dtype is self._dtype or x.dtype == self._dtype)

    def describe(self) -> str:
        """Text: messages, steps and transport of this worker's plan, or of all workers' plans."""
        workers = workers_of(self.op.stages) if self._here is None else (self._here,)
        way = self.backend.way()
        plans = (lower(self.op.stages, w, self.backend.placement) for w in workers)
        return "\n".join(described(plan, way) for plan in plans)

    def fail(self, error: BaseException) -> None:
        """End the waits of other workers, in this plan, for this one: for an error of this worker
        between calls, such as one in what computes the next argument. Where all workers are here,
        nobody waits."""
        del error

    def release(self) -> None:
        """Release buffers, requests and shared memory, the adjoint's too, as garbage collection
        does; the plan cannot be called again.

        Raises:
            BackendError: a run is not finished.
        """
        if self._released:
            return
        if not self.lock.acquire(False):
            raise self._busy("release")
        self._released = True  # the lock stays held: no further call
        self._free()
        adjoint, self._adjoint = self._adjoint, None
        if adjoint is not None:
            adjoint.release()

    def __enter__(self) -> BoundPlan:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<plan of {self.op!r} on {self.backend.name}>"

    def _repr_html_(self) -> str:
        from linop.pictures.html import plan_html

        whose = "all workers" if self._here is None else f"worker {self._here}"
        return plan_html(self, f"on {self.backend.name}, {whose}", self._here is not None)


def described(plan: LoweredPlan, way: str) -> str:
    """Text of a plan and its transport."""
    if not plan.sends and not plan.receives:
        way = "nothing: this worker exchanges no messages"
    return f"{plan.describe()}\n  by {way}"


def check_here(op: LinearOperator, backend: Backend) -> None:
    """Check that the array module supports the operator's dtype and local maps.

    Raises:
        DTypeError, ArgumentError: it does not; on every worker.
    """
    backend.arrays.check_dtype(op.dtype)
    for call in op.stages.calls:
        call.map.check_on(arrays_of_map(call.map, backend.arrays))


def check_workers(op: LinearOperator, backend: Backend) -> None:
    """Check that the backend has every worker that an operator names.

    Raises:
        BackendError: workers are missing.
    """
    needed = workers_of(op.stages)
    if backend.workers is not None and needed and needed[-1] >= backend.workers:
        missing = [w for w in needed if w >= backend.workers]
        raise BackendError(
            f"backend {backend.name!r} has workers 0 to {backend.workers - 1}; {op!r} needs "
            f"{missing[:8]} too: start more, or build the operator on fewer"
        )
