"""One worker of an SPMD program: its backend, and its bound plans.

A plan's first call is where its workers find each other: they agree that all of them call this
plan with arguments that fit, and how its messages travel. Later calls do not ask again (unless the
backend is in debug mode); a worker that fails in one raises an alarm, so that nobody waits for it.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from linop.backends.arrays import NUMPY, Arrays
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
from linop.backends.execute import Program
from linop.backends.messages import Messages
from linop.backends.quick import quick_call
from linop.backends.transport import Talk, Transport, Verdict, agree
from linop.errors import BackendError, LinopError
from linop.lowering import lower, workers_of
from linop.operator import LinearOperator
from linop.plan import Plan
from linop.scalars import Array, Scalar
from linop.space import Space, Total

_SHOWN = 160
"""Bytes of an operator's text in an error."""


class Worker(Backend):
    """One worker of an SPMD program over a transport.

    Args:
        debug: compare what all workers call, and with what, at every call.
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

    def compile(self, op: LinearOperator) -> BoundPlan:
        # Agreement first: it is collective, and who needs a missing worker may not be all.
        check_agreement(op, self.transport)
        check_workers(op, self)
        check_here(op, self)
        self._plans += 1
        plan = WorkerPlan(op, self, 2 * self._plans)
        self.prepare(plan.plan)
        return plan

    def listen(self) -> None:
        """Raise what another worker's alarm said, if there was one."""
        try:
            self.transport.check()
        except LinopError as error:
            self.interrupt(error)
            raise

    def interrupt(self, error: BaseException) -> None:
        """Break the plan that an alarm is about, which others do not run any more."""
        plan = self.bound.get(getattr(error, "alarm", -1))
        if plan is not None:
            plan.broken(error)

    def prepare(self, plan: Plan) -> None:
        """Make ready what plans share, when one is compiled; collective."""

    def program(
        self, plan: Plan, group: Sequence[int], tag: int, about: Callable[[], str]
    ) -> Program:
        """A plan, bound to the way in which its messages travel; collective over the group."""
        del group
        return Messages(plan, self.transport, tag, about, self.arrays)

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

    def __init__(self, op: LinearOperator, backend: Worker, tag: int) -> None:
        super().__init__(op, backend)
        self.plan = lower(op.stages, backend.worker)
        self.counters.sends([self.plan])
        self.group = workers_of(op.stages)
        self._worker = backend
        self._tag = tag
        self._calls = 0
        backend.bound[tag] = self
        self._program: Program | None = None
        self._together = len(self.group) > 1
        self._broken: str | None = None
        self._seconds = 0.0

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
        if self._quick[how] is None and not self._worker.debug:
            listen = self._worker.listen if self._together else None
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
            self._worker.listen()
        program = self._program
        if program is None or self._worker.debug:
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
        try:
            with Talk(transport, ("call", self._tag, self._calls)) as talk:
                error = agree(talk, me, self.group, verdict, what).error()
        except LinopError as alarm:
            self._worker.interrupt(alarm)
            raise
        if error is not None:
            raise error

    def _named(self) -> str:
        return f"plan {self._tag // 2}{' (adjoint)' if self._tag % 2 else ''}, {self.op!r}"

    def _bind_program(self) -> Program:
        self._program = self._worker.program(self.plan, self.group, self._tag, self._named)
        return self._program

    def broken(self, error: BaseException) -> None:
        """A run ended halfway, here or on another worker: there can be no other."""
        if self._broken is None:
            self._broken = f"{type(error).__name__}: {error}"
            if self._program is not None:
                self._program.abandon()
        self._quick = [None, None, None]

    def _fail(self, error: BaseException) -> None:
        """A run ended halfway: nobody else must wait for it."""
        self.broken(error)
        self._worker.interrupt(error)
        transport = self._worker.transport
        text = f"worker {transport.worker} in {self.op!r}: {error}"
        kind = type(error) if isinstance(error, LinopError) else None
        if self._together and not hasattr(error, "alarm"):
            alarm = kind(text) if kind else BackendError(f"{type(error).__name__}: {text}")
            transport.alarm(alarm, self._tag)

    def describe(self) -> str:
        return described(self.plan, self._worker.way(self._program))

    def _free(self) -> None:
        if self._program is not None:
            self._program.release()
        self._program = None
        self._quick = [None, None, None]


def check_agreement(op: LinearOperator, transport: Transport) -> None:
    """Check, together, that all workers built the same operator.

    Raises:
        BackendError: they did not; on every worker, in the same words.
    """
    # First a cheap digest of how it was made; the same operator may have been made in two ways.
    if len(set(transport.gather_all(op.stages.digest))) == 1:
        return
    digests = transport.gather_all(op.stages.fingerprint)
    if len(set(digests)) == 1:
        return
    names = transport.gather_all(repr(op).encode()[:_SHOWN].ljust(_SHOWN))
    said = []
    for one in dict.fromkeys(digests):
        workers = [w for w, digest in enumerate(digests) if digest == one]
        name = names[workers[0]].decode(errors="ignore").rstrip()
        said.append(f"workers {workers} built {name}")
    raise BackendError(
        f"workers built different operators: {'; '.join(said)}. Build it from the same arguments "
        f"on every worker"
    )


def sums_over_workers(values: Sequence[Scalar], space: Space, transport: Transport) -> list[Scalar]:
    """The sum of each number over all workers, in their order: the same bits everywhere."""
    form = "=" + {"i": "q", "u": "Q", "c": "dd"}.get(space.dtype.kind, "d") * len(values)
    numbers = [x for v in values for x in ((v.real, v.imag) if space.dtype.kind == "c" else (v,))]
    sums: list[Scalar] = [0] * len(values)
    for data in transport.gather_all(struct.pack(form, *numbers)):
        said: Sequence[Scalar] = struct.unpack(form, data)
        if space.dtype.kind == "c":
            said = [complex(*said[k : k + 2]) for k in range(0, len(said), 2)]
        sums = [total + number for total, number in zip(sums, said, strict=True)]
    return sums
