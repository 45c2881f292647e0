"""The ``threads`` backend: one thread per worker, messages through in-process mailboxes
(`linop.backends.threads.mailboxes`).

For SPMD programs, notebooks and debuggers without ``mpiexec``.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from linop.backends.engine.arrays.interface import NUMPY, Arrays, arrays_named
from linop.backends.engine.base import Backend
from linop.backends.engine.execution.layout import Layout
from linop.backends.engine.execution.program import Program
from linop.backends.engine.proving import prove
from linop.backends.engine.roads.call_numbers import Calls, check_calls
from linop.backends.engine.roads.communication import Communication
from linop.backends.engine.roads.point_to_point import PointToPoint
from linop.backends.engine.whole import Whole
from linop.backends.engine.worker import Worker
from linop.backends.threads.group import Group
from linop.backends.threads.mailboxes import Mailbox
from linop.backends.together.settings import DEBUG, SUMS, WAIT_LIMIT, kept_sums
from linop.errors import BackendError
from linop.normal_form.stages import Stages
from linop.operators.operator import LinearOperator
from linop.planning.lowering import lower, lower_all, workers_of
from linop.planning.passes import Options, bound_plan
from linop.planning.plan import LoweredPlan
from linop.spaces.scalars import Array
from linop.spaces.vector import Vector

_HERE = threading.local()


def get(
    workers: int | None = None,
    arrays: str | Arrays | None = None,
    wait_limit: float | None = None,
    sums: str | None = None,
) -> Backend:
    """Inside `launch` the backend of this thread's worker; outside, a backend that holds all
    workers and starts their threads for each run.

    Args:
        workers: number of workers; by default the program's, or as many as an operator needs.
        arrays: "numpy", or "cupy" for workers that share a GPU; by default the program's, or
            "numpy".
        wait_limit: seconds after which a wait becomes a `DeadlockError`; by default the program's,
            or as of `launch`.
        sums: as of `launch`; by default the program's.

    Raises:
        ArgumentError: `wait_limit` is no limit, or there are no such `sums`. BackendError: inside
            `launch`, an argument differs from the program's; or there is no GPU. MissingExtraError:
            CuPy is not installed.
    """
    here: Thread | None = getattr(_HERE, "backend", None)
    if here is None:
        return Threads(workers, arrays_named(arrays or NUMPY), wait_limit, _sums(sums))
    if arrays is not None and arrays_named(arrays).ndarray is not here.arrays.ndarray:
        wanted = arrays_named(arrays).name
        raise BackendError(f"arrays of {wanted} wanted; this program has {here.arrays.name}'s")
    if workers not in (None, here.workers):
        raise BackendError(f"{workers} workers wanted; this program has {here.workers}")
    if wait_limit is not None and _limit(wait_limit) != (limit := here.transport.limit):
        raise BackendError(f"wait_limit={wait_limit!r} wanted; this program has {limit:g}")
    if sums is not None and _sums(sums) != here.sums:
        raise BackendError(f"sums={sums!r} wanted; this program has {here.sums!r}")
    return here


def launch(
    main: Callable[[Backend], Any],
    workers: int | None = None,
    arrays: str | Arrays = NUMPY,
    wait_limit: float | None = None,
    sums: str | None = None,
) -> list[Any]:
    """Run ``main(backend)`` on a number of threads (1 by default); return their results by worker.

    Args:
        arrays: "numpy", or "cupy": all threads then use the device and the stream of this thread.
        wait_limit: seconds after which a wait becomes a `DeadlockError`, even if some worker is
            still computing. Default: LINOP_WAIT_LIMIT, else no limit, since a worker may be stopped
            in a debugger.
        sums: "fixed", "exact" or "tree": see `linop.LinearOperator.compile`. Default: LINOP_SUMS,
            else "fixed", which "any" is, too.

    Raises:
        The first exception of any `main`, with the worker's number in a note.
    """

    kind, debug, how = arrays_named(arrays), DEBUG.found().checked(), _sums(sums)

    def work(mailbox: Mailbox) -> Any:
        backend = _HERE.backend = Thread("threads", mailbox, debug, kind, how)
        return main(backend), backend.counts()

    done = run(workers or 1, work, kind, wait_limit)
    check_calls([counts for _, counts in done])
    return [result for result, _ in done]


def alone(arrays: Arrays = NUMPY) -> Backend:
    """A backend with this thread as its only worker."""
    mailbox, debug = Mailbox(Group(1, arrays), 0), DEBUG.found().checked()
    return Thread("threads", mailbox, debug, arrays, _sums(None))


def run(
    workers: int,
    main: Callable[[Mailbox], Any],
    arrays: Arrays = NUMPY,
    wait_limit: float | None = None,
) -> list[Any]:
    """Run a function of a mailbox on a number of threads; return the results by worker.

    Raises:
        The first exception of any of them.
    """
    group = Group(workers, arrays, _limit(wait_limit))
    threads = [
        threading.Thread(target=group.work, args=(w, Mailbox, main), name=f"linop-{w}", daemon=True)
        for w in range(workers)
    ]
    for thread in threads:
        thread.start()
    group.join(threads)
    if group.failure is not None:
        raise group.failure
    return group.results


def _limit(given: float | None) -> float:
    """Seconds that a wait may take.

    Raises:
        ArgumentError: the argument, or its variable, is no limit.
    """
    return float(WAIT_LIMIT.found(given, default=math.inf).checked())


def _sums(given: str | None) -> str:
    """How plans form sums.

    Raises:
        ArgumentError: the argument, or its variable, is none of the ways.
    """
    return kept_sums(SUMS.found(given).checked())


class Thread(Worker):
    """One worker of an SPMD program, in a thread."""

    transport: Mailbox

    def __init__(
        self, name: str, transport: Mailbox, debug: bool, arrays: Arrays, sums: str
    ) -> None:
        super().__init__(name, transport, debug, arrays)
        self.sums = sums

    def _part(self, parts: Sequence[tuple[int, ...]], mine: tuple[int, ...]) -> Worker:
        del parts
        return Thread(self.name, self.transport.part(mine), self.debug, self.arrays, self.sums)

    def program(
        self,
        plan: LoweredPlan,
        group: Sequence[int],
        tag: int,
        about: Callable[[], str],
        numbered: bool = True,
    ) -> Program:
        return bound(self.layout(plan), self.transport, tag, about, self.calls(group, numbered))


def bound(
    layout: Layout, mailbox: Mailbox, tag: int, about: Callable[[], str], calls: Calls | None
) -> Program:
    """A plan bound to a mailbox, for NumPy's or a device's arrays."""
    arrays = layout.arrays
    how: Communication
    if arrays.asynchronous:
        # Loaded for a device only.
        from linop.backends.threads.device_messages import MailboxMessages

        how = MailboxMessages(layout, mailbox, tag, about, calls)
    else:
        how = PointToPoint(layout, mailbox, tag, about, calls)
    return Program(layout, how, calls)


class Threads(Whole):
    """The backend outside of `launch`: all workers in this process, one thread each during a
    run."""

    name = "threads"

    def __init__(
        self,
        workers: int | None = None,
        arrays: Arrays = NUMPY,
        wait_limit: float | None = None,
        sums: str = "fixed",
    ) -> None:
        super().__init__(workers, arrays)
        self.sums = sums
        self._wait_limit = None if wait_limit is None else _limit(wait_limit)

    def __reduce__(self) -> Any:
        made, given = super().__reduce__()
        return made, (*given, self._wait_limit, self.sums)

    def way(self, program: Program | None = None) -> str:
        del program
        return f"messages over {Mailbox.name}"

    @property
    def _options(self) -> Options:
        return Options(small=self.arrays.small, inside=not self.arrays.asynchronous)

    def _planned(self, stages: Stages, worker: int) -> LoweredPlan:
        return lower(stages, worker, self.placement)

    def bind(self, op: LinearOperator) -> tuple[Callable[[Vector], Vector], Sequence[LoweredPlan]]:
        if DEBUG.found().checked():
            prove(op, self._planned, self._options, self.placement)
        needed = max(workers_of(op.stages), default=0) + 1
        plans = lower_all(op.stages, self.placement, range(needed))

        def apply(x: Vector) -> Vector:
            tracing, name = self.tracing, str(op) if self.tracing else ""

            def main(mailbox: Mailbox) -> Sequence[Array]:
                plan = plans[mailbox.worker]
                layout = Layout(bound_plan(plan, self._options), self.arrays)
                program = bound(layout, mailbox, 0, op.__repr__, None)
                arrays = [x[r.name] for r in plan.inputs]
                if tracing is None:
                    return program.run(arrays)
                about = {"operator": name, "messages": len(plan.sends), "bytes": plan.bytes_sent}
                with tracing.steps(program, name):
                    work = partial(program.run, arrays)
                    return tracing.timed(mailbox.worker, name, "plan", about, work)

            results: dict[str, Array] = {}
            parts = run(len(plans), main, self.arrays, self._wait_limit)
            for plan, part in zip(plans, parts, strict=True):
                for region, array in zip(plan.outputs, part, strict=True):
                    results.setdefault(region.name, array)
            return Vector(op.codomain, results)

        return apply, plans
