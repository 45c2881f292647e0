"""Parameters on which a loss does not depend have no gradient, in every strategy as in one
process; one of zeros would let weight decay move them."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

from support.requirements import needs_mpi
from support.strategies.unused import SCHEDULES, in_pipelines, in_shards
from support.workers import on_ranks, on_threads

OPTIONS = st.sampled_from(
    [{}, {"prefetch": 1}, {"reshard_after_forward": False}, {"offload": True}]
)


@given(st.sampled_from(SCHEDULES), st.integers(0, 10**6), st.booleans(), st.booleans())
def test_pipelines(schedule: str, seed: int, recompute: bool, tied: bool) -> None:
    on_threads(3, in_pipelines, schedule, seed, recompute, tied)


@needs_mpi
@given(st.sampled_from(SCHEDULES), st.integers(0, 10**6), st.booleans(), st.booleans())
def test_pipelines_on_ranks(schedule: str, seed: int, recompute: bool, tied: bool) -> None:
    on_ranks(3, in_pipelines, schedule, seed, recompute, tied)


@given(st.integers(1, 3), st.integers(0, 10**6), OPTIONS, st.booleans())
def test_shards(workers: int, seed: int, options: dict[str, Any], accumulates: bool) -> None:
    on_threads(workers, in_shards, seed, options, accumulates)
