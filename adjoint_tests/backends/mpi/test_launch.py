"""Starting SPMD programs, how they fail, and backends by name."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import linop
from linop import Partition, TensorSpace
from linop.backends import Backend
from linop.backends.threads.group import Group
from linop.backends.threads.mailboxes import Mailbox
from linop.backends.together.transport import Alone
from linop.errors import ArgumentError, BackendError, DeadlockError
from support.contracts.plans import total


def promptly(error: type[BaseException], text: str, main: Callable[[Backend], Any]) -> Any:
    """The error with which a program of three workers ends, at once."""
    begun = time.monotonic()
    with pytest.raises(error, match=text) as caught:
        linop.launch(main, workers=3)
    assert time.monotonic() - begun < 10
    return caught.value


def test_promptly_fails_where_nothing_is_raised() -> None:
    with pytest.raises(pytest.fail.Exception):
        promptly(ValueError, "any", lambda backend: None)


def skips(before: int, after: int) -> Callable[[Backend], None]:
    """A program of two plans, called so often; then worker 1 leaves out a call of the first."""

    def main(backend: Backend) -> None:
        first, second = (total(3, 50).compile(backend) for _ in range(2))
        for plan in [first, second] * before:
            plan(np.ones(50))
        if backend.worker != 1:
            first(np.ones(50))
        for plan in [second] * after:
            plan(np.ones(50))

    return main


def test_a_skipped_first_call_is_told() -> None:
    promptly(BackendError, "call different plans: worker 0 calls plan 1, .* 1 calls", skips(0, 1))


def test_a_skipped_plan_call_is_a_deadlock() -> None:
    text = "worker 0 waits for a message from worker 1 in stage 0 of plan 1, .*; worker 1 waits"
    promptly(DeadlockError, text, skips(1, 1))


def test_waiting_for_a_worker_that_has_ended_is_a_deadlock() -> None:
    for before, waits_for in [(0, "worker 1 to call plan 1"), (1, "a message from worker 1 in ")]:
        text = rf"worker 0 waits for {waits_for}.*; worker 1 has ended; worker 2"
        promptly(DeadlockError, text, skips(before, 0))


def test_a_compile_that_others_do_not_call_is_a_deadlock() -> None:
    def main(backend: Backend) -> None:
        for _ in range(2 if backend.worker == 2 else 1):
            total(3, 50).compile(backend)

    text = "worker 0 has ended; worker 1 has ended; worker 2 waits for worker 0 to compile B_"
    promptly(DeadlockError, text, main)


def test_a_call_while_others_end_a_trace_is_told(tmp_path: Path) -> None:
    """An item of their exchange comes to a worker that waits for a verdict about its call."""
    said: list[BaseException] = []

    def main(backend: Backend) -> None:
        plans = [total(3, 50).compile(backend) for _ in range(2)]
        try:
            with backend.trace(tmp_path / "run.json"):
                plans[0](np.ones(50))
                if backend.worker == 0:
                    raise ValueError("planted")
        except ValueError:
            try:
                plans[1](np.ones(50))
            except BackendError as error:
                said.append(error)
                raise

    with pytest.raises((BackendError, DeadlockError)):
        linop.launch(main, workers=3)
    assert "worker 1 does something else, and others call plan 2" in str(said[0])


def test_deadlocks_of_workers_that_have_threads_are_told() -> None:
    """Be it that a thread has ended, or the program that started it."""

    def main(backend: Backend, joins: bool) -> None:
        first, second = (total(2, 50).compile(backend) for _ in range(2))
        for plan in (first, second):
            plan(np.ones(50))
        if backend.worker:
            first(np.ones(50))
            return

        def work() -> None:
            for plan in (first,) if joins else (first, first):
                plan(np.ones(50))

        helper = threading.Thread(target=work)
        helper.start()
        if joins:
            helper.join()
            first(np.ones(50))
        else:
            second(np.ones(50))

    message = "a message from worker 1 in stage 0 of plan"
    for joins, words in ((True, f"{message} 1, .*"), (False, f"{message} .* and {message} .*")):
        with pytest.raises(DeadlockError, match=f"worker 0 waits for {words}; worker 1 has ended"):
            linop.launch(lambda b, joins=joins: main(b, joins), workers=2)


def test_a_thread_that_is_joined_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever joins it, by way of another thread too, waits with it, unless for some time only; it
    ends without a word, as threads do at SystemExit itself."""
    ends: dict[object, object] = {}

    def hook(hooked: threading.ExceptHookArgs) -> None:
        ends[hooked.thread] = hooked.exc_type

    monkeypatch.setattr(threading, "excepthook", hook)
    helpers = []

    def main(backend: Backend, timeout: float | None) -> None:
        first, second = (total(2, 50).compile(backend) for _ in range(2))
        for plan in (first, second):
            plan(np.ones(50))
        if backend.worker:
            second(np.ones(50))
            if timeout:
                first(np.ones(50))
            return
        helper = threading.Thread(target=lambda: first(np.ones(50)))
        helpers.append(helper)
        helper.start()
        other = threading.Thread(target=helper.join, args=(timeout,))
        other.start()
        other.join()
        second(np.ones(50))
        helper.join()

    linop.launch(lambda backend: main(backend, 0.8), workers=2)
    assert helpers[0] not in ends
    words = "worker 0 waits for a message .*; worker 1 waits for a message"
    with pytest.raises(DeadlockError, match=f"deadlock: {words}"):
        linop.launch(lambda backend: main(backend, None), workers=2, wait_limit=60)
    helpers[1].join()
    assert ends[helpers[1]] is SystemExit


