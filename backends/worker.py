"""One worker of an SPMD program: its backend, its bound plans, and their agreement and failure
protocol.

At a plan's first call its workers agree, over a control channel, that all of them call this plan
with arguments that fit, and choose its transport. Later calls are not compared (except in debug
mode); a worker that fails in one raises an alarm, which ends the other workers' waits for it.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import starmap
from typing import Any
from weakref import WeakValueDictionary

from linop.backends.base import (
    IN_PLACE,
    NEW,
    OUT,
    Backend,
    BoundPlan,
    check_here,
    check_workers,
    described,
)
from linop.backends.execution.arrays import NUMPY, Arrays
from linop.backends.execution.counters import Counters
from linop.backends.execution.program import Program
from linop.backends.execution.quick import quick_call
from linop.backends.proving import prove
from linop.backends.transports.agreement import check_agreement
from linop.backends.transports.call_numbers import Calls
from linop.backends.transports.deadlock import PAST, Key, Point
from linop.backends.transports.point_to_point import Messages
from linop.backends.transports.recorder import Called, users_line
from linop.backends.transports.transport import Talk, Transport, Verdict, agree
from linop.errors import BackendError, LinopError, interrupt, restated
from linop.normal_form.stages import Stages
from linop.operators.operator import LinearOperator
from linop.planning.lowering import workers_of
from linop.planning.plan import Plan
from linop.planning.stretching import Plans
from linop.spaces.scalars import Array, Scalar
from linop.spaces.space import Space, Total

_GONE = 4096
"""Number of control exchanges and released plans whose progress is remembered."""


class Worker(Backend):
    """One worker of an SPMD program over a transport.

    Args:
        debug: compare all workers' calls and arguments at every call, and verify plans at compile
            time (`linop.backends.proving`).
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
        self._early: dict[int, tuple[LinopError, int]] = {}
        self._calls: dict[tuple[int, ...], Calls] = {}
        self._plans_of: dict[int, Plans] = {}
        transport.plans = self
        self.meeting = threading.RLock()
        """Held during an exchange on the control channel: two threads' messages would mix."""

    def compile(self, op: LinearOperator) -> BoundPlan:
        with self.meeting:
            return self._compile(op)

    def _compile(self, op: LinearOperator) -> BoundPlan:
        # Agreement first: it is collective; errors found below may occur on some workers only,
        # such as a coefficient that the dtype cannot represent, so lowering errors take part in it.
        lowered: Plan | LinopError
        try:
            lowered = self.planned(op.stages, self.worker)
        except LinopError as error:
            lowered = error
        self._plans = 1 + check_agreement(op, self.transport, self._plans, lowered, self.counts())
        for calls in self._calls.values():
            calls.again()
        check_workers(op, self)
        check_here(op, self)
        assert isinstance(lowered, Plan)
        plan = WorkerPlan(op, self, 2 * self._plans, lowered)
        self.prepare(plan.plan)
        return plan

    # Interface for transports (`linop.backends.transports.transport.Plans`)

    def hear(self, tag: int, error: LinopError, call: int = 0) -> None:
        plan = self.bound.get(tag)
        if plan is not None:
            plan.alarm = plan.alarm or (None if plan.is_broken else (error, call))
            plan.slow_down()
        elif tag // 2 > self._plans or tag ^ 1 in self.bound:
            self._early[tag] = error, call  # that plan is not compiled here yet

    def alarm(self, tag: int) -> LinopError | None:
        plan = self.bound.get(tag)
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
        for calls in self._calls.values():
            calls.stop()

    def planned(self, stages: Stages, worker: int) -> Plan:
        """Lowered plan of a worker: this worker's to run; the others' for verification."""
        if worker not in self._plans_of:
            self._plans_of[worker] = Plans(worker)
        return self._plans_of[worker].of(stages)

    def rewritten(self, plan: Plan) -> Plan:
        """The plan after this backend's passes over plans, such as selection of collectives."""
        return plan

    def prepare(self, plan: Plan) -> None:
        """Prepare resources shared by plans, such as shared-memory windows; collective at compile
        time."""

    def program(
        self, plan: Plan, group: Sequence[int], tag: int, about: Callable[[], str]
    ) -> Program:
        """A plan bound to its transport; collective over the group."""
        return Messages(plan, self.transport, tag, about, self.calls(group), self.arrays)

    def counts(self) -> dict[tuple[int, ...], int | None]:
        """Number of calls of each group's plans; None for groups whose count is unknown."""
        return {group: calls.counted for group, calls in self._calls.items()}

    def calls(self, group: Sequence[int]) -> Calls | None:
        """Call counter shared by all plans of a group of workers; None if this worker is not in it,
        or alone."""
        if self.worker not in group or len(group) < 2:
            return None
        return self._calls.setdefault(tuple(group), Calls())

    def way(self, program: Program | None = None) -> str:
        del program
        return f"messages over {self.transport.name}"

    def _meeting(self) -> Transport:
        return self.transport

    def total(self, space: Space) -> Total:
        pairs = space.dtype.kind == "c"

        def summed(partials: Sequence[Mapping[int, Scalar]]) -> list[Scalar]:
            # The worker that counts a region is the first of its holders.
            mine: list[Any] = [partial.get(self.worker, 0) for partial in partials]
            if pairs:  # pickle takes four times as long for a complex number
                mine = [(z.real, z.imag) for z in mine]
            everyones = self.transport.gather_all(mine, "take a norm or inner product")
            each = zip(*everyones, strict=True)  # in order of workers
            return [sum(starmap(complex, one) if pairs else one) for one in each]

        return summed


