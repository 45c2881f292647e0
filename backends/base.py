"""What all backends share: the backend's interface, bound plans, and how users' arrays come and go.

An SPMD backend (`linop.backends.worker`) is one worker of a program. One that holds all workers
in one process (`linop.backends.whole`) takes and gives whole vectors.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from linop.backends.execution import views
from linop.backends.execution.arrays import NUMPY, Arrays, arrays_of_map
from linop.backends.execution.counters import CounterTable, Ledger
from linop.backends.execution.program import Program, same_array
from linop.backends.execution.tracing import Recording, traced
from linop.backends.transports.transport import Transport
from linop.errors import ArgumentError, BackendError, LinopError, RegionError
from linop.normal_form.maps import bare_or_dict
from linop.operators.operator import LinearOperator
from linop.planning.lowering import lower, workers_of
from linop.planning.plan import Plan
from linop.provenance import Keeper
from linop.spaces.region import Region
from linop.spaces.scalars import Array
from linop.spaces.space import Space, Total, Vector

Result = TypeVar("Result")


class Backend(Keeper, ABC):
    """Arrays and transport that run plans.

    Attributes:
        name: as in ``linop.backends.get(name)``.
        worker: which worker this process or thread is; None where it holds all of them.
        workers: how many there are; None where there are as many as an operator needs.
        arrays: what its plans take and give.
        debug: whether what workers call is compared at every call, and plans are proven.
        ended: whether its program is over, so that nobody needs its plans any more.
        started: plans with a run that is not finished: its messages come, whoever has the plan.
    """

    name: str
    worker: int | None = None
    workers: int | None = None
    debug = False
    ended = False

    def __init__(self, arrays: Arrays = NUMPY) -> None:
        self.arrays = arrays
        self.ledger = Ledger()
        self.tracing: Recording | None = None
        self.started: set[BoundPlan] = set()

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
        given = held_arrays(space, self.worker, arrays, self.arrays)
        return Vector(space, given, self.total(space))

    def total(self, space: Space) -> Total | None:
        """What sums the inner products of a space over all workers; None where this process holds
        all."""
        del space
        return None

    def __deepcopy__(self, memo: object) -> Backend:
        """Itself, for what has a backend and is copied: the workers are the same."""
        return self

    def counters(self) -> CounterTable:
        """Calls, messages, bytes and seconds of every operator compiled here, plans that are gone
        included; of this worker alone, where it is one of several. ``print`` shows a table."""
        return self.ledger.table()

    def trace(self, path: str | PathLike[str]) -> AbstractContextManager[None]:
        """Record what happens inside ``with backend.trace("run.json"):``, and write it as a
        timeline that Perfetto, chrome://tracing and Speedscope open: a row for every worker, an
        event for every call of a plan, and in it one for every step, with peers and bytes.
        Collective, at both ends; worker 0 writes the file. Nothing is written if the block raises.

        Workers on one machine share its clock. Those of different machines do not: their rows are
        shifted so that the trace begins on all machines at once (they meet there).

        Raises:
            BackendError: a trace is being recorded already. ArgumentError: the file cannot be
                written. Both on every worker.
        """
        return traced(self, Path(path), self._meeting())

    @abstractmethod
    def way(self, program: Program | None = None) -> str:
        """How messages travel, and why: those of a program, or those of one that is still to be
        bound."""

    def _meeting(self) -> Transport | None:
        """How the workers of the program meet; None where this process holds all."""
        return None


NEW, OUT, IN_PLACE = range(3)
"""Where the result of a call goes: to new memory, to what is passed as ``out``, or to ``out=x``."""
MISSED: Any = object()
"""What a quick call returns where it did nothing."""
Quick = Callable[[Any, Any], Any]
"""Takes an argument and ``out``, and gives the result."""


class BoundPlan(Keeper, ABC):
    """An operator bound to a backend: ``plan(x)`` applies it, ``plan.H`` is its adjoint's plan.

    A worker with one region on a side passes and gets a bare array; with several, a dict by region
    name; with none, None. A process that holds all workers does the same with all regions. A
    `Vector` gives a `Vector`. Results are memory of their own, or are written to ``out`` (arrays
    like the result, contiguous ones best) and returned.

    One run at a time: a second one before the first is finished, from whatever thread, is an error;
    runs of different plans, ``plan.H`` included, may overlap. ``with plan:`` ends in `release`.
    """

    def __init__(self, op: LinearOperator, backend: Backend) -> None:
        self.op = op
        self.backend = backend
        self.counters = backend.ledger.open(self, op)
        self._here = backend.worker
        self._adjoint: BoundPlan | None = None
        self.lock = threading.Lock()
        self._quick: list[Quick | None] = [None, None, None]
        self._released = False
        self._started = False
        self._as_vector = False
        self._regions_in = tuple(held(op.domain, self._here))
        self._regions_out = tuple(held(op.codomain, self._here))
        self._shape = self._regions_in[0].shape if len(self._regions_in) == 1 else None
        self._shape_out = self._regions_out[0].shape if len(self._regions_out) == 1 else None
        self._dtype = op.dtype
        kinds = {backend.arrays.of(region.memory) for region in self._regions_in}
        self._kind: type[Any] = (kinds.pop() if len(kinds) == 1 else backend.arrays).ndarray

    # What a subclass says

    @abstractmethod
    def _bind_adjoint(self) -> BoundPlan:
        """The plan of op.H on the same backend; without communication."""

    @abstractmethod
    def _begin(self, x: Any, out: Any) -> None:
        """Start a run."""

    @abstractmethod
    def _end(self) -> Sequence[Array]:
        """The results of the run under way, in the order of the regions held here."""

    def _run(self, x: Any, out: Any) -> Sequence[Array]:
        """Both at once."""
        self._begin(x, out)
        return self._end()

    def _recorded(self, x: Any, out: Any) -> Sequence[Array]:
        """`_run`, with steps on the timeline, where there are steps."""
        return self._run(x, out)

    # What users call

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
            self._adjoint.counters.is_adjoint_of(self.op)
        return self._adjoint

    def __call__(self, x: Any = None, *, out: Any = None) -> Any:
        quick = self._quick[NEW if out is None else OUT if out is not x else IN_PLACE]
        if quick is not None:
            result = quick(x, out)
            if result is not MISSED:
                return result
        if not self.lock.acquire(False):
            raise self._busy("called")
        try:
            if self.backend.tracing is not None:
                return self._traced("", self._applied, x, out)
            results = self._run(x, out)
        finally:
            self.lock.release()
        if self._shape_out is not None and type(x) is not Vector:
            return results[0]
        return self._wrapped(results, isinstance(x, Vector))

    def start(self, x: Any = None, *, out: Any = None) -> None:
        """Begin to apply the operator: check the argument, then send what can be sent. The argument
        must not change before `finish`; without that, plan and memory stay as long as the backend.

        Raises:
            ArgumentError, RegionError, ShapeError, DTypeError: the argument does not fit; on every
                worker. BackendError: an earlier run is not finished.
        """
        if not self.lock.acquire(False):
            raise self._busy("start")
        try:
            self._traced("start ", self._begin, x, out)
        except BaseException:
            self.lock.release()
            raise
        self._as_vector = isinstance(x, Vector)
        self._started = True
        self.backend.started.add(self)

    def finish(self) -> Any:
        """Complete what `start` began, and return the result."""
        if not self._started:
            raise BackendError(f"{self!r}: finish without a start")
        self._started = False
        self.backend.started.discard(self)
        try:
            return self._wrapped(self._traced("finish ", self._end), self._as_vector)
        finally:
            self.lock.release()

    def meet(self, call: int) -> None:  # who is alone meets nobody
        """Check, together, that all workers are about to make the same call, by a number that
        the caller gives it. Calls of one plan in another order on another worker would exchange
        each other's messages.

        Raises:
            BackendError: they are not; on every worker of the operator.
        """

    def _applied(self, x: Any, out: Any) -> Any:
        return self._wrapped(self._recorded(x, out), isinstance(x, Vector))

    def _traced(self, what: str, work: Callable[..., Result], *arguments: Any) -> Result:
        """Do something, and put it on the timeline."""
        tracing, counters = self.backend.tracing, self.counters
        if tracing is None:
            return work(*arguments)
        name, sent = str(self.op), counters.bytes_each
        about = {"operator": name, "messages": counters.messages_each, "bytes": sent}
        return tracing.timed(self._here, what + name, "plan", about, partial(work, *arguments))

    def _free(self) -> None:  # nothing to do is what most do
        """Give back what the plan holds outside of Python."""

    def _busy(self, what: str) -> BackendError:
        if self._released:
            return BackendError(f"{self!r}: {what}, but it was released; compile it again")
        return BackendError(
            f"{self!r}: {what}, while an earlier run is not finished; finish it first, or compile "
            f"another plan for runs that overlap; one for each thread, compiled and called once "
            f"before the threads begin, in one order on all workers"
        )

    def _wrapped(self, results: Sequence[Array], as_vector: bool) -> Any:
        if as_vector:
            regions = self._regions_out
            arrays = {r.name: a for r, a in zip(regions, results, strict=True)}
            return self.backend.vector(self.codomain, arrays)
        return bare_or_dict(self._regions_out, results)

    def _arguments(self, x: Any) -> Sequence[Array]:
        """The argument's arrays, in the order of the regions held here, checked."""
        if self._fits(x):
            return () if x is None else (x,)
        arrays = held_arrays(self.domain, self._here, x, self.backend.arrays).values()
        # One that is mapped from a file is an array like others, and its copies are in memory.
        return tuple(np.asarray(a) if isinstance(a, np.memmap) else a for a in arrays)

    def _outs(self, out: Any, given: Sequence[Array], in_place: bool = False) -> Any:
        """The arrays to write results to, checked, or None; see `out_arrays`."""
        if out is None:
            return None
        names = (region.name for region in self._regions_in)
        by_name = dict(zip(names, given, strict=True))
        return out_arrays(self.codomain, self._here, out, by_name, in_place, self.backend.arrays)

    def _fits(self, x: Any) -> bool:
        """Whether this is the array of the only region, as it should be, or None where there is no
        region: the common cases, found fast."""
        if type(x) is not self._kind:
            return x is None and not self._regions_in
        return x.shape == self._shape and (x.dtype is self._dtype or x.dtype == self._dtype)

    def describe(self) -> str:
        """What this worker sends and receives, its steps, and how its messages travel, and why; of
        all workers, where this process holds all."""
        workers = workers_of(self.op.stages) if self._here is None else (self._here,)
        way = self.backend.way()
        return "\n".join(described(lower(self.op.stages, w), way) for w in workers)

    def release(self) -> None:
        """Give back buffers, requests and shared memory, the adjoint's too; the plan cannot be
        called again. What nobody refers to any more is released by itself.

        Raises:
            BackendError: a run is not finished.
        """
        if self._released:
            return
        if not self.lock.acquire(False):
            raise self._busy("release")
        self._released = True  # the lock is never given back
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