def test_a_worker_that_starts_is_no_deadlock() -> None:
    # Worker 0 looks for a deadlock while worker 1 starts: it sees all of worker 1 or nothing.
    group = Group(2)
    worker = threading.Thread(
        target=group.work, args=(1, Mailbox, lambda _: group.put((1, 0, 0), "sent"))
    )
    with group._lock:
        worker.start()
        time.sleep(0.1)
        assert not group._running
        assert not any(group._threads)
    worker.join()
    assert group.take((1, 0, 0), Alone(), 0, lambda: "a message") == "sent"


def test_a_slow_worker_is_no_deadlock() -> None:
    def main(backend: Backend) -> float:
        plan = total(3, 50).compile(backend)
        time.sleep(0.2 if backend.worker == 1 else 0)
        return float(plan(np.ones(50))[0])

    assert linop.launch(main, workers=3) == [3, 3, 3]


@pytest.mark.parametrize("name", ["threads", "reference"])
def test_workers_that_build_different_operators_are_told(name: str) -> None:
    def main(backend: Backend) -> None:
        X = TensorSpace((6,), Partition((3,)))
        text = r"different operators: workers \[0, 2\] built .*; workers \[1\] built .*\. Build it"
        with pytest.raises(BackendError, match=text):
            linop.shift(X, 2 if backend.worker == 1 else 1).compile(backend)

    linop.launch(main, workers=3, backend=name)


@pytest.mark.parametrize("name", ["threads", "reference"])
def test_a_missing_worker_is_told_on_every_worker(name: str) -> None:
    text = r"has workers 0 to 1; .* needs \[2, 3\] too: start more"

    def main(backend: Backend) -> None:
        with pytest.raises(BackendError, match=text):
            total(4, 50).compile(backend)

    linop.launch(main, workers=2, backend=name)
    with pytest.raises(BackendError, match=text):
        total(4, 50).compile(linop.backends.get(name, workers=2))


@pytest.mark.parametrize("error", [ValueError("mine"), SystemExit(3), KeyboardInterrupt("mine")])
def test_an_exception_ends_the_program_and_names_its_worker(error: BaseException) -> None:
    def main(backend: Backend) -> None:
        plan = total(3, 50).compile(backend)
        if backend.worker == 1:
            raise error
        plan(np.ones(50))

    assert promptly(type(error), "mine|3", main) is error
    assert error.__notes__ == ["raised on worker 1 of 3"]


# Backends by name


def test_get_inside_and_outside_of_launch() -> None:
    assert linop.backends.get("threads").workers is None
    assert linop.backends.get("threads", workers=2).workers == 2
    assert linop.backends.get("reference").worker is None

    def main(backend: Backend) -> None:
        assert linop.backends.get("threads") is backend
        assert linop.backends.get("threads", workers=2) is backend
        with pytest.raises(BackendError, match="5 workers wanted; this program has 2"):
            linop.backends.get("threads", workers=5)

    linop.launch(main, workers=2)
    assert linop.backends.get("threads").worker is None


