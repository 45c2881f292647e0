"""A worker that others wait for beyond the limit, while it is in its own code: what it called last
and where it is is said by its watchdog, and what the others called last by themselves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import linop
from linop import COPIES, Partition, TensorSpace
from linop.backends import Backend
from linop.backends.together.recorder import Called, Recorder, at_place
from linop.backends.together.watchdog import Watchdog, stacks
from linop.errors import ArgumentError, DeadlockError
from support.job_programs import mpiexec
from support.requirements import needs_mpi

pytestmark = pytest.mark.timeout(200)


# The recorder

SOON = 15.0
"""Seconds to what the watchdog does."""


def plan(number: int, runs: bool = False) -> Any:
    called = Called("plan 1, <6x6 A>", number, time.perf_counter(), runs, 2, 4096, "train.py:7")
    return SimpleNamespace(called=lambda: called)


def test_last_calls_in_words() -> None:
    recorder = Recorder()
    for _ in range(3):
        recorder.note(2)
    recorder.meets("take a norm", "")
    for tag in (2, 3, 2, 9):
        recorder.note(tag)
    lines = recorder.words({2: plan(17, runs=True), 3: plan(1)}).splitlines()
    assert lines[0] == "  calls 13 to 15 of plan 1"
    assert lines[1].startswith("  take a norm at test_watchdog.py:")
    assert lines[2] == (
        "  call 16 of plan 1, call 1 of plan 1 (adjoint), call 17 of plan 1, 1 of plan 4 "
        "(adjoint), which is gone"
    )
    assert lines[3].startswith(
        "  plan 1, <6x6 A>: sends 2 messages, 4,096 bytes; first called at train.py:7, call 17 is "
        "under way, begun "
    )
    assert len(lines) == 5
    assert Recorder().words({}) == "  none\n"


def test_only_the_last_are_kept() -> None:
    recorder = Recorder()
    for _ in range(1000):
        recorder.note(2)
    assert recorder.words({2: plan(1000)}).startswith("  calls 969 to 1000 of plan 1\n")


def test_a_recorder_keeps_no_operator() -> None:
    op = linop.identity(linop.Space([linop.Region("a", (2,))]))
    recorder = Recorder()
    recorder.meets("compile", op)
    assert str(op) in recorder.words({})
    del op
    assert recorder.words({}).startswith("  compile at test_watchdog.py:")


def test_places_are_the_users() -> None:
    assert at_place("waits").startswith("waits (test_watchdog.py:")
    seen: list[str] = []
    there, over = threading.Event(), threading.Event()

    def elsewhere() -> None:
        there.set()
        over.wait()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    there.wait()
    seen.append(stacks())
    over.set()
    thread.join()
    assert "in elsewhere\n" in seen[0]


# The thread


class Asked:
    """A worker that is stuck once."""

    def __init__(self) -> None:
        self.said = threading.Event()

    def stuck(self) -> str | None:
        if self.said.is_set():
            return None
        self.said.set()
        return "it is stuck\n"


@pytest.fixture
def watchdog() -> Iterator[Watchdog]:
    made = Watchdog()
    yield made
    made.stop()


def test_a_watchdog_speaks(watchdog: Watchdog, capfd: pytest.CaptureFixture[str]) -> None:
    one = Asked()
    watchdog.watch(one)
    assert one.said.wait(SOON)
    watchdog.stop()
    said = capfd.readouterr().err
    assert said.startswith("it is stuck\n  thread ") and "thread MainThread:\n" in said
    assert "in test_a_watchdog_speaks\n" in said


def test_a_watchdog_forgets(watchdog: Watchdog) -> None:
    one, other = Asked(), Asked()
    watchdog.watch(one)
    watchdog.forget(one)
    one.said.clear()
    watchdog.watch(other)
    assert other.said.wait(SOON)
    watchdog.stop()
    assert not one.said.is_set()


def test_a_watchdog_stops_and_starts(watchdog: Watchdog) -> None:
    """As around a fork."""
    one = Asked()
    watchdog.watch(one)
    watchdog.stop()
    assert "linop-watchdog" not in [thread.name for thread in threading.enumerate()]
    one.said.clear()
    watchdog.start()
    assert one.said.wait(SOON)


# Threads


def stuck_on_threads(backend: Backend, over: threading.Event) -> None:
    X = TensorSpace((3,), Partition((backend.workers,)), axes=(COPIES,))
    bound = linop.all_reduce(X).compile(backend)
    for _ in range(3):
        bound(np.ones(3))
    while backend.worker and not over.is_set():
        time.sleep(0.01)
    bound(np.ones(3))


def ends_at_the_limit(launch: Callable[[Any], Any], capfd: pytest.CaptureFixture[str]) -> None:
    over = threading.Event()
    with pytest.raises(DeadlockError) as error:
        launch(lambda backend: stuck_on_threads(backend, over))
    over.set()
    text, said = str(error.value), capfd.readouterr().err
    assert text.startswith("a wait took longer than 0.5 s: worker 0 waits for a message from "), (
        text
    )
    assert "(test_watchdog.py:" in text, text
    assert "; worker 1 does not wait in linop (test_watchdog.py:" in text, text
    assert f"linop: {text}\n" in said
    assert "worker 0, its last calls, the oldest first:\n  compile " in said
    assert "call 4 is under way" in said
    assert "worker 1, its last calls" in said
    assert "calls 1 to 4 of plan " in said and "calls 1 to 3 of plan " in said
    assert "in stuck_on_threads\n" in said


def test_threads_have_a_limit(capfd: pytest.CaptureFixture[str]) -> None:
    def launch(main: Any) -> None:
        linop.launch(main, 2, backend="threads", wait_limit=0.5)

    ends_at_the_limit(launch, capfd)


def test_threads_have_the_limit_of_the_environment(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LINOP_WAIT_LIMIT", "0.5")
    ends_at_the_limit(lambda main: linop.launch(main, 2, backend="threads"), capfd)
    monkeypatch.setenv("LINOP_WAIT_LIMIT", "soon")
    with pytest.raises(ArgumentError, match="LINOP_WAIT_LIMIT: expected a number of seconds"):
        linop.launch(lambda backend: None, 2, backend="threads")


def test_deadlocks_of_threads_say_where() -> None:
    def main(backend: Backend) -> None:
        X = TensorSpace((3,), Partition((2,)), axes=(COPIES,))
        bound = linop.all_reduce(X).compile(backend)
        if backend.worker == 0:
            bound(np.ones(3))

    with pytest.raises(
        DeadlockError, match=r"deadlock: worker 0 waits for .*\(test_watchdog.py:\d+"
    ):
        linop.launch(main, 2, backend="threads")


# Ranks

PROGRAM = """
import threading
from linop.backends.mpi.backend import MPI

