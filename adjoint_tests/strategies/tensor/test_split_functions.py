"""Functions of split tensors, and random numbers: as on one worker alone, or refused."""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

from hypothesis import given
from hypothesis import strategies as st

from support.requirements import needs_mpi
from support.strategies.tensor.split_functions import (
    ALONG,
    DRAWS,
    PLACES,
    SHAPES,
    WAYS,
    changed_attributes_are_followed,
    drawn,
    draws_the_same,
    is_right_or_refused,
)
from support.workers import on_ranks, on_threads

WORKERS = st.integers(1, 3)
FUNCTIONS = (
    st.sampled_from(sorted(ALONG)),
    st.sampled_from(SHAPES),
    st.integers(0, 3),
    st.booleans(),
)


@given(WORKERS, *FUNCTIONS)
def test_right_or_refused_on_threads(
    workers: int, name: str, shape: str, dim: int, example: bool
) -> None:
    on_threads(workers, is_right_or_refused, name, shape, dim, example)


@needs_mpi
@given(WORKERS, *FUNCTIONS)
def test_right_or_refused_on_ranks(
    workers: int, name: str, shape: str, dim: int, example: bool
) -> None:
    on_ranks(workers, is_right_or_refused, name, shape, dim, example)


@given(WORKERS, st.sampled_from(sorted(ALONG)), st.sampled_from(PLACES))
def test_changed_attributes_on_threads(workers: int, name: str, place: str) -> None:
    on_threads(workers, changed_attributes_are_followed, name, place)


@given(WORKERS, st.sampled_from(sorted(DRAWS)), st.sampled_from(WAYS))
def test_draws_on_threads(workers: int, name: str, way: str) -> None:
    # The same as computed once, by one worker alone.
    on_threads(workers, draws_the_same, name, way, drawn(name, "plain"))


@needs_mpi
@given(WORKERS, st.sampled_from(sorted(DRAWS)), st.sampled_from(WAYS))
def test_draws_on_ranks(workers: int, name: str, way: str) -> None:
    on_ranks(workers, draws_the_same, name, way, drawn(name, "plain"))
