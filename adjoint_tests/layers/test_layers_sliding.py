"""Convolution and pooling over blocks are torch's, forward and back."""

from __future__ import annotations

import importlib.util

import pytest
from hypothesis import given, settings

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

from support.layers.cases import Case, is_its_twin
from support.layers.sliding import adaptive, convolutions, poolings, transposed
from support.requirements import needs_mpi
from support.workers import on_ranks, on_threads


@given(convolutions(8))
def test_convolutions_on_threads(case: Case) -> None:
    on_threads(case.workers, is_its_twin, case)


@given(transposed(8))
def test_transposed_convolutions_on_threads(case: Case) -> None:
    on_threads(case.workers, is_its_twin, case)


@given(poolings(6))
def test_poolings_on_threads(case: Case) -> None:
    on_threads(case.workers, is_its_twin, case)


@given(adaptive(8))
def test_adaptive_poolings_on_threads(case: Case) -> None:
    on_threads(case.workers, is_its_twin, case)


@needs_mpi
@pytest.mark.timeout(300)
@settings(max_examples=16)
@given(convolutions(4) | transposed(4))
def test_convolutions_on_ranks(case: Case) -> None:
    on_ranks(case.workers, is_its_twin, case)


@needs_mpi
@pytest.mark.timeout(300)
@settings(max_examples=16)
@given(poolings(4) | adaptive(4))
def test_poolings_on_ranks(case: Case) -> None:
    on_ranks(case.workers, is_its_twin, case)