def stuck_here():
    {stuck}

def main(backend):
    A = total(backend.workers).compile(backend)
    for _ in range(3):
        A(np.ones(3))
    if backend.worker == 1:
        stuck_here()
    A(np.ones(3))

linop.launch(main, wait_limit=1)
"""
STUCK = {
    "in Python": "while True: pass",
    "in C": "time.sleep(100)",
    "in MPI": "MPI.COMM_WORLD.Barrier()",
    "in a thread of its own": """
    thread = threading.Thread(target=time.sleep, args=(100,), daemon=True)
    thread.start()
    thread.join()""",
    "after a fork": """
    child = os.fork()
    if not child:
        time.sleep(0.6)
        os._exit(0)
    os.waitpid(child, 0)
    time.sleep(100)""",
}


@needs_mpi
@pytest.mark.parametrize("windows", ["0", "1"])
@pytest.mark.parametrize("where", STUCK)
def test_a_rank_that_is_stuck_says_where(where: str, windows: str, tmp_path: Path) -> None:
    """Before the error of the others, which nobody catches, ends the job."""
    text = PROGRAM.format(stuck=STUCK[where].strip())
    ranks = 2 + (where == "in C")
    job = mpiexec(ranks, tmp_path / "p.py", text, LINOP_WINDOWS=windows)
    assert job.returncode != 0
    said = job.stderr
    assert "linop: worker 1 does not wait in linop, and others have reached the limit; its" in said
    assert "in stuck_here\n" in said, said
    assert "linop: a wait took longer than 1 s: worker 0 waits for a message from worker 1" in said
    assert said.count("  calls 1 to 3 of plan 1\n") == 1
    assert said.count("  calls 1 to 4 of plan 1\n") == ranks - 1
    assert "call 4 is under way" in said
    assert "; worker 1 does not wait in linop" in said


@needs_mpi
@pytest.mark.parametrize("level", ["serialized", "multiple"])
def test_the_thread_calls_mpi_only_where_threads_may(level: str, tmp_path: Path) -> None:
    text = f"""
