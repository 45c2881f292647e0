"""`full_module` makes the sequential module again, with the values of now, of what is tensor
parallel, sharded, data parallel or cut by experts."""

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
from support.strategies.expert_nets import Experts
from support.strategies.full_modules import (
    WRAPS,
    of_experts,
    of_language_models,
    of_parts,
    what_cannot_be_copied_is_said,
)
from support.strategies.tensor.tensor_networks import Case
from support.workers import on_ranks, on_threads

FLAG = st.booleans()
CASES = st.builds(
    Case,
    width=st.integers(3, 7),
    heads=st.just(8),
    groups=st.sampled_from([8, 4]),
    norm=st.sampled_from(["LayerNorm", "RMSNorm"]),
    bias=FLAG,
    tied=FLAG,
    sequence=FLAG,
    blocks=st.just(1),
    length=st.integers(2, 7),
    seed=st.integers(0, 99),
)


@pytest.mark.parametrize("wrap", WRAPS)
@given(case=CASES, workers=st.sampled_from([1, 2, 4, 8]))
def test_of_language_models(wrap: str, case: Case, workers: int) -> None:
    on_threads(workers, of_language_models, case, wrap)


@pytest.mark.parametrize(
    ("workers", "inside"), [*((n, True) for n in range(1, 7)), (1, False), (2, False), (4, False)]
)
def test_of_parts(workers: int, inside: bool) -> None:
    on_threads(workers, of_parts, inside)


@pytest.mark.parametrize("case", [Experts((1,)), Experts((1, 1)), Experts((1,) * 4, dp=2)])
def test_of_experts(case: Experts) -> None:
    on_threads(case.workers, of_experts, case)


@pytest.mark.parametrize("workers", [1, 2])
def test_what_cannot_be_copied(workers: int) -> None:
    on_threads(workers, what_cannot_be_copied_is_said)


@needs_mpi
@pytest.mark.parametrize("wrap", WRAPS)
def test_on_ranks(wrap: str) -> None:
    on_ranks(2, of_language_models, Case(tied=True), wrap)
    on_ranks(2, of_parts, False)
