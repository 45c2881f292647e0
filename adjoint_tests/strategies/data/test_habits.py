"""Habits of people with a torch model: means, half precision, frozen parameters, torch.func; on
threads and on ranks."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

from support.requirements import needs_mpi
from support.strategies.data.habits import (
    agrees_under_autocast,
    is_a_mean_of_means,
    keeps_precision,
    sums_widely,
    takes_other_parameters,
    thaws,
    thaws_alone,
    warns_of_a_mean,
)
from support.workers import on_ranks, on_threads

CONTRACTS = [
    agrees_under_autocast,
    is_a_mean_of_means,
    keeps_precision,
    sums_widely,
    takes_other_parameters,
    thaws,
    warns_of_a_mean,
]


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda one: one.__name__)
def test_on_threads(contract: Any) -> None:
    for workers in (1, 3):
        on_threads(workers, contract)


@needs_mpi
def test_on_ranks() -> None:
    for contract in (is_a_mean_of_means, keeps_precision, sums_widely):
        on_ranks(2, contract)


def test_parameters_thawed_on_one_worker() -> None:
    on_threads(2, thaws_alone)
