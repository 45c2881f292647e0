"""Agreement and alarms of workers about failing calls: SPMD programs as in
`support.contracts.plans`.

At a plan's first call all workers of its operator agree, so all raise the same; later a worker that
fails raises an alarm, and the others raise that. Nobody waits for ever.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import linop
from linop import COPIES, LinearOperator, Partition, Region, Space, TensorSpace
from linop.backends import Backend, BoundPlan
from linop.errors import (
    ArgumentError,
    BackendError,
    DTypeError,
    LinopError,
    ShapeError,
    explained_at,
)
from support.contracts.plans import (
    SMALL,
    argument,
    complaint,
    mine,
    raised,
    result,
    same,
    size,
    total,
    works,
)

WRONG: tuple[Any, ...] = (np.ones(SMALL + 1), np.ones(SMALL, np.float32), None, {"z": 1}, {})
"""Arguments of `total` that do not fit, each in another way."""


def agreed(plan: BoundPlan, worker: int, x: Any) -> tuple[type[LinopError], str]:
    """Words of everyone's error about one worker's argument."""
    kind, text = complaint(plan.domain, worker, x)
    return kind, f"worker {worker}, argument of {plan.op!r}: {text}"


def a_first_call_fails_everywhere(backend: Backend) -> None:
    """Whoever passes an argument that does not fit, all raise the same; then the plan can be called
    as if nothing had been."""
    me, n = mine(backend), size(backend)
    plan = total(n).compile(backend)
    for one in (plan, plan.H):
        for odd in range(n):
            for x in WRONG:
                kind, text = agreed(one, odd, x)
                given = x if me == odd else np.ones(SMALL)
                for call in (one, one.start):
                    assert raised(kind, lambda call=call, given=given: call(given)) == text
        # Of several, the first worker's.
        kind, text = agreed(one, 0, WRONG[0])
        assert raised(kind, lambda one=one: one(WRONG[0])) == text
    works(plan)


def only_its_workers_agree(backend: Backend) -> None:
    """Workers that hold no region of an operator are told of their own arguments alone."""
    me, n = mine(backend), size(backend)
    plan = total(n - 1).compile(backend)
    outside = me == n - 1
    if outside:
        assert "pass None" in raised(ArgumentError, lambda: plan(np.ones(SMALL)))
    works(plan)
    # The first call of the adjoint is an agreement of its own.
    plan = total(n - 1).compile(backend)
    plan(argument(plan, 1))
    kind, text = agreed(plan.H, 0, WRONG[0])
    if outside:
        assert plan.H(None) is None
    else:
        x = WRONG[0] if me == 0 else np.ones(SMALL)
        assert raised(kind, lambda: plan.H(x)) == text
    works(plan)


def different_plans_are_told(backend: Backend) -> None:
    """Workers that call different plans are told which; then all of them can be called."""
    me, n = mine(backend), size(backend)
    one, two = (total(n).compile(backend) for _ in range(2))
    first: int = one._tag // 2  # type: ignore[attr-defined]
    for odd in range(n):
        for left, right, names in [
            (one, two, (f"plan {first}", f"plan {first + 1}")),
            (one, one.H, (f"plan {first}", f"plan {first} (adjoint)")),
        ]:
            plan, x = (right if me == odd else left), np.ones(SMALL)
            said = {0: (left, names[0]), odd: (right, names[1])}
            if odd == 0:
                said[1] = left, names[0]
            calls = [f"worker {w} calls {name}, {p.op!r}" for w, (p, name) in sorted(said.items())]
            wanted = f"workers call different plans: {'; '.join(calls)}. "
            text = raised(BackendError, lambda plan=plan, x=x: plan(x))
            assert text.startswith(wanted), (text, wanted)
    for plan in (two, one):
        works(plan)


def different_operators_are_told(backend: Backend) -> None:
    """The text is the same on every worker."""
    me, n = mine(backend), size(backend)
    for odd in range(n):
        ops = total(n), 2 * total(n)
        rest = [w for w in range(n) if w != odd]
        groups = sorted([(rest, ops[0]), ([odd], ops[1])], key=lambda group: group[0])
        built = "; ".join(f"workers {workers} built {op!r}" for workers, op in groups)
        text = raised(BackendError, lambda odd=odd, ops=ops: ops[me == odd].compile(backend))
        assert text == (
            f"workers built different operators: {built}. Build it from the same arguments on "
            f"every worker"
        )
    works(total(n).compile(backend))


# Later calls


def failing(workers: int, odd: int, error: list[Exception]) -> LinearOperator:
    """A sum over all workers, in which one worker's local operator raises what is in the list."""
    space = TensorSpace((SMALL,), Partition((workers,)), axes=(COPIES,))

    def may_fail(x: np.ndarray) -> np.ndarray:
        if error:
            raise error.pop()
        return x

    def local(region: Region) -> LinearOperator:
        work = may_fail if region.workers == (odd,) else np.copy
        return linop.local(region, region, work, work, name="L")

    return linop.all_reduce(space) @ linop.direct_sum(*map(local, space.regions))