def test_a_limit_of_waits_outside_of_launch() -> None:
    X = TensorSpace((2,), Partition((2,)))
    one, late = X.regions
    slow = linop.local(late, late, lambda a: (time.sleep(0.5), a)[1], lambda a: a)
    op = linop.gather(X) @ linop.direct_sum(linop.identity(linop.Space(one)), slow)
    x = op.domain.random(0)
    for limit in (None, 60, float("inf")):
        linop.backends.get("threads", wait_limit=limit).compile(op)(x)
    with pytest.raises(DeadlockError, match=r"a wait took longer than 0\.1 s"):
        linop.backends.get("threads", wait_limit=0.1).compile(op)(x)
    for wrong in (0, -1, "soon", float("nan")):
        with pytest.raises(ArgumentError, match=r"^wait_limit: expected a number of seconds above"):
            linop.backends.get("threads", wait_limit=wrong)


def test_a_limit_of_waits_inside_of_launch() -> None:
    def main(backend: Backend) -> None:
        assert linop.backends.get("threads", wait_limit=60) is backend
        with pytest.raises(BackendError, match="wait_limit=5 wanted; this program has 60"):
            linop.backends.get("threads", wait_limit=5)
        with pytest.raises(ArgumentError, match=r"^wait_limit: expected"):
            linop.backends.get("threads", wait_limit=-1)

    linop.launch(main, workers=2, wait_limit=60)


def test_an_unknown_backend() -> None:
    with pytest.raises(ArgumentError, match=r"expected one of reference, threads.*'gpu'"):
        linop.backends.get("gpu")
    with pytest.raises(ArgumentError, match="backend: expected one of"):
        linop.launch(print, backend="gpu")


@pytest.mark.parametrize("workers", [0, -1, 2.0, "2"])
def test_a_wrong_number_of_workers(workers: Any) -> None:
    with pytest.raises(ArgumentError, match=r"launch: workers.* whole number"):
        linop.launch(print, workers=workers)


WITHOUT_MPI4PY = """
import sys
sys.modules["mpi4py"] = None
import linop
try:
    linop.backends.get("mpi")
except linop.errors.MissingExtraError as error:
    assert isinstance(error, ImportError)
    print(error)
"""


def test_a_missing_mpi4py_names_the_extra() -> None:
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    found = subprocess.run(
        [sys.executable, "-c", WITHOUT_MPI4PY],
        env=os.environ | {"PYTHONPATH": path},
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert found.stdout.startswith(
        "backend 'mpi' needs mpi4py and an MPI library: pip install 'linop-algebra[mpi]' ("
    ), found.stderr
    assert len(found.stdout.splitlines()) == 1


def test_a_call_that_a_thread_left_out_is_noticed_at_the_end() -> None:
    def main(backend: Backend) -> None:
        plan = linop.broadcast(TensorSpace((3,), Partition((1,))), Partition((2,))).compile(backend)
        for k in range(10):
            if k != 5 or backend.worker == 0:
                plan(np.ones(3) if backend.worker == 0 else None)

    with pytest.raises(BackendError, match=r"out of step.* 10 on worker 0, 9 on worker 1"):
        linop.launch(main, workers=2)


def test_calls_in_any_order_are_not_numbered_and_those_of_other_plans_are() -> None:
    results: dict[int, list[float]] = {}

    def main(backend: Backend) -> None:
        counted, free = (
            linop.broadcast(TensorSpace((n,), Partition((1,))), Partition((2,))).compile(backend)
            for n in (3, 4)
        )
        free.in_any_order()
        me = backend.worker
        assert me is not None

        def sums(plan: Any, n: int, value: float) -> float:
            return float(plan(np.full(n, float(value)) if me == 0 else None).sum())

        found = results[me] = [sums(free, 4, 1), sums(counted, 3, 1)]
        if me == 0:
            found += [sums(free, 4, 2), sums(counted, 3, 2)]
        else:  # the other way round
            second = sums(counted, 3, 2)
            found += [sums(free, 4, 2), second]
        for _ in range(8 if me == 0 else 7):
            sums(counted, 3, 1)

    with pytest.raises(BackendError, match=r"out of step.* 10 on worker 0, 9 on worker 1"):
        linop.launch(main, workers=2)
    assert results == {0: [4, 3, 8, 6], 1: [4, 3, 8, 6]}