import mpi4py, threading
mpi4py.rc.thread_level = {level!r}
from linop.backends.mpi.control_channel import Channel
from linop.backends.mpi.backend import MPI
several = MPI.Query_thread() == MPI.THREAD_MULTIPLE
assert several or {level!r} != "multiple"
before, callers = Channel.anyone, set()

def anyone(self, kind):
    callers.add(threading.current_thread().name)
    return before(self, kind)

Channel.anyone = anyone

def main(backend):
    A, begun = total(backend.workers).compile(backend), time.monotonic()
    time.sleep(3 * backend.worker)
    try:
        A(np.ones(3))
    except linop.errors.DeadlockError as error:
        assert "took longer than 1 s" in str(error), error
    time.sleep(begun + 4 - time.monotonic())

linop.launch(main, wait_limit=1)
assert ("linop-watchdog" in callers) == several, callers
say(several)
"""
    job = mpiexec(2, tmp_path / "p.py", text, LINOP_WINDOWS="0")
    assert job.returncode == 0, job.stderr
    assert job.stdout.splitlines() == [str(level == "multiple")] * 2, job.stdout
    assert ("does not wait in linop, and others" in job.stderr) == (level == "multiple"), job.stderr


@needs_mpi
@pytest.mark.parametrize("windows", ["0", "1"])
def test_a_rank_that_comes_late_goes_on(windows: str, tmp_path: Path) -> None:
    """Nothing is left of what it was asked, and all end well."""
    text = """
from linop.errors import DeadlockError

def main(backend):
    A, n, begun = total(backend.workers).compile(backend), backend.workers, time.monotonic()
    try:
        backend.worker == 1 and time.sleep(4)
        A(np.ones(3))
        say("no error")
    except DeadlockError as error:
        assert "took longer than 2 s" in str(error), error
    time.sleep(begun + 6 - time.monotonic())
    A = total(n).compile(backend)
    assert A(np.ones(3)).tolist() == [n] * 3

linop.launch(main, wait_limit=2)
say("ended well")
"""
    job = mpiexec(2, tmp_path / "p.py", text, LINOP_WINDOWS=windows)
    assert job.stdout.splitlines() == ["ended well"] * 2, job.stdout + job.stderr
    assert job.returncode == 0
    assert job.stderr.count("does not wait in linop, and others") == 1, job.stderr


@needs_mpi
def test_a_rank_that_has_ended_says_so(tmp_path: Path) -> None:
    text = """
backend = linop.backends.get("mpi", wait_limit=4)
A = total(3).compile(backend)
if backend.worker == 1:
    time.sleep(100)
backend.worker or A(np.ones(3))
"""
    job = mpiexec(3, tmp_path / "p.py", text)
    assert "; worker 1 does not wait in linop; worker 2 has ended" in job.stderr, job.stderr
    assert job.stderr.count("does not wait in linop, and others") == 1, job.stderr


@needs_mpi
@pytest.mark.parametrize("windows", ["0", "1"])
def test_forks_and_ends_are_clean(windows: str, tmp_path: Path) -> None:
    """The thread is not in a fork, is there again after it, and ends with MPI."""
    text = """
import multiprocessing, threading
from linop.backends.mpi.backend import MPI

def named():
    return [t.name for t in threading.enumerate()].count("linop-watchdog")

def child():
    assert named() == 0

backend = linop.backends.get("mpi")
A = total(2).compile(backend)
assert named() == 1
forked = multiprocessing.get_context("fork").Process(target=child)
forked.start()
forked.join()
assert forked.exitcode == 0
assert named() == 1
own = MPI.COMM_WORLD.Dup()
other = linop.backends.get("mpi", comm=own)
assert named() == 1
assert total(2).compile(other)(np.ones(3)).tolist() == [2] * 3
own.Free()
assert A(np.ones(3)).tolist() == [2] * 3
MPI.Finalize()
assert named() == 0
say("ended well")
"""
    job = mpiexec(2, tmp_path / "p.py", text, LINOP_WINDOWS=windows)
    assert job.stdout.splitlines() == ["ended well"] * 2, job.stdout + job.stderr
    assert job.returncode == 0, job.stderr
