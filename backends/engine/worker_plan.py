"""One worker's bound plan: its first call, which its workers make together, its alarms, and its
failure.

At a plan's first call its workers agree, over a control channel, that all of them call this plan
with arguments that fit, and choose its transport. Later calls are not compared (except in debug
mode); a worker that fails in one raises an alarm, which ends the other workers' waits for it.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from linop.backends.engine.base import BoundPlan, described
from linop.backends.engine.counters import Counters
from linop.backends.engine.execution.calls import (
    IN_PLACE,
    MISSED,
    NEW,
    OUT,
    Caller,
    Fast,
    checked,
    fast,
    fast_start,
)
from linop.backends.engine.execution.functions import STRAIGHT, Form
from linop.backends.engine.execution.program import Program
from linop.backends.engine.proving import prove
from linop.backends.together.agreement import Talk, Verdict, agree
from linop.backends.together.deadlock import PAST, Key, Point
from linop.backends.together.recorder import Called, users_line
from linop.errors import BackendError, LinopError, interrupt, restated
from linop.operators.operator import LinearOperator
from linop.planning.fusion import overwritten
from linop.planning.lowering import workers_of
from linop.planning.passes import bound_plan
from linop.planning.plan import LoweredPlan
from linop.spaces.scalars import Array

if TYPE_CHECKING:  # it makes these plans
    from linop.backends.engine.worker import Worker

_GONE = 4096
"""Number of control exchanges and released plans whose progress is remembered."""


class WorkerPlan(BoundPlan):
    """One worker's bound plan. One run at a time: another one before `finish`, from another thread
    or from one of the plan's own local operators, is an error."""

    def __init__(
        self, op: LinearOperator, backend: Worker, tag: int, plan: LoweredPlan | None = None
    ) -> None:
        super().__init__(op, backend)
        if backend.debug:
            prove(op, backend.planned, backend.options, backend.placement)
        self.plan = plan or backend.planned(op.stages, backend.worker)
        self.counters.sends([self.plan])
        self.group = workers_of(op.stages)
        self._worker = backend
        self.number = self._tag = tag
        self._calls = 0
        self._program: Program | None = None
        self._together = len(self.group) > 1
        self.compares = backend.debug
        """True if every call is compared with those of the other workers, which waits for them. To
        be set False, on all of them and before the first call, where receives are to be posted
        early."""
        self.numbered = True
        """True if messages have the numbers of calls, which must be in one order on all workers
        then. To be set False on all of them, before the first call, where another order is fixed,
        as by a schedule."""
        self._broken: str | None = None
        self._seconds = 0.0
        self._checked: dict[tuple[Form, bool], Callable[..., Any]] = {}
        self._starts: list[Fast | None] = [None, None, None]
        self._line = ""
        self._failed = False
        self.alarm = backend.early.pop(tag, None)
        """The error of another worker's alarm and the call it is about, until it is raised here;
        None if there is none. Calls before that one can be completed: the failed worker has done
        its share of them."""
        backend.bound[tag] = self
        if self._together:
            gone = weakref.finalize(self, _gone, backend.transport.points, tag, self.counters)
            gone.atexit = False

    def _bind_adjoint(self, op: LinearOperator) -> BoundPlan:
        return WorkerPlan(op, self._worker, self._tag ^ 1)

    def give_up(self, names: Collection[str]) -> frozenset[str]:
        assert self._program is None, "a plan is bound at its first call"
        self.plan = replace(self.plan, scratch=frozenset(names))
        return overwritten(bound_plan(self.plan, self._worker.options))

    def _begin(self, x: Any, out: Any) -> None:
        how = NEW if out is None else OUT if out is not x else IN_PLACE
        if (quick := self._starts[how]) is not None and (run := quick(x, out)) is not MISSED:
            assert self._program is not None
            self._program.begin(run)
            return
        arrays, outs, program = self._ready(x, out)
        if (tracing := self._worker.tracing) is not None:
            self._enter()
            with self._failing(), tracing.steps(program, str(self.op)):
                program.record(arrays, outs)
            self._seconds = time.perf_counter() - self.counters.begun
            return
        form = program.form(arrays, outs)
        if self._together:
            self._worker.listen(self._tag)
        program.begin(self._call(program, form, True)(*arrays, *((outs or ()) if form.out else ())))
        if self._is_usual:
            self._starts[how] = fast_start(program, how, self._caller)

    def _dropped(self, error: BaseException) -> None:
        program = self._program
        if program is not None and program.is_under_way and not self.is_broken:
            self._fail(error)

    def _end(self) -> Sequence[Array]:
        self._check_unbroken()
        program = self._program
        assert program is not None
        if not program.is_recorded:
            return program.finish()
        self._worker.transport.busy = self._tag
        begun = time.perf_counter()
        with self._failing():
            results = program.finish()
        self.counters.calls += 1
        self.counters.seconds += self._seconds + time.perf_counter() - begun
        return results

    def _run(self, x: Any, out: Any) -> Any:
        arrays, outs, program = self._ready(x, out)
        how = NEW if out is None else OUT if out is not x else IN_PLACE
        if self._fast[how] is None and self._is_usual:
            quick = self._fast[how] = fast(program, how, self._caller)
            if (result := quick(x, out, True)) is not MISSED:
                return result
        form = program.form(arrays, outs)
        call = self._call(program, form, False)
        return self._wrapped(call(*arrays, *((outs or ()) if form.out else ())), x)

    def _call(self, program: Program, form: Form, halves: bool) -> Callable[..., Any]:
        """A call with validated arguments, at once or in halves; cached."""
        if (form, halves) not in self._checked:
            self._checked[form, halves] = checked(program, form, self._caller, halves)
        return self._checked[form, halves]

    @property
    def _is_usual(self) -> bool:
        """True if calls need no more than the checks of fast paths."""
        return self.alarm is None and not self.compares

    @property
    def _caller(self) -> Caller:
        transport, listen = self._worker.transport, partial(self._worker.listen, self._tag)
        others = listen if self._together else None
        return Caller(
            self.backend, self.lock, self.counters, transport, self._tag, others, self._fail
        )

    def _enter(self) -> None:
        """Raise an alarm about this plan, if there is one, and note that a call begins. Calls at
        once do the same in generated lines (`linop.backends.engine.execution.calls`)."""
        if self._together:
            self._worker.listen(self._tag)
        self._worker.transport.busy = self._tag
        self._worker.transport.recorder.note(self._tag)
        self.counters.begun = time.perf_counter()

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Context of a run whose failure breaks the plan, here and on the other workers."""
        try:
            yield
        except BaseException as error:
            self._fail(error)
            raise

    def _ready(self, x: Any, out: Any) -> tuple[Sequence[Array], Sequence[Array] | None, Program]:
        """Validated arguments and ``out`` arrays, and the bound program."""
        wrong: LinopError | None = None
        arrays: Sequence[Array] = ()
        outs: Sequence[Array] | None = None
        try:
            arrays = self._arguments(x)
            outs = self._outs(out, arrays)
        except LinopError as error:
            wrong = error
        return arrays, outs, self._entered(wrong)

    def enter(self, wrong: LinopError | None) -> None:
        self._entered(wrong)

    def validated(self, arrays: Sequence[Array], outs: Sequence[Array]) -> None:
        program = self._program
        if program is None or self.compares or self._worker.tracing is not None or not outs:
            super().validated(arrays, outs)
            return
        if not self.lock.acquire(False):
            raise self._busy("called")
        try:
            self._check_unbroken()
            self._call(program, STRAIGHT, False)(*arrays, *outs)
        finally:
            self.lock.release()

    def _entered(self, wrong: LinopError | None) -> Program:
        """The bound program; raises an error of this worker's argument on every worker. The first
        call binds it, collectively."""
        self._check_unbroken()
        program = self._program
        if program is None or self.compares:
            self._enter()
            self._line = self._line or users_line()
            tracing = self._worker.tracing
            meet = partial(self._meet, wrong)
            if tracing is None:
                program = meet()
            else:
                about = {"operator": str(self.op), "peers": self.group}
                program = tracing.timed(self._here, "agree on the plan", "step", about, meet)
            self._worker.transport.recorder.withdraw(self._tag)
        elif wrong is not None:
            self._enter()
            self._fail(wrong)
            raise wrong
        return program

    def _check_unbroken(self) -> None:
        if self._broken is not None:
            raise BackendError(f"{self!r} was interrupted: {self._broken}; compile it again")

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
    def receives_early(self) -> bool:
        return self._program is not None and self._program.messages.early

    def in_any_order(self) -> None:
        self.compares = self.numbered = False

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
        """Progress in this plan: the current call, and the stage at which `start` has left it.
        Progress within a wait of it is reported by that."""
        if self.is_broken or self.is_due:
            return PAST
        return self.call, math.inf if self._program is None else self._program.reached

    def called(self) -> Called:
        counters, runs = self.counters, self.is_running
        number = counters.calls + (runs or self._failed)
        each = counters.messages_each, counters.bytes_each
        return Called(self._named(), number, counters.begun, runs, *each, self._line)

    def slow_down(self) -> None:
        """Drop the fast paths, so that the next call checks for alarms."""
        self._fast, self._starts = [None, None, None], [None, None, None]

    def _bind_program(self) -> Program:
        about = self.plan, self.group, self._tag, self._named
        self._program = self._worker.program(*about, self.numbered)
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

    def fail(self, error: BaseException) -> None:
        """Break the plan, here and on its other workers."""
        if not self.is_broken:
            self._fail(restated(error, str(error)))

    def end(self, why: str) -> None:
        """End the plan with its backend: later calls raise."""
        self._broken = why
        self.slow_down()
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
        self._checked = {}
        self.slow_down()


def _gone(points: dict[Key, Point], tag: int, counters: Counters) -> None:
    """Remember the progress of a released plan, for workers that may still wait for its last
    messages."""
    points["plan", tag] = counters.calls, math.inf
    if len(points) > _GONE:
        for key in list(points)[: _GONE // 2]:
            del points[key]
