"""One worker of an SPMD program: its backend, and its bound plans.

A plan's first call is where its workers find each other: they agree that all of them call this
plan with arguments that fit, and how its messages travel. Later calls do not ask again (unless the
backend is in debug mode); a worker that fails in one raises an alarm, so that nobody waits for it.
"""

from __future__ import annotations

import math
import struct
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
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
from linop.errors import BackendError, LinopError, interrupt
from linop.normal_form.stages import Stages
from linop.operators.operator import LinearOperator
from linop.planning.lowering import workers_of
from linop.planning.plan import Plan
from linop.planning.stretching import Plans
from linop.spaces.scalars import Array, Scalar
from linop.spaces.space import Space, Total

_GONE = 4096
"""Conversations, and plans that are gone, of which it is kept how far they were."""


class Worker(Backend):
    """One worker of an SPMD program over a transport.

    Args:
        debug: compare what all workers call, and with what, at every call; and prove plans when
            they are compiled (`linop.backends.proving`).
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
        """Held in a conversation with other workers: those of two threads would get mixed up."""

    def compile(self, op: LinearOperator) -> BoundPlan:
        with self.meeting:
            return self._compile(op)

    def _compile(self, op: LinearOperator) -> BoundPlan:
        # Agreement first: it is collective, and who needs a missing worker may not be all.
        # Here alone may be a coefficient that no number of the dtype is near.
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

    # What a transport asks of the plans

    def hear(self, tag: int, error: LinopError, call: int = 0) -> None:
        plan = self.bound.get(tag)
        if plan is not None:
            plan.alarm = plan.alarm or (None if plan.is_broken else (error, call))
            plan.slow_down()
        elif tag // 2 > self._plans or tag ^ 1 in self.bound:
            self._early[tag] = error, call  # it is not there yet

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
        """Raise what another worker's alarm said of a plan, if there was one."""
        self.transport.check(tag)

    def interrupted(self) -> None:
        """Take note that a run ended halfway, here or elsewhere: workers need not agree any more on
        how many calls there were."""
        for calls in self._calls.values():
            calls.stop()

    def planned(self, stages: Stages, worker: int) -> Plan:
        """A worker's plan: this one's to run, those of others to be proven with it."""
        if worker not in self._plans_of:
            self._plans_of[worker] = Plans(worker)
        return self._plans_of[worker].of(stages)

    def rewritten(self, plan: Plan) -> Plan:
        """A plan as it may run in the place of one that was lowered: with collectives."""
        return plan

    def prepare(self, plan: Plan) -> None:
        """Make ready what plans share, when one is compiled; collective."""

    def program(
        self, plan: Plan, group: Sequence[int], tag: int, about: Callable[[], str]
    ) -> Program:
        """A plan, bound to the way in which its messages travel; collective over the group."""
        return Messages(plan, self.transport, tag, about, self.calls(group), self.arrays)

    def counts(self) -> dict[tuple[int, ...], int | None]:
        """How many calls there were of the plans of some workers; None where that is not known."""
        return {group: calls.counted for group, calls in self._calls.items()}

    def calls(self, group: Sequence[int]) -> Calls | None:
        """The calls of all plans of some workers; None where this is none of several."""
        if self.worker not in group or len(group) < 2:
            return None
        return self._calls.setdefault(tuple(group), Calls())

    def way(self, program: Program | None = None) -> str:
        del program
        return f"messages over {self.transport.name}"

    def _meeting(self) -> Transport:
        return self.transport

    def total(self, space: Space) -> Total:
        def summed(partials: Sequence[Mapping[int, Scalar]]) -> list[Scalar]:
            # The worker that counts a region is the first of its holders.
            mine = [partial.get(self.worker, 0) for partial in partials]
            return sums_over_workers(mine, space, self.transport)

        return summed


