"""Bound plans on 2, 3 and 4 ranks: what they promise of results, and of calls that go wrong.

The same on threads is in `test_plans`; how whole programs end, in `test_mpi_programs`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.contracts import failing_calls as call_contracts
from support.contracts import mpi_plans, runs
from support.contracts import plans as plan_contracts
from support.requirements import needs_mpi
from support.workers import MACHINES, in_job, on_ranks

pytestmark = [needs_mpi, pytest.mark.timeout(300)]

CYCLES = int(os.environ.get("LINOP_TEST_CYCLES", "1000"))
"""Of compiling, calling and dropping a plan. 10,000, more than MPICH has communicators (2048), take
one or two minutes."""

windows = pytest.mark.parametrize(
    "windows", [None, False, MACHINES], ids=["windows", "messages", "machines"]
)
several = pytest.mark.parametrize("ranks", [2, 3, 4])
operators = pytest.mark.parametrize("what", plan_contracts.OPERATORS)
in_proc = pytest.mark.skipif(not Path("/proc").is_dir(), reason="memory is looked up in /proc")


@windows
@operators
@pytest.mark.parametrize(
    "contract",
    [
        plan_contracts.results_are_kept,
        plan_contracts.any_strides_will_do,
        plan_contracts.the_argument_as_out,
    ],
    ids=lambda f: f.__name__,
)
def test_arrays(contract: Callable[..., None], what: str, windows: bool | str | None) -> None:
    on_ranks(3, contract, what, windows=windows)


@windows
@pytest.mark.parametrize("length", [plan_contracts.SMALL, plan_contracts.LARGE])
def test_in_place_is_by_region(length: int, windows: bool | str | None) -> None:
    on_ranks(2, plan_contracts.in_place_is_by_region, length, windows=windows)


@windows
@pytest.mark.parametrize("length", [plan_contracts.SMALL, plan_contracts.LARGE])
def test_out_is_refused(length: int, windows: bool | str | None) -> None:
    on_ranks(2, plan_contracts.out_is_refused, length, windows=windows)


@windows
@settings(max_examples=10)
@given(ranks=st.integers(2, 4), seed=st.integers(0, 999))
def test_runs_overlap(windows: bool | str | None, ranks: int, seed: int) -> None:
    on_ranks(ranks, runs.runs_overlap, seed, windows=windows)


@windows
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    "contract",
    [
        plan_contracts.a_vector_with_out_gives_a_vector,
        runs.one_run_at_a_time,
        runs.a_plan_inside_a_plan,
        runs.released_plans_end,
        runs.senders_may_be_ahead,
        runs.long_sums_may_be_ahead,
        runs.stages_keep_apart,
        runs.several_regions_are_checked_in_later_calls,
    ],
    ids=lambda f: f.__name__,
)
def test_a_plan(contract: Callable[..., None], ranks: int, windows: bool | str | None) -> None:
    on_ranks(ranks, contract, windows=windows)


@pytest.mark.parametrize("n", [7, 30_000])
def test_two_levels_between_machines(n: int) -> None:
    on_ranks(4, mpi_plans.boxes_cross_once, n, windows=MACHINES)


@windows
@several
@pytest.mark.parametrize(
    "contract",
    [
        call_contracts.a_first_call_fails_everywhere,
        call_contracts.only_its_workers_agree,
        call_contracts.different_plans_are_told,
        call_contracts.different_operators_are_told,
        call_contracts.who_did_not_wait_is_told_in_its_next_call,
        call_contracts.first_calls_are_in_step_after_an_alarm,
        call_contracts.errors_that_all_catch_are_over,
        call_contracts.errors_of_later_calls_wait,
        call_contracts.an_exit_of_a_generator_is_told,
    ],
    ids=lambda f: f.__name__,
)
def test_a_call(contract: Callable[..., None], ranks: int, windows: bool | str | None) -> None:
    on_ranks(ranks, contract, windows=windows, wait_limit=10)


@windows
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("wrong", call_contracts.WRONG_OUTS)
def test_a_wrong_out_fails_everywhere(wrong: str, ranks: int, windows: bool | str | None) -> None:
    on_ranks(ranks, call_contracts.a_wrong_out_fails_everywhere, wrong, windows=windows)


@windows
@pytest.mark.parametrize("ranks", [2, 3])
def test_threads_have_plans_of_their_own(ranks: int, windows: bool | str | None) -> None:
    on_ranks(ranks, call_contracts.threads_have_plans_of_their_own, 2.5, windows=windows)


@windows
@several
@pytest.mark.parametrize("trouble", call_contracts.TROUBLES)
@pytest.mark.parametrize("delay", [0, 0.02])
def test_a_later_call_fails_everywhere(
    trouble: str, delay: float, ranks: int, windows: bool | str | None
) -> None:
    contract = call_contracts.a_later_call_fails_everywhere
    on_ranks(ranks, contract, trouble, delay, windows=windows, wait_limit=10)


@windows
@several
def test_debug_mode_agrees_on_every_call(ranks: int, windows: bool | str | None) -> None:
    contract = call_contracts.debug_mode_agrees_on_every_call
    on_ranks(ranks, contract, windows=windows, debug=True, wait_limit=10)


@windows
@pytest.mark.parametrize("when", ["compile", "first call", "later call"])
@pytest.mark.parametrize(("ranks", "odd"), [(2, 0), (3, 1), (4, 3)])
def test_waits_end(ranks: int, odd: int, when: str, windows: bool | str | None) -> None:
    in_job(ranks, mpi_plans.waits_end, windows, when, odd)


@several
def test_shared_memory_or_not_is_the_same(ranks: int) -> None:
    in_job(ranks, mpi_plans.shared_memory_or_not_is_the_same, 1)


@pytest.mark.parametrize("ranks", [2, 3])
def test_plans_are_collected_anywhere(ranks: int) -> None:
    in_job(ranks, mpi_plans.collected_anywhere, 40)


@in_proc
@pytest.mark.timeout(60 + CYCLES // 10)
def test_nothing_accumulates() -> None:
    in_job(2, mpi_plans.nothing_accumulates, CYCLES, watch=30 + CYCLES / 20)
