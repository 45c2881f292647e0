"""Habits of people with a torch model: means, half precision, frozen parameters, torch.func; on
threads and on ranks."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

from linop.strategies.data.mean_losses import MeanLossWarning
from support.requirements import needs_mpi
from support.strategies.data.habits import (
    agrees_under_autocast,
    gives_each_row_once,
    is_a_mean_of_means,
    is_an_optimizer,
    is_pickled,
    keeps_precision,
    normalises_over_all_rows,
    saves_beside_training,
    sums_widely,
    takes_empty_parts,
    takes_other_parameters,
    thaws,
    thaws_alone,
    warns_of_a_mean,
)
from support.strategies.data.more_habits import (
    copies_all,
    divides_widely,
    forgets_what_was_whole,
    has_a_mean_loss,
    refuses_forwards_that_write,
    saves_what_is_ahead,
    shares_sums,
    thaws_in_turns,
    updates_in_backward,
)
from support.workers import on_ranks, on_threads

CONTRACTS = [
    agrees_under_autocast,
    copies_all,
    divides_widely,
    forgets_what_was_whole,
    gives_each_row_once,
    is_a_mean_of_means,
    is_an_optimizer,
    is_pickled,
    normalises_over_all_rows,
    keeps_precision,
    saves_what_is_ahead,
    shares_sums,
    sums_widely,
    takes_empty_parts,
    takes_other_parameters,
    thaws,
    thaws_in_turns,
    warns_of_a_mean,
    updates_in_backward,
    refuses_forwards_that_write,
]


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda one: one.__name__)
def test_on_threads(contract: Any) -> None:
    for workers in (1, 3):
        on_threads(workers, contract)


@needs_mpi
def test_on_ranks() -> None:
    for contract in (is_a_mean_of_means, keeps_precision, sums_widely):
        on_ranks(2, contract)


@pytest.mark.parametrize("workers", [1, 2])
def test_saves_beside_training(tmp_path: Path, workers: int) -> None:
    on_threads(workers, saves_beside_training, str(tmp_path))


def test_parameters_thawed_on_one_worker() -> None:
    on_threads(2, thaws_alone)


@pytest.mark.parametrize("copies", [True, False])
def test_warnings_of_means(copies: bool) -> None:
    """Filters of warnings are a process's, and not of one of its threads."""
    for own in (False, True):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            on_threads(2, has_a_mean_loss, copies, own)
        assert len([one for one in caught if one.category is MeanLossWarning]) == own