class WorkerPlan(BoundPlan):
    """One worker's bound plan. One run at a time: another one before `finish`, from another thread,
    or from a local operator of its own, is an error."""

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
        """The error that broke it on another worker, and in which call, if nobody has been told
        here. Calls before that one can be completed: the other worker has done its part."""
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
        """Checked arguments, and the program; by agreement at the first call."""
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
        """Check, together, that all call this plan, with arguments that fit; and that it is the
        same call of it, where calls have numbers.

        Raises:
            The first worker's error, on every worker. BackendError: they call different plans.
        """
        transport = self._worker.transport
        if transport.worker not in self.group:
            if wrong is not None:
                raise wrong
            return
        what = f"call {call} of {self._named()}" if call else self._named()
        # What the plan is, all workers agreed on when they compiled it.
        verdict = Verdict(calls={(self._tag, call): (transport.worker, what)})
        self._calls += 1
        transport.busy = self._tag
        if wrong is not None:
            text = f"worker {transport.worker}, argument of {self.op!r}: {wrong}"
            verdict.wrong[transport.worker] = type(wrong).__name__, text
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
        """True if a call is under way: from `start` on, where that began it."""
        return self.lock.locked() and not self._released

    @property
    def is_due(self) -> bool:
        """True if an alarm is about the call under way, or an earlier one."""
        return self.alarm is not None and self.call >= self.alarm[1]

    @property
    def call(self) -> int:
        """The number of the call under way, or of the last one."""
        return self.counters.calls + self.is_running

    @property
    def point(self) -> Point:
        """How far this worker is in it: how far in a call, its waits say."""
        return PAST if self.is_broken or self.is_due else (self.call, math.inf)

    def called(self) -> Called:
        counters, runs = self.counters, self.is_running
        number = counters.calls + (runs or self._failed)
        each = counters.messages_each, counters.bytes_each
        return Called(self._named(), number, counters.begun, runs, *each, self._line)

    def slow_down(self) -> None:
        """Look for alarms in the next call, and whatever else there may be."""
        self._quick = [None, None, None]

    def _bind_program(self) -> Program:
        self._program = self._worker.program(self.plan, self.group, self._tag, self._named)
        return self._program

    def broken(self, error: BaseException) -> None:
        """A run ended halfway, here or on another worker: there can be no other."""
        if self._broken is None:
            self._broken = f"{type(error).__name__}: {error}"
            if self._program is not None:
                self._program.abandon()
            self._worker.started.discard(self)
        self.alarm = None
        self.slow_down()
        self._worker.interrupted()

    def end(self, why: str) -> None:
        """There can be no other run, anywhere: the backend ends."""
        self._broken = why
        self._quick = [None, None, None]
        if self._program is not None and self._started:
            self._program.abandon()  # messages of the run may still come
        elif self._program is not None:
            self._program.release()

    def _fail(self, error: BaseException) -> None:
        """A run ended halfway: nobody else must wait for it. For one without a part nobody does."""
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
    """Keep how far a plan was that is gone, for a worker that may wait for its last messages."""
    points["plan", tag] = counters.calls, math.inf
    if len(points) > _GONE:
        for key in list(points)[: _GONE // 2]:
            del points[key]


def sums_over_workers(values: Sequence[Scalar], space: Space, transport: Transport) -> list[Scalar]:
    """The sum of each number over all workers, in their order: the same bits everywhere."""
    whole, pairs = space.dtype.kind in "iu", space.dtype.kind == "c"
    form = "=" + ("16s" if whole else "dd" if pairs else "d") * len(values)
    numbers: list[Any] = [x for v in values for x in ((v.real, v.imag) if pairs else (v,))]
    if whole:  # sums over regions of products that have 64 bits each
        numbers = [n.to_bytes(16, "little", signed=True) for n in numbers]
    sums: list[Scalar] = [0] * len(values)
    for data in transport.gather_all(struct.pack(form, *numbers), "take a norm or inner product"):
        said: Sequence[Any] = struct.unpack(form, data)
        if whole:
            said = [int.from_bytes(n, "little", signed=True) for n in said]
        elif pairs:
            said = [complex(*said[k : k + 2]) for k in range(0, len(said), 2)]
        sums = [total + number for total, number in zip(sums, said, strict=True)]
    return sums