def described(plan: Plan, way: str) -> str:
    """A plan, and how its messages travel."""
    if not plan.sends and not plan.receives:
        way = "nothing: this worker exchanges no messages"
    return f"{plan.describe()}\n  by {way}"


class Unfit:
    """What is passed to a plan in place of an argument that no arrays could be made of: the plan
    raises the error as it raises its own, so that every worker hears of it."""

    def __init__(self, error: LinopError) -> None:
        self.error = error


def held(space: Space, worker: int | None) -> Sequence[Region]:
    """The regions of a space that a worker holds; all of them, where one process holds all."""
    return space.regions if worker is None else space.on(worker)


def held_arrays(
    space: Space, worker: int | None, x: Any, arrays: Arrays = NUMPY
) -> dict[str, Array]:
    """The arrays of the regions held here, from what a user passed.

    Raises:
        ArgumentError, RegionError, ShapeError, DTypeError: it does not fit; the message says what
            was expected.
    """
    if isinstance(x, Unfit):
        raise x.error
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
    if not arrays.asynchronous:
        return {r.name: space.check(r, given[r.name], arrays.ndarray) for r in regions}
    return {r.name: space.check(r, given[r.name], arrays.of(r.memory).ndarray) for r in regions}


def check_here(op: LinearOperator, backend: Backend) -> None:
    """Check that the backend's arrays can be of the operator's dtype, and that its local maps can
    compute with them.

    Raises:
        DTypeError, ArgumentError: they cannot; on every worker.
    """
    backend.arrays.check_dtype(op.dtype)
    for call in op.stages.calls:
        call.map.check_on(arrays_of_map(call.map, backend.arrays))


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