Trouble = tuple[type[BaseException], str]


def _wrong_argument(error: list[Exception], x: np.ndarray) -> tuple[Any, Trouble, Trouble]:
    text = f"({SMALL + 1},) given, ({SMALL},) expected"
    return np.ones(SMALL + 1), (ShapeError, text), (ShapeError, text)


def _exception(error: list[Exception], x: np.ndarray) -> tuple[Any, Trouble, Trouble]:
    error.append(ValueError("planted"))
    return x, (ValueError, "planted"), (BackendError, "planted")


def _error_of_ours(error: list[Exception], x: np.ndarray) -> tuple[Any, Trouble, Trouble]:
    error.append(ShapeError("planted"))
    return x, (ShapeError, "planted"), (ShapeError, "planted")


TROUBLES: dict[str, Callable[..., tuple[Any, Trouble, Trouble]]] = {
    "a wrong argument": _wrong_argument,
    "an exception": _exception,
    "an error of linop's": _error_of_ours,
}
"""A failing later call of one worker: its argument, its error, and that of the others."""


def a_later_call_fails_everywhere(backend: Backend, trouble: str, delay: float) -> None:
    """A worker that fails in a later call tells the others, who wait for it; the plan is broken,
    and no other one is.

    Args:
        delay: seconds that the others wait for it before it fails.
    """
    me, n = mine(backend), size(backend)
    for odd in (0, n - 1):
        error: list[Exception] = []
        plan, other = failing(n, odd, error).compile(backend), total(n).compile(backend)
        x = np.ones(SMALL)
        for _ in range(2):
            for one in (plan, plan.H, other):
                one(x)
        if me == odd:
            time.sleep(delay)
            given, told, others = TROUBLES[trouble](error, x)
        else:
            given, (told, others) = x, TROUBLES[trouble]([], x)[1:]
        if me != odd:
            kind = "ValueError: " if told[0] is ValueError else ""
            told = others[0], f"{kind}worker {odd} in {plan.op!r}: "
        try:
            plan(given)
        except told[0] as failure:
            assert type(failure) is told[0]
            assert told[1] in str(failure), failure
            assert others[1] in str(failure), failure
        else:
            raise AssertionError("an error expected")
        for call in (plan, plan.start, plan):
            text = raised(BackendError, lambda call=call, x=x: call(x))
            assert "was interrupted: " in text and text.endswith("; compile it again"), text
        for _ in range(2):
            works(other)
            same(plan.H(x), np.full(SMALL, float(n)))
        again = plan.op.compile(backend)
        works(again)


def who_did_not_wait_is_told_in_its_next_call(backend: Backend) -> None:
    """Of that plan: another one, which it calls before, knows nothing of it, nor is out of step."""
    me, n = mine(backend), size(backend)
    a = Region("a", 2, 0)
    plan = linop.move(Space(a), a, Region("b", 2, n - 1)).compile(backend)
    others = [total(n).compile(backend) for _ in range(3)]
    works(others[0])
    plan(np.ones(2) if me == 0 else None)
    if me == n - 1:
        time.sleep(0.5)  # let the others call before it
        raised(ArgumentError, lambda: plan(np.ones(3)))
    else:
        plan(np.ones(2) if me == 0 else None)
        time.sleep(1)
    for other in others:
        works(other)
    if me != n - 1:
        text = raised(ArgumentError, lambda: plan(np.ones(2) if me == 0 else None))
        assert text.startswith(f"worker {n - 1} in {plan.op!r}: "), text


def first_calls_are_in_step_after_an_alarm(backend: Backend) -> None:
    """An alarm does not interrupt the agreement on another plan. The last worker fails while the
    first waits for it; those between have begun the next plan, which goes on, as do others: they
    hear of it when they call that plan."""
    me, n = mine(backend), size(backend)
    last = Region("b", 2, n - 1)
    plan = linop.move(Space(last), last, Region("a", 2, 0)).compile(backend)
    others = [total(n).compile(backend) for _ in range(4)]
    x = np.ones(2) if me == n - 1 else None
    plan(x)
    if me == n - 1:
        time.sleep(0.6)
        raised(ShapeError, lambda: plan(np.ones(3)))
        time.sleep(0.2)
    elif me == 0:
        raised(ShapeError, lambda: plan(x))
    else:
        plan(x)
    same(others[0](argument(others[0], 0)), result(others[0], 0))
    for other in others[1:]:
        works(other)
    if 0 < me < n - 1:
        raised(ShapeError, lambda: plan(x))
    raised(BackendError, lambda: plan(x))


