"""Bound plans on threads and on the reference: the contracts of `support.contracts.plans` and
`support.contracts.failing_calls`.

The same on ranks is in `test_mpi_plans`; what plans compute, in `test_catalogue`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import linop
from linop import LinearOperator, Region, Space, Subset
from linop.testing.describing import seeds
from support.contracts import failing_calls as call_contracts
from support.contracts import plans as plan_contracts
from support.contracts import runs

spmd = pytest.mark.parametrize("backend", ["threads", "reference"])
several = pytest.mark.parametrize("workers", [2, 3, 4])
operators = pytest.mark.parametrize("what", plan_contracts.OPERATORS)


@spmd
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
def test_arrays(backend: str, contract: Callable[..., None], what: str) -> None:
    linop.launch(lambda b: contract(b, what), 3, backend)


@spmd
@pytest.mark.parametrize(
    "contract",
    [
        plan_contracts.a_vector_with_out_gives_a_vector,
        runs.one_run_at_a_time,
        runs.released_plans_end,
        runs.senders_may_be_ahead,
        runs.long_sums_may_be_ahead,
        runs.stages_keep_apart,
        runs.several_regions_are_checked_in_later_calls,
    ],
)
def test_a_plan(backend: str, contract: Callable[..., None]) -> None:
    linop.launch(contract, 3, backend)


@pytest.mark.parametrize("length", [plan_contracts.SMALL, plan_contracts.LARGE])
def test_in_place_is_by_region(length: int) -> None:
    linop.launch(lambda b: plan_contracts.in_place_is_by_region(b, length), 2)


def _part(region: Region, number: int, size: int) -> Subset:
    return region[number * size : (number + 1) * size]


@st.composite
def copies_in_place(draw: st.DrawFn) -> LinearOperator:
    """Some copies, one after the other, between parts of two regions of one or two workers, or all
    of them; and at the end it may be that the two change places."""
    length, workers = draw(st.integers(2, 5)), (0, draw(st.integers(0, 1)))
    space = Space([Region(f"x{k}", length, w) for k, w in enumerate(workers)])
    op = linop.identity(space)
    for _ in range(draw(st.integers(1, 4))):
        a, b = (draw(st.sampled_from(space.regions)) for _ in "ab")
        size = draw(st.sampled_from([*range(1, length // 2 + 1), *([length] if a != b else [])]))
        places = [*draw(st.permutations(range(length // size))), 0]  # one is all of a region
        one, other = places[:2]
        op = linop.copy(space, _part(a, one, size), _part(b, other, size)) @ op
    if draw(st.booleans()):
        x, y = space.regions
        between = Region("c", length, workers[0])
        for source, target in ((x, between), (y, x), (between, y)):
            op = linop.move(op.codomain, source, target) @ op
    return op


@settings(max_examples=max(300, settings().max_examples))
@given(op=copies_in_place(), seed=seeds)
def test_out_may_be_the_argument(op: LinearOperator, seed: int) -> None:
    linop.launch(lambda b: plan_contracts.out_may_be_the_argument(b, op, seed), 2)


@spmd
@pytest.mark.parametrize("length", [plan_contracts.SMALL, plan_contracts.LARGE])
def test_out_is_refused(backend: str, length: int) -> None:
    linop.launch(lambda b: plan_contracts.out_is_refused(b, length), 2, backend)


@pytest.mark.parametrize(
    "what",
    [one for one in plan_contracts.OPERATORS if not one.endswith(("several", "parts"))],
)
def test_a_later_call_refuses_the_argument_s_memory(what: str) -> None:
    linop.launch(lambda b: plan_contracts.a_later_call_refuses_the_argument_s_memory(b, what), 1)


@spmd
@given(workers=st.integers(2, 4), seed=st.integers(0, 999))
def test_runs_overlap(backend: str, workers: int, seed: int) -> None:
    linop.launch(lambda b: runs.runs_overlap(b, seed), workers, backend)


def test_a_plan_inside_a_plan() -> None:
    linop.launch(runs.a_plan_inside_a_plan, 3)


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
)
def test_a_call(contract: Callable[..., None], workers: int) -> None:
    linop.launch(contract, workers)


def test_an_interrupt_of_a_half_is_told() -> None:
    linop.launch(call_contracts.an_interrupt_of_a_half_is_told, 2)


@several
@pytest.mark.parametrize("wrong", call_contracts.WRONG_OUTS)
def test_a_wrong_out_fails_everywhere(wrong: str, workers: int) -> None:
    linop.launch(lambda b: call_contracts.a_wrong_out_fails_everywhere(b, wrong), workers)


@pytest.mark.parametrize("workers", [2, 3])
def test_threads_have_plans_of_their_own(workers: int) -> None:
    linop.launch(lambda b: call_contracts.threads_have_plans_of_their_own(b, 0.2), workers)


@several
@pytest.mark.parametrize("trouble", call_contracts.TROUBLES)
@pytest.mark.parametrize("delay", [0, 0.02])
def test_a_later_call_fails_everywhere(trouble: str, delay: float, workers: int) -> None:
    linop.launch(lambda b: call_contracts.a_later_call_fails_everywhere(b, trouble, delay), workers)