def out_arrays(
    space: Space,
    worker: int | None,
    out: Any,
    given: Mapping[str, Array],
    in_place: bool = False,
    kind: Arrays = NUMPY,
) -> list[Array]:
    """The arrays to write results to, from what a user passed as ``out``.

    Args:
        given: the argument's arrays, by region, which `out` must not share memory with.
        in_place: except that a region's may be the same array.
        kind: what arrays are.

    Raises:
        ArgumentError, RegionError, ShapeError, DTypeError: they do not fit, cannot be written, or
            share memory with the argument, or elements of one with each other.
    """
    arrays = list(held_arrays(space, worker, out, kind).values())
    passed = list(out.arrays.values() if isinstance(out, Vector) else _values(out))
    for one in passed:
        if not isinstance(one, kind.ndarray | kind.of("host").ndarray):
            wanted = f"{kind.name}.ndarray"
            raise ArgumentError(f"out: {type(one).__name__} given, {wanted} expected")
    for region, array in zip(held(space, worker), arrays, strict=True):
        if not kind.writeable(array):
            raise ArgumentError(f"out, region {region.name!r}: the array is read-only")
        if views.overlaps_itself(array):
            raise ArgumentError(
                f"out, region {region.name!r}: elements of the array share memory with each other "
                f"(shape {array.shape}, strides {array.strides}); pass one with memory for each "
                f"element, such as np.empty({array.shape}, {array.dtype.name!r})"
            )
    names = [region.name for region in held(space, worker)]
    everything = [*arrays, *given.values()]
    owners = [*names, *given]
    for pair in kind.near(everything):
        k, other = sorted(pair)
        if k >= len(arrays):
            continue  # both are the argument's
        one, two = everything[k], everything[other]
        own = in_place and other >= len(arrays) and owners[other] == owners[k]
        if not (own and same_array(two, one)) and kind.may_share_memory(one, two):
            raise ArgumentError(
                f"out, region {owners[k]!r}: the array shares memory with the argument, or "
                f"with another; only operators that leave most of a region as it is work in place, "
                f"with out=x"
            )
    return arrays


def _values(out: Any) -> Sequence[Any]:
    return list(out.values()) if isinstance(out, Mapping) else [out]


def written(
    regions: Sequence[Region],
    results: Sequence[Array],
    outs: Sequence[Array],
    arrays: Arrays = NUMPY,
) -> Sequence[Array]:
    """The arrays that a user passed, with the results in them."""
    for region, result, out in zip(regions, results, outs, strict=True):
        arrays.of(region.memory).copyto(out, result)
    return outs


def _list(regions: Sequence[Region]) -> str:
    return ", ".join(f"{r.name!r} of shape {r.shape}" for r in regions)