def debug_mode_agrees_on_every_call(backend: Backend) -> None:
    """The call that is wrong on one worker is wrong on all, and nothing is broken."""
    me, n = mine(backend), size(backend)
    one, two = (total(n).compile(backend) for _ in range(2))
    for _ in range(2):
        for plan in (one, one.H, two):
            works(plan)
            for odd in range(n):
                kind, text = agreed(plan, odd, WRONG[0])
                x = WRONG[0] if me == odd else np.ones(SMALL)
                assert raised(kind, lambda plan=plan, x=x: plan(x)) == text
                wrong = two.H if me == odd else plan
                text = raised(BackendError, lambda plan=wrong: plan(np.ones(SMALL)))
                assert text.startswith("workers call different plans: worker 0 calls plan "), text
            same(plan(np.ones(SMALL)), result(plan, 0) * 0 + n)


def errors_that_all_catch_are_over(backend: Backend) -> None:
    """An error that every worker makes and catches does not reach the next plan, whatever became of
    the one that failed."""
    me, n = mine(backend), size(backend)
    for k in range(30):
        plan = total(n).compile(backend)
        if k % 2:
            works(plan)
        raised(ShapeError, lambda plan=plan: plan(np.ones(SMALL + 1)))
        if k % 3 == 0:
            plan.release()
        if k % 3 == 1:
            del plan
        new = total(n).compile(backend)
        for run in range(3):
            expected = float(sum(range(n)) + n * run)
            same(new(np.full(SMALL, float(me + run))), np.full(SMALL, expected))


def errors_of_later_calls_wait(backend: Backend) -> None:
    """A worker that is ahead, and makes the error that all make in the next call, does not disturb
    the calls before that, which are right, on the others."""
    me, n = mine(backend), size(backend)
    for k in range(12):
        op = total(n) if k % 2 else linop.identity(total(n).domain)
        plan = op.compile(backend)
        for run in range(3):
            if (k + run) % n == me:
                time.sleep(0.003)  # so that the others are ahead
            y = plan(np.full(SMALL, float(me + run)))
            same(y, np.full(SMALL, float(sum(range(n)) + n * run if k % 2 else me + run)))
        raised(ShapeError, lambda plan=plan: plan(np.ones(SMALL + 1)))
        raised(BackendError, lambda plan=plan: plan(np.ones(SMALL)))


