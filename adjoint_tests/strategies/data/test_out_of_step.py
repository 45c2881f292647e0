"""A worker that leaves out a step, a backward or a forward, or freezes a parameter, is noticed by
the next message."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from hypothesis import given
from hypothesis import strategies as st

from support.requirements import needs_mpi
from support.strategies.data import out_of_step
from support.workers import on_ranks, on_threads


@given(data=st.data(), workers=st.integers(2, 4))
def test_on_threads(data: st.DataObject, workers: int) -> None:
    on_threads(workers, out_of_step.is_noticed, data.draw(out_of_step.cases(workers)))


@needs_mpi
@pytest.mark.parametrize("windows", [True, False])
@given(case=out_of_step.cases(3))
def test_on_ranks(windows: bool, case: out_of_step.Case) -> None:
    on_ranks(3, out_of_step.is_noticed, case, windows=windows)
