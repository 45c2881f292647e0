"""Schedules that gather sharded parameters and sum gradients are data parallel training that sums
once; on threads and on ranks."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

from hypothesis import given
from hypothesis import strategies as st

from linop.schedules import GENERATORS, Action, Kind, Schedule
from linop.schedules.actions import COMPUTE
from support.requirements import needs_mpi
from support.strategies.pipelines.group_actions import (
    TABLE,
    Grouped,
    differ_in_tables,
    fails_beside,
    gives_memory_up,
    hear_of_refusals,
    is_the_twin,
    keep_no_versions,
    trains_as_one_process,
    wrapped_stages_are_sharded,
)
from support.workers import on_ranks, on_threads

APART = (
    "0UNSHARD,0F0,0F1,0F2,0RESHARD,0UNSHARD,0B0,0B1,0B2,0REDUCE_GRAD,0RESHARD\n"
    "1UNSHARD,1F0,1F1,1F2,1RESHARD,1UNSHARD,1B0,1B1,1B2,1REDUCE_GRAD\n"
)
ALONE = "0F0,0F1,0B0,0B1,0REDUCE_GRAD\n1F0,1F1,1B0,1B1,1REDUCE_GRAD\n"
CASES = [
    Grouped(TABLE),
    Grouped(TABLE, whole=False),
    Grouped(APART, whole=False),
    Grouped(APART, recompute=True),
    Grouped(ALONE, whole=False),
    Grouped(TABLE, dp=1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tables_on_threads(case: Grouped) -> None:
    on_threads(case.workers, is_the_twin, case)


@st.composite
def tables(draw: Any) -> Grouped:
    """Group actions at any places where they may stand, or left out."""
    name = draw(st.sampled_from(["gpipe", "1f1b", "zb-h1", "backward-first"]))
    stages, dp = draw(st.sampled_from([(1, 1), (1, 4), (2, 2), (2, 1), (3, 2)]))
    plain = GENERATORS[name](stages, draw(st.integers(1, 3))).only(COMPUTE)
    rows = []
    for s, row in enumerate(plain.workers):
        gathers, sums = draw(st.booleans()), draw(st.booleans())
        found: list[Action] = [Action(s, Kind.UNSHARD)] * gathers
        for k, action in enumerate(row):
            last = k == len(row) - 1
            found.append(action)
            after = action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
            if after and sums and (last or draw(st.booleans())):
                found.append(Action(s, Kind.REDUCE_GRAD))
            if gathers and draw(st.booleans()):
                again = [] if last else [Action(s, Kind.UNSHARD)]
                found += [Action(s, Kind.RESHARD), *again]
        rows.append(tuple(found))
    text = Schedule(tuple(rows)).to_csv()
    return Grouped(text, dp, recompute=draw(st.booleans()))


@given(case=tables())
def test_drawn_on_threads(case: Grouped) -> None:
    on_threads(case.workers, is_the_twin, case)


@needs_mpi
def test_tables_on_ranks() -> None:
    on_ranks(4, is_the_twin, CASES[2])


def test_memory() -> None:
    for workers in (1, 2, 3):
        on_threads(workers, gives_memory_up)


def test_updates() -> None:
    on_threads(3, trains_as_one_process)


def test_wrapped_stages() -> None:
    on_threads(4, wrapped_stages_are_sharded)


@needs_mpi
def test_wrapped_stages_on_ranks() -> None:
    on_ranks(4, wrapped_stages_are_sharded)


@pytest.mark.parametrize(
    "contract", [differ_in_tables, keep_no_versions, fails_beside, hear_of_refusals]
)
def test_what_is_wrong(contract: Any) -> None:
    on_threads(4, contract)


@needs_mpi
def test_what_is_wrong_on_ranks() -> None:
    on_ranks(4, differ_in_tables)
    on_ranks(4, fails_beside)
    on_ranks(4, hear_of_refusals)