def threads_have_plans_of_their_own(backend: Backend, seconds: float) -> None:
    """As the errors advise: called once by one thread, then by a thread each. That a worker waits
    in one of them, and another in another, is no deadlock, be the threads late that they wait for.
    """
    me, n = mine(backend), size(backend)
    plans = [total(n).compile(backend) for _ in range(2)]

    def called(k: int, late: bool, calls: int, said: list[str]) -> None:
        time.sleep(seconds if late else 0)
        for j in range(calls):
            try:
                same(plans[k](np.full(SMALL, 1.0 + j)), np.full(SMALL, n * (1.0 + j)))
            except (AssertionError, LinopError) as error:
                said.append(str(error))

    def in_threads(calls: int) -> list[str]:
        said: list[str] = []
        threads = [
            threading.Thread(target=called, args=(k, me == k, calls, said)) for k in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return said

    if n == 2:  # in another order on the other worker
        said = in_threads(1)
        assert len(said) == 2 and all("call different plans" in text for text in said), said
        assert all("plans that several threads call, once before these beg" in t for t in said)
    for plan in plans:
        works(plan)
    assert in_threads(30) == []
    for plan in plans:
        works(plan)


EVENTS = 44
"""More than the functions of `HALVES` that are entered and left in one `start` and `finish`."""
HALVES = "base", "worker_plan", "program", "call_numbers"
"""Modules around the text of a run."""


def an_interrupt_of_a_half_is_told(backend: Backend) -> None:
    """An interrupt on worker 0, wherever it comes in `start` or `finish`: the plan goes on, with no
    message twice, or all are told."""
    me, n = mine(backend), size(backend)
    x = np.ones(SMALL)
    for number in range(EVENTS):
        plan = total(n).compile(backend)
        for _ in range(2):
            plan.start(x)
            same(plan.finish(), np.full(SMALL, float(n)))
        calls, left = plan.counters.calls, [number]

        def interrupt(frame: Any, event: str, about: Any, left: list[int] = left) -> None:
            where = Path(frame.f_code.co_filename).stem in HALVES
            # `start` and `finish` take and release the lock; errors in the end of a generator are
            # lost.
            if where and frame.f_code.co_name not in ("start", "finish", "_nothing"):
                left[0] -= 1
                if left[0] < 0:
                    sys.setprofile(None)
                    raise KeyboardInterrupt

        try:
            if me == 0:
                sys.setprofile(interrupt)
            plan.start(x)
            y = plan.finish()
            sys.setprofile(None)
            assert me == 0 or (y[0] in (n, n + 1) and (y == y[0]).all()), y
        except KeyboardInterrupt:
            if not plan.is_broken and plan.counters.calls == calls:  # type: ignore[attr-defined]
                if not plan.is_running:  # type: ignore[attr-defined]
                    plan.start(2 * x)
                plan.finish()
        except BackendError as error:
            assert me != 0 and "KeyboardInterrupt" in str(error), error
        try:
            same(plan(x), np.full(SMALL, float(n)))
        except BackendError as error:
            assert "KeyboardInterrupt" in str(error), error
        else:
            assert not plan.is_broken  # type: ignore[attr-defined]
    works(total(n).compile(backend))


def an_exit_of_a_generator_is_told(backend: Backend) -> None:
    """As any other exception of a user's function in `start`."""
    me, n = mine(backend), size(backend)
    error: list[Any] = []
    plan = failing(n, n - 1, error).compile(backend)
    x = np.ones(SMALL)
    plan.start(x)
    plan.finish()
    if me == n - 1:
        error.append(GeneratorExit("planted"))
    try:
        plan.start(x)
        plan.finish()
    except GeneratorExit:
        assert me == n - 1
    except BackendError as failure:
        assert me != n - 1 and "GeneratorExit: " in str(failure), failure
    assert "was interrupted: " in raised(BackendError, lambda: plan(x))
    works(total(n).compile(backend))


def _wrong_outs(x: np.ndarray) -> dict[str, tuple[type[LinopError], str, Any]]:
    """Memory that cannot be written to, after the error and its words."""
    read_only = np.empty_like(x)
    read_only.flags.writeable = False
    one_for_all = np.lib.stride_tricks.as_strided(np.empty(1), x.shape, (0,) * x.ndim)
    return {
        "a part of the argument": (ArgumentError, "shares memory with the argument", x[::-1]),
        "shape": (ShapeError, "given, (", np.empty(x.size + 1)),
        "dtype": (DTypeError, "dtype float32 given", np.empty_like(x, np.float32)),
        "read-only": (ArgumentError, "the array is read-only", read_only),
        "overlap": (ArgumentError, "share memory with each other", one_for_all),
        "list": (ArgumentError, "list given", x.tolist()),
    }


WRONG_OUTS = tuple(_wrong_outs(np.ones(2)))


def a_wrong_out_fails_everywhere(backend: Backend, wrong: str) -> None:
    """One worker passes memory that cannot be written to, when calls are quick: it is refused
    before a message leaves, and the others are told, at the latest in the call after the next: who
    did not wait for it is ahead. Other plans go on."""
    me, n = mine(backend), size(backend)
    other = total(n).compile(backend)
    for op in (total(n), linop.halo_exchange(TensorSpace((4 * n,), Partition((n,))), 3)):
        for started in (False, True):
            plan = op.compile(backend)
            x = argument(plan, 1)
            if wrong.endswith("argument") and op.domain != op.codomain:
                continue
            for _ in range(3):
                y = np.empty_like(plan(x))
                same(plan(x, out=y), result(plan, 1))
                works(other)
            kind, words, bad = _wrong_outs(x if wrong.endswith("argument") else y)[wrong]
            given = bad if me == n - 1 else y
            before = np.copy(x)

            def call(plan=plan, x=x, given=given, started=started) -> None:
                for _ in range(1 if me == n - 1 else 3):
                    if started:
                        plan.start(x, out=given)
                        plan.finish()
                    else:
                        plan(x, out=given)
                    time.sleep(0.02)

            text = raised(kind, call)
            assert words in text, text
            assert me == n - 1 or text.startswith(f"worker {n - 1} in {op!r}: "), text
            same(x, before)
            text = raised(BackendError, lambda plan=plan, x=x: plan(x))
            assert "was interrupted: " in text and text.endswith("; compile it again"), text
            works(other)
            works(op.compile(backend))


def an_error_of_another_worker_is_explained_once(backend: Backend) -> None:
    """The last worker's argument does not fit: all raise that, with one note on where it is
    explained."""
    me, n = mine(backend), size(backend)
    plan = total(n).compile(backend)
    try:
        plan(np.ones(SMALL + (me == n - 1)))
    except ShapeError as error:
        told = error
    assert told.__notes__ == [explained_at("ShapeError")]
