"""Workers with different numbers of batches: calls in any order are one process, or one error."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from hypothesis import given
from hypothesis import strategies as st

from linop.errors import DeadlockError
from support.requirements import needs_mpi
from support.strategies.data import uneven
from support.workers import on_ranks, on_threads

FAULTS = tuple(uneven.FAULTS)


@given(data=st.data(), workers=st.integers(2, 4))
def test_orders_on_threads(data: st.DataObject, workers: int) -> None:
    on_threads(workers, uneven.is_one_process, data.draw(uneven.cases(workers)))


@needs_mpi
@pytest.mark.parametrize("windows", [True, False])
@given(case=uneven.cases(3))
def test_orders_on_ranks(windows: bool, case: uneven.Case) -> None:
    on_ranks(3, uneven.is_one_process, case, windows=windows)


@given(data=st.data(), workers=st.integers(2, 4))
def test_errors_on_threads(data: st.DataObject, workers: int) -> None:
    on_threads(workers, uneven.is_an_error, data.draw(uneven.cases(workers, FAULTS)))


@needs_mpi
@pytest.mark.parametrize("windows", [True, False])
@given(case=uneven.cases(3, FAULTS))
def test_errors_on_ranks(windows: bool, case: uneven.Case) -> None:
    on_ranks(3, uneven.is_an_error, case, windows=windows)


@given(data=st.data(), workers=st.integers(2, 3))
def test_a_worker_that_ends(data: st.DataObject, workers: int) -> None:
    with pytest.raises(DeadlockError, match="has ended"):
        on_threads(workers, uneven.ends_early, data.draw(uneven.cases(workers)))