class WorkerPlan(BoundPlan):
    """One worker's bound plan. One run at a time: another one before `finish`, from another thread
    or from one of the plan's own local operators, is an error."""

    def __init__(
        self, op: LinearOperator, backend: Worker, tag: int, plan: Plan | None = None
    ) -> None:
        super().__init__(op, backend)
        if backend.debug:
            prove(op, backend.planned, backend.rewritten)
        self.plan = plan or backend.planned(op.stages, backend.worker)
        self.counters.sends([self.plan])
        self.group = workers_of(op.stages)
        self._worker = backend
        self._tag = tag
        self._calls = 0
        self._program: Program | None = None
        self._together = len(self.group) > 1
        self._broken: str | None = None
        self._seconds = 0.0
        self._line = ""
        self._failed = False
        self.alarm = backend._early.pop(tag, None)
        """The error of another worker's alarm and the call it is about, until it is raised here;
        None if there is none. Calls before that one can be completed: the failed worker has done
        its share of them."""
        backend.bound[tag] = self
        if self._together:
            gone = weakref.finalize(self, _gone, backend.transport.points, tag, self.counters)
            gone.atexit = False

    def _bind_adjoint(self) -> BoundPlan:
        return WorkerPlan(self.op.H, self._worker, self._tag ^ 1)

    def _begin(self, x: Any, out: Any) -> None:
        arrays, outs, program = self._ready(x, out)
        begun = time.perf_counter()
        try:
            tracing = self._worker.tracing
            if tracing is None:
                program.start(arrays, outs)
            else:
                with tracing.steps(program, str(self.op)):
                    program.start(arrays, outs)
        except BaseException as error:
            self._fail(error)
            raise
        self._seconds = time.perf_counter() - begun

    def _end(self) -> Sequence[Array]:
        assert self._program is not None
        self._worker.transport.busy = self._tag
        begun = time.perf_counter()
        try:
            results = self._program.finish()
        except BaseException as error:
            self._fail(error)
            raise
        self.counters.calls += 1
        self.counters.seconds += self._seconds + time.perf_counter() - begun
        return results

    def _run(self, x: Any, out: Any) -> Sequence[Array]:
        arrays, outs, program = self._ready(x, out)
        begun = time.perf_counter()
        try:
            results = program.run(arrays, outs)
        except BaseException as error:
            self._fail(error)
            raise
        self.counters.calls += 1
        self.counters.seconds += time.perf_counter() - begun
        how = NEW if out is None else OUT if out is not x else IN_PLACE
        if self._quick[how] is None and self.alarm is None and not self._worker.debug:
            listen = partial(self._worker.listen, self._tag) if self._together else None
            self._quick[how] = quick_call(
                self, program, how, self._worker.transport, self._tag, listen, self._fail
            )
        return results

    def _recorded(self, x: Any, out: Any) -> Sequence[Array]:
        self._begin(x, out)
        return self._end()

    def _ready(self, x: Any, out: Any) -> tuple[Sequence[Array], Sequence[Array] | None, Program]:
        """Validated arguments and ``out`` arrays, and the bound program. The first call binds it,
        collectively."""
        wrong: LinopError | None = None
        arrays: Sequence[Array] = ()
        outs: Sequence[Array] | None = None
        try:
            arrays = self._arguments(x)
            outs = self._outs(out, arrays, self.plan.in_place)
        except LinopError as error:
            wrong = error
        if self._broken is not None:
            raise BackendError(f"{self!r} was interrupted: {self._broken}; compile it again")
        if self._together:
            self._worker.listen(self._tag)
        program = self._program
        self._worker.transport.recorder.note(self._tag)
        self.counters.begun = time.perf_counter()
        if program is None or self._worker.debug:
            self._line = self._line or users_line()
            tracing = self._worker.tracing
            meet = partial(self._meet, wrong)
            if tracing is None:
                program = meet()
            else:
                about = {"operator": str(self.op), "peers": self.group}
                program = tracing.timed(self._here, "agree on the plan", "step", about, meet)
        elif wrong is not None:
            self._fail(wrong)
            raise wrong
        self._worker.transport.busy = self._tag
        return arrays, outs, program

    def _meet(self, wrong: LinopError | None) -> Program:
        with self._worker.meeting:
            self._agree(wrong)
            return self._program or self._bind_program()

    def meet(self, call: int) -> None:
        if self._together:
            self._agree(None, call)

    def _agree(self, wrong: LinopError | None, call: int = 0) -> None:
        """Check collectively that all workers call this plan, with valid arguments, and (if `call`
        is not 0) that it is the same call of it.

        Raises:
            The first worker's error, on every worker. BackendError: the workers call different
                plans.
        """
        transport = self._worker.transport
        if transport.worker not in self.group:
            if wrong is not None:
                raise wrong
            return
        what = f"call {call} of {self._named()}" if call else self._named()
        # Compiling compared the operators: the tag identifies the plan on all workers.
        verdict = Verdict(calls={(self._tag, call): (transport.worker, what)})
        self._calls += 1
        transport.busy = self._tag
        if wrong is not None:
            text = f"worker {transport.worker}, argument of {self.op!r}: {wrong}"
            verdict.wrong[transport.worker] = restated(wrong, text)
        me = self.group.index(transport.worker)
        with Talk(transport, ("call", self._tag, self._calls)) as talk:
            doing = f"make {what}" if call else f"call {what}"
            error = agree(talk, me, self.group, verdict, doing).error()
        if error is not None:
            raise error

    def _named(self) -> str:
        return f"plan {self._tag // 2}{' (adjoint)' if self._tag % 2 else ''}, {self.op!r}"

    @property
    def is_broken(self) -> bool:
        return self._broken is not None

    @property
    def is_running(self) -> bool:
        """True during a call; with `start`, until the end of `finish`."""
        return self.lock.locked() and not self._released

    @property
    def is_due(self) -> bool:
        """True if there is an alarm about the current call or an earlier one."""
        return self.alarm is not None and self.call >= self.alarm[1]

    @property
    def call(self) -> int:
        """Number of the current call, or of the last one."""
        return self.counters.calls + self.is_running

    @property
    def point(self) -> Point:
        """Progress in this plan: the current call. Progress within it is reported by its waits."""
        return PAST if self.is_broken or self.is_due else (self.call, math.inf)

    def called(self) -> Called:
        counters, runs = self.counters, self.is_running
        number = counters.calls + (runs or self._failed)
        each = counters.messages_each, counters.bytes_each
        return Called(self._named(), number, counters.begun, runs, *each, self._line)

    def slow_down(self) -> None:
        """Drop the fast paths, so that the next call checks for alarms."""
        self._quick = [None, None, None]

    def _bind_program(self) -> Program:
        self._program = self._worker.program(self.plan, self.group, self._tag, self._named)
        return self._program

    def broken(self, error: BaseException) -> None:
        """Mark the plan as broken: a run was interrupted here or on another worker, and later calls
        raise."""
        if self._broken is None:
            self._broken = f"{type(error).__name__}: {error}"
            if self._program is not None:
                self._program.abandon()
            self._worker.started.discard(self)
        self.alarm = None
        self.slow_down()
        self._worker.interrupted()

    def end(self, why: str) -> None:
        """End the plan with its backend: later calls raise."""
        self._broken = why
        self._quick = [None, None, None]
        if self._program is not None and self._started:
            self._program.abandon()  # messages of the run may still come
        elif self._program is not None:
            self._program.release()

    def _fail(self, error: BaseException) -> None:
        """Handle a failed run: mark the plan as broken, and raise an alarm on the other workers."""
        self._failed = True
        self.broken(error)
        transport = self._worker.transport
        text = f"worker {transport.worker} in {self.op!r}: {error}"
        kind = type(error) if isinstance(error, LinopError) else None
        if not self._together or transport.worker not in self.group:
            return
        interrupt(error)
        if not isinstance(error, LinopError) or error.alarm is None:
            alarm = kind(text) if kind else BackendError(f"{type(error).__name__}: {text}")
            transport.alarm(alarm, self._tag, self.call)

    def describe(self) -> str:
        return described(self.plan, self._worker.way(self._program))

    def _free(self) -> None:
        if self._program is not None:
            self._program.release()
        self._program = None
        self._quick = [None, None, None]


def _gone(points: dict[Key, Point], tag: int, counters: Counters) -> None:
    """Remember the progress of a released plan, for workers that may still wait for its last
    messages."""
    points["plan", tag] = counters.calls, math.inf
    if len(points) > _GONE:
        for key in list(points)[: _GONE // 2]:
            del points[key]
