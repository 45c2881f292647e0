"""One worker of an SPMD program as a backend: it compiles plans, together with the others, and
keeps what its plans share. `linop.backends.engine.worker_plan` is one of these plans."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol
from weakref import WeakValueDictionary

from linop.backends.engine.arrays.interface import NUMPY, Arrays
from linop.backends.engine.base import Backend, BoundPlan, check_here, check_workers
from linop.backends.engine.compile_agreement import check_agreement
from linop.backends.engine.execution.layout import Layout
from linop.backends.engine.execution.program import Program
from linop.backends.engine.roads.call_numbers import Calls, Unnumbered
from linop.backends.engine.roads.point_to_point import PointToPoint
from linop.backends.engine.worker_plan import WorkerPlan
from linop.backends.together.deadlock import PAST, Key, Point
from linop.backends.together.meeting import OnTransport, Value
from linop.backends.together.transport import ANY, Item, Transport, weakly
from linop.errors import BackendError, LinopError, restated
from linop.normal_form.stages import Stages
from linop.operators.operator import LinearOperator
from linop.planning.passes import Options, bound_plan
from linop.planning.placement import Placement
from linop.planning.plan import LoweredPlan
from linop.planning.stretching import Plans
from linop.spaces.distributed import Asked, Distributed, Partials, code_of, first_name, origin
from linop.spaces.inner_products import packed, sums_by_worker, unpacked
from linop.spaces.scalars import Scalar
from linop.spaces.space import Space
from linop.spaces.vector import Vector


class Board(Protocol):
    """Sums of two numbers over all workers, apart from plans."""

    def sum(self, number: int, code: int, doing: str) -> tuple[int, int]:
        """Sums of two int64 over all workers, of which the first may overflow. Collective.

        Args:
            doing: the activity, for reports of waits.

        Raises:
            LinopError: the backend has failed or ended, or a worker does not come.
        """


class Worker(Backend):
    """One worker of an SPMD program over a transport.

    Args:
        debug: compare all workers' calls and arguments at every call, and verify plans at compile
            time (`linop.backends.engine.proving`).

    Example:
        What `linop.launch` passes to a program:

        >>> def program(backend):
        ...     return isinstance(backend, linop.backends.Worker), backend.worker, backend.workers
        >>> linop.launch(program, workers=2)
        [(True, 0, 2), (True, 1, 2)]
    """

    def __init__(
        self, name: str, transport: Transport, debug: bool = False, arrays: Arrays = NUMPY
    ) -> None:
        super().__init__(arrays)
        self.name = name
        self.transport = transport
        self.worker: int = transport.worker
        self.workers: int = transport.workers
        self.debug = debug
        self.bound: WeakValueDictionary[int, WorkerPlan] = WeakValueDictionary()
        self._plans = 0
        self.early: dict[int, tuple[LinopError, int]] = {}
        self._calls: dict[tuple[int, ...], Calls] = {}
        self._plans_of: dict[tuple[int, Placement | None], Plans] = {}
        self._vectors = _Vectors()
        transport.plans = weakly(self)
        self.parted: dict[tuple[Any, ...], Worker] = {}
        """This worker's parts of it, by the division of the workers, its purpose, and the number of
        parts that failed before."""
        self.interruptions = 0
        """Number of runs of plans that were interrupted, here or elsewhere."""
        self.failure: LinopError | None = None
        """The error that ended all calls of this backend, by `fail`."""
        self.meeting = threading.RLock()
        """Held during an exchange on the control channel: two threads' messages would mix."""

    def _compile(self, op: LinearOperator) -> BoundPlan:
        with self.meeting:
            return self._agreed(op)

    def _agreed(self, op: LinearOperator) -> BoundPlan:
        # Agreement first: it is collective; errors found below may occur on some workers only,
        # such as a coefficient that the dtype cannot represent, so lowering errors take part in it.
        lowered: LoweredPlan | LinopError
        try:
            lowered = self.planned(op.stages, self.worker)
        except LinopError as error:
            lowered = error
        self._plans = 1 + check_agreement(op, self.transport, self._plans, lowered, self.counts())
        for calls in self._calls.values():
            calls.again()
        check_workers(op, self)
        check_here(op, self)
        assert isinstance(lowered, LoweredPlan)
        plan = WorkerPlan(op, self, 2 * self._plans, lowered)
        self.prepare(plan.plan)
        return plan

    def together(
        self, work: Callable[[], tuple[Value, Item]], what: str
    ) -> tuple[Value, list[Item]]:
        """Result of local work, which may fail on some workers, and by worker its second half,
        which is sent: small objects. Collective.

        Args:
            what: name of the public function that all workers call.

        Raises:
            LinopError: it failed on a worker; on every worker.
        """
        with self.meeting:
            return OnTransport(self.transport).together(work, what, f"call {what}")

    def part(self, workers: Sequence[int], purpose: str = "") -> Worker:
        """Backend of some of the workers, this one among them: of its own plans, calls and waits.
        Collective: all workers of this backend call it, each with its own part of them; parts have
        no common workers. The same division for the same purpose again gives the same backend,
        unless that has failed (`fail`).

        Args:
            workers: in ascending order; they are numbered so from 0.
            purpose: equal on all workers. All workers are a part of their own only for a purpose.

        Raises:
            BackendError: parts overlap, or a worker is not in its own, or not in ascending order;
                on every worker.
        """
        mine = tuple(workers), self._failed(tuple(workers), purpose)
        everybodys = self.transport.gather_all(mine, f"divide the workers {purpose}".rstrip())
        said = [its for its, _ in everybodys]
        parts = sorted(set(said))
        for worker, its in enumerate(said):
            if worker not in its or [*its] != sorted({*its}):
                raise BackendError(
                    f"worker {worker}: the workers of its part in ascending order, {worker} among "
                    f"them, expected; given {its}"
                )
        if len({w for part in parts for w in part}) < sum(map(len, parts)):
            raise BackendError(f"parts without common workers expected; given {parts}")
        if len(parts) == 1 and not purpose:
            return self
        key = frozenset(parts), purpose, sum(failed for _, failed in everybodys)
        if key not in self.parted:
            self.parted[key] = self._part(parts, said[self.worker])
        return self.parted[key]

    def board(self, doing: str) -> Board | None:
        """The quickest way to sum two numbers over all workers; collective. None if there is none
        but a plan.

        Args:
            doing: what the workers need it for, for errors.
        """
        del doing
        return None

    def _failed(self, workers: tuple[int, ...], purpose: str) -> int:
        """Number of failed parts of these workers."""
        return sum(
            part.failure is not None and workers in division and purpose == its
            for (division, its, _), part in self.parted.items()
        )

    def fail(self, error: LinopError) -> None:
        """End this backend on all its workers, which may wait for this one in any plan, compilation
        or agreement: for an error of this worker between calls. All that waits in it raises the
        error from now on."""
        if self.failure is None:
            self.transport.alarm(error, ANY, 0)
            self._end(error)

    def _end(self, error: LinopError) -> None:
        self.failure = self.failure or error
        self.interrupted()
        for plan in list(self.bound.values()):
            plan.slow_down()

    def _part(self, parts: Sequence[tuple[int, ...]], mine: tuple[int, ...]) -> Worker:
        """The backend of this worker's part of all of them; collective."""
        del parts, mine
        raise BackendError(f"backend {self.name!r} cannot be divided")

    # Interface for transports (`linop.backends.together.transport.Plans`)

    def hear(self, tag: int, error: LinopError, call: int = 0) -> None:
        if tag == ANY:
            self._end(error)
            return
        plan = self.bound.get(tag)
        if plan is not None:
            plan.alarm = plan.alarm or (None if plan.is_broken else (error, call))
            plan.slow_down()
        elif tag // 2 > self._plans or tag ^ 1 in self.bound:
            self.early[tag] = error, call  # that plan is not compiled here yet

    def alarm(self, tag: int) -> LinopError | None:
        plan = self.bound.get(tag)
        if self.failure is not None:
            if plan is not None:
                plan.broken(self.failure)
            return self.failure
        if plan is None or plan.alarm is None or not plan.is_due:
            return None
        error, _ = plan.alarm
        plan.broken(error)
        return error

    def running(self, tag: int) -> int:
        plan = self.bound.get(tag)
        return plan.call if plan is not None and plan.is_running else 0

    def points(self) -> dict[Key, Point]:
        found: dict[Key, Point] = {}
        for tag, plan in list(self.bound.items()):
            found["plan", tag] = plan.point
            if plan.is_broken:
                found["call", tag] = PAST
        return found

    def last_calls(self) -> str:
        return self.transport.recorder.words(self.bound)

    def listen(self, tag: int) -> None:
        """Raise the error of another worker's alarm about a plan, if there is one."""
        self.transport.check(tag)

    def interrupted(self) -> None:
        """Record that a run was interrupted, here or elsewhere: numbers of calls may differ from
        now on, and are no longer compared."""
        self.interruptions += 1
        for calls in self._calls.values():
            calls.stop()

    def planned(self, stages: Stages, worker: int) -> LoweredPlan:
        """Lowered plan of a worker: this worker's to run; the others' for verification."""
        key = worker, self.placement
        if key not in self._plans_of:
            self._plans_of[key] = Plans(*key)
        return self._plans_of[key].of(stages)

    @property
    def options(self) -> Options:
        """Options of the passes over plans that run here."""
        return Options(small=self.arrays.small, inside=not self.arrays.asynchronous)

    def layout(self, plan: LoweredPlan, options: Options | None = None) -> Layout:
        """Memory of a lowered plan, after the passes over plans."""
        return Layout(bound_plan(plan, options or self.options), self.arrays)

    def prepare(self, plan: LoweredPlan) -> None:
        """Prepare resources shared by plans, such as shared-memory windows; collective at compile
        time."""

    def program(
        self,
        plan: LoweredPlan,
        group: Sequence[int],
        tag: int,
        about: Callable[[], str],
        numbered: bool = True,
    ) -> Program:
        """A plan bound to its transport; collective over the group.

        Args:
            numbered: as `WorkerPlan.numbered`.
        """
        layout, calls = self.layout(plan), self.calls(group, numbered)
        return Program(layout, PointToPoint(layout, self.transport, tag, about, calls), calls)

    def counts(self) -> dict[tuple[int, ...], int | None]:
        """Number of calls of each group's plans; None for groups whose count is unknown."""
        return {group: calls.counted for group, calls in self._calls.items()}

    def calls(self, group: Sequence[int], numbered: bool = True) -> Calls | None:
        """Call counter shared by all numbered plans of a group of workers; None if this worker is
        not in it, or alone."""
        if self.worker not in group or len(group) < 2:
            return None
        if not numbered:
            return Unnumbered()
        return self._calls.setdefault(tuple(group), Calls())

    def way(self, program: Program | None = None) -> str:
        del program
        return f"messages over {self.transport.name}"

    def _meeting(self) -> Transport:
        return self.transport

    def shared(self, space: Space) -> Distributed:
        number, epoch = self._vectors.next(space, self._plans), self._plans
        return Distributed(
            self._sums, first_name(space, epoch, number), partial(origin, space, number), self._run
        )

    def _run(self, op: LinearOperator, vector: Vector) -> Vector:
        key = "run", self
        if key not in op.kept:
            op.kept[key] = self.compile(op)
        found: Vector = op.kept[key](vector)
        return found

    def _sums(self, work: Callable[[], Partials], asked: Asked) -> list[Scalar]:
        mine: Any
        problem: LinopError | None = None
        try:
            # The worker that counts a region is the first of its holders.
            mine = [packed(one.get(self.worker, 0)) for one in work()]
        except LinopError as error:  # raised on all workers, which would wait for this one
            mine, problem = restated(error, str(error)), error
        said = self.transport.gather_all(mine, "take a norm or inner product", asked, asked.key)
        for worker, one in enumerate(said):
            if isinstance(one, LinopError):
                raise restated(one, f"on worker {worker}: {one}") from problem
        each = zip(*said, strict=True)  # in order of workers
        return sums_by_worker([dict(enumerate(map(unpacked, one))) for one in each])


class _Vectors(threading.local):
    """Numbers of the vectors that this thread has made, for each space and since all workers last
    compiled. The order of threads may be another one on other workers."""

    def __init__(self) -> None:
        self._epoch = 0
        self._made: Counter[int] = Counter()

    def next(self, space: Space, epoch: int) -> int:
        if epoch != self._epoch:
            self._epoch = epoch
            self._made.clear()
        code = code_of(space)
        self._made[code] += 1
        return self._made[code]
