"""Whatever workers disagree on in a layer's call, first or later, all raise the same error, and the
next calls are right: on threads, and on ranks by every road."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

from support.layers import disagreements
from support.layers.disagreements import ERRORS, FITTING, LAYERS, disagreements_are_over
from support.requirements import needs_mpi
from support.workers import EVERY_ROAD, on_ranks, on_threads

pytestmark = pytest.mark.timeout(300)

CALLS = st.lists(
    st.tuples(
        st.sampled_from(range(len(LAYERS))),
        st.one_of(st.sampled_from(FITTING), st.sampled_from([*ERRORS])),
        st.integers(0, 2),
        st.integers(0, 6),
    ),
    min_size=1,
    max_size=12,
)
EACH = [
    (k % len(LAYERS), what, k % 3, (k + 1) % 3)
    for k, error in enumerate(ERRORS)
    for what in (error, *FITTING)
]
"""Each error, and then all calls that are right; the first ones are those of new layers."""


@settings(max_examples=30)
@given(st.integers(2, 3), CALLS)
def test_any_calls_on_threads(workers: int, calls: Any) -> None:
    on_threads(workers, disagreements_are_over, calls)


@needs_mpi
@settings(max_examples=25)
@given(st.sampled_from([*EVERY_ROAD]), CALLS)
def test_any_calls_on_ranks(road: str, calls: Any) -> None:
    on_ranks(2, disagreements_are_over, calls, wait_limit=20, **EVERY_ROAD[road])


@pytest.mark.parametrize("workers", [2, 3])
def test_each_on_threads(workers: int) -> None:
    on_threads(workers, disagreements_are_over, EACH)


@needs_mpi
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("road", EVERY_ROAD)
def test_each_on_ranks(ranks: int, road: str) -> None:
    on_ranks(ranks, disagreements_are_over, EACH, wait_limit=20, **EVERY_ROAD[road])


contracts = pytest.mark.parametrize(
    "contract", disagreements.CONTRACTS, ids=lambda contract: contract.__name__
)


@contracts
@pytest.mark.parametrize("workers", [2, 3])
def test_contracts_on_threads(contract: Callable[..., None], workers: int) -> None:
    on_threads(workers, contract)


@needs_mpi
@contracts
@pytest.mark.parametrize("road", EVERY_ROAD)
def test_contracts_on_ranks(contract: Callable[..., None], road: str) -> None:
    on_ranks(2, contract, wait_limit=20, **EVERY_ROAD[road])
