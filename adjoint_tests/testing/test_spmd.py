"""Properties across workers: faults in them are found, shrunk, and named, and nothing hangs; the
decorator refuses what it cannot run. What pytest makes of all that is in `test_spmd_pytest`."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from linop.errors import ArgumentError
from linop.testing import FailedExampleError, spmd
from linop.testing.workers.located import MARK
from linop.testing.workers.outcome import Outcome
from linop.testing.workers.rank import Answer
from support.requirements import needs_mpi
from support.spmd import forms
from support.spmd.fault_table import Hunt, hunt
from support.spmd.faults import FAULTS, Fault

WATCH = 4.0


@needs_mpi
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_shrunk_and_named(name: str) -> None:
    """At few sizes, where a job is started for each; `support.spmd.fault_table` has more, again and
    again."""
    fault = FAULTS[name]
    found = hunt(fault, WATCH, (1, 2), sizes=(2, 3) if fault.ends else None)
    assert found.named, found.message
    assert found.shrunk, found.message
    assert not found.late, found.seconds


def test_a_hunt_tells_what_was_not_found() -> None:
    """Each verdict of `Hunt` can be false."""
    fault = Fault(lambda: None, ("rank 1 failed", "this|that"))
    message = "rank 1 failed: that\n    size=3,\nworkers=2\n"
    good = Hunt(fault, 1, message, [0.1])
    assert good.found and good.named and good.shrunk and not good.late
    assert not Hunt(fault, 1).found
    assert not Hunt(fault, 1, message.replace("that", "")).named
    assert not Hunt(fault, 1, message.replace("3", "4")).shrunk
    assert not Hunt(fault, 1, "").shrunk
    assert Hunt(fault, 1, message, [0.1, 6.1]).late


# The decorator.


def test_what_ranks_cannot_find_is_refused() -> None:
    def local(backend: Any) -> None:
        del backend

    class Test:
        def method(self, backend: Any) -> None:
            del backend

    for test in (local, Test.method, lambda backend: None):
        with pytest.raises(ArgumentError, match="a function of a module's top level; given"):
            spmd(workers=2)(test)
    with pytest.raises(ArgumentError, match="expected a test function, given 3"):
        spmd(workers=2)(3)  # type: ignore[type-var]


@pytest.mark.parametrize("workers", [0, -1, (), (2, 0), 1.5, "2", None, True, [1, "2"]])
def test_workers_are_whole_numbers(workers: Any) -> None:
    with pytest.raises(ArgumentError, match="workers is a whole number from 1"):
        spmd(workers=workers)


def test_backends_are_mpi_and_threads() -> None:
    with pytest.raises(ArgumentError, match="backend is 'mpi' or 'threads'; given 'gpu'"):
        spmd(workers=2, backend="gpu")


def test_numbers_of_workers_are_sorted() -> None:
    """The smallest is tried first, and is what Hypothesis shrinks to."""
    assert getattr(forms.test_on_each, MARK).workers == (1, 2)


def test_without_mpi_it_runs_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["linop.testing.workers.spmd"]
    monkeypatch.setattr(module.jobs, "missing_mpi", lambda: "no mpiexec")
    monkeypatch.setattr(module.OPTIONS, "backend", None)
    before = module.TALLY.ran["threads", 2]
    forms.test_anywhere()
    assert module.TALLY.ran["threads", 2] == before + 1
    monkeypatch.setattr(module.OPTIONS, "backend", "mpi")
    with pytest.raises(pytest.skip.Exception, match="no mpiexec"):
        forms.test_anywhere()


# Outcomes.


def test_a_report_says_each_thing_once() -> None:
    wrong = Answer("failed", "Traceback: planted\n")
    answers = {2: None, 1: wrong, 0: wrong, 3: None, 5: Answer()}
    printed = {4: "its stack\n", 3: ""}
    outcome = Outcome("test(n=3)", 6, answers, printed, "mpiexec said: so\n")
    with pytest.raises(FailedExampleError) as failed:
        outcome.settle()
    assert str(failed.value) == (
        "test(n=3) failed on 6 ranks: ranks 0, 1 failed, rank 2 died, rank 3 ended after it, "
        "rank 4 was stuck, rank 5 passed\n"
        "--- ranks 0, 1 failed\nTraceback: planted\n"
        "--- rank 4 was stuck\nits stack\n"
        "---\nmpiexec said: so"
    )
    assert not outcome.complete and not outcome.usable and not outcome.timed_out


@pytest.mark.parametrize(
    ("note", "printed", "states"),
    [
        ("", "", "rank 0 died, rank 1 ended after it"),
        ("exited due to process rank 1 with PID 7", "", "rank 0 ended after it, rank 1 died"),
        ("", "Abort(3): application called MPI_Abort", "rank 0 ended after it, rank 1 died"),
        ("process rank 2 with PID 7", "", "rank 0 died, rank 1 ended after it"),
    ],
)
def test_mpi_says_who_died_first(note: str, printed: str, states: str) -> None:
    """Two may be gone at once: then it says which of them ended the job."""
    report = Outcome("test()", 2, {0: None, 1: None}, {1: printed}, note).report()
    assert report.startswith(f"test() failed on 2 ranks: {states}"), report


def test_what_all_ranks_say_is_passed_on() -> None:
    Outcome("test()", 2, {0: Answer(), 1: Answer()}).settle()
    # Before skips: an exception of those would skip this test.
    with pytest.raises(FailedExampleError, match="rank 0 passed, rank 1 failed"):
        Outcome("test()", 2, {0: Answer(), 1: Answer("failed")}).settle()
    skipped = Answer("skipped", "why")
    with pytest.raises(pytest.skip.Exception, match="why"):
        Outcome("test()", 2, {0: skipped, 1: skipped}).settle()
    with pytest.raises(FailedExampleError, match="rank 0 skipped the test, rank 1 passed"):
        Outcome("test()", 2, {0: skipped, 1: Answer()}).settle()
    assert Outcome("test()", 2, {0: Answer()}).timed_out
