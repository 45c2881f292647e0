"""Ranks take another example after one that failed, unless communication ended halfway in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from linop.errors import DeadlockError, communication, has_interrupted, interrupt
from linop.testing.workers.jobs import PersistentJob
from linop.testing.workers.rank import verdict
from support.requirements import needs_mpi
from support.spmd import rank_failures


@pytest.fixture(scope="module")
def pair() -> Iterator[PersistentJob]:
    """Two ranks, of which one may answer long after the other has failed."""
    ranks = PersistentJob(2, grace=20.0)
    yield ranks
    ranks.close()


def unusable(pair: PersistentJob, failure: Any, *arguments: Any) -> set[int]:
    """The ranks, of two, that take no other example; all that failed are asked."""
    outcome = pair.ask(failure.__name__, failure, arguments)
    assert outcome.complete, outcome.report()
    failed = {rank for rank, one in outcome.answers.items() if one and one.kind == "failed"}
    assert failed, "nothing failed"
    return {rank for rank in failed if not outcome.answers[rank].usable}  # type: ignore[union-attr]


ON_BACKEND = {
    "a local function, first call": (rank_failures.local_function, (1,), {0, 1}),
    "a local function, third call": (rank_failures.local_function, (3,), {0, 1}),
    "a local function, start and finish": (rank_failures.local_function_after_start, (), {0, 1}),
    "an error instead of it": (rank_failures.another_error_instead, (), {0, 1}),
    "an interrupt in a first call": (rank_failures.interrupt_in_a_call, (False,), {0}),
    "an interrupt in a later call": (rank_failures.interrupt_in_a_call, (True,), {0}),
    "an interrupt in a meeting": (rank_failures.interrupt_in_a_meeting, (), {0}),
    "a plain error": (rank_failures.plain, (), set()),
    "a plan of one worker, first call": (rank_failures.plan_of_one_worker, (1,), set()),
    "a plan of one worker, third call": (rank_failures.plan_of_one_worker, (3,), set()),
    "an argument": (rank_failures.agreed_upon, (), set()),
    "operators": (rank_failures.different_operators, (), set()),
}
ON_COMM = {
    "an interrupt before all have come": (rank_failures.interrupt_before_all_have_come, (), {0}),
    "a limit in a call, windows": (rank_failures.limit_in_a_call, (True,), {0}),
    "a limit in a call, messages": (rank_failures.limit_in_a_call, (False,), {0}),
    "a limit in a meeting": (rank_failures.limit_in_a_meeting, (), {0}),
    "a limit before all have come": (rank_failures.limit_before_all_have_come, (), {0}),
    "settings": (rank_failures.different_settings, (), set()),
}


@needs_mpi
@pytest.mark.parametrize("name", [*ON_BACKEND, *ON_COMM])
def test_a_rank_is_reused_unless_communication_was_interrupted(
    name: str, pair: PersistentJob
) -> None:
    if name in ON_COMM:
        failure, arguments, wanted = ON_COMM[name]
        assert unusable(pair, failure, *arguments) == wanted
    else:
        failure, arguments, wanted = ON_BACKEND[name]
        assert unusable(pair, rank_failures.on_backend, failure, *arguments) == wanted


def test_an_exception_of_any_class_can_interrupt() -> None:
    """Of one that allows no assignment, too; and what is raised because of it has interrupted."""

    @dataclass(frozen=True)
    class FrozenError(Exception):
        name: str

    error = FrozenError("planted")
    assert not has_interrupted(error)
    with pytest.raises(FrozenError), communication():
        raise error
    assert has_interrupted(error)
    for later in (KeyError(), DeadlockError("planted")):
        assert not has_interrupted(later)
        later.__context__ = error
        assert has_interrupted(later)
        later.__context__ = None
        later.__cause__ = later
        assert not has_interrupted(later)
        assert has_interrupted(ExceptionGroup("two", [later, error]))


def test_a_verdict_is_the_error_s() -> None:
    error = ValueError("planted")
    assert verdict(error).usable
    interrupt(error)
    assert not verdict(error).usable
