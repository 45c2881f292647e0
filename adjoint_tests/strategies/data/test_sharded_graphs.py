"""Sharded parameters under checkpoints, hooks and prefetch; their states, gathered, saved, and
loaded on other numbers of workers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

from support.requirements import needs_mpi
from support.strategies.data.sharded_graphs import (
    converts,
    differentiates_gradients,
    keeps_views_of_complex_parameters,
    leaves_hooks_to_others,
    prefetches,
    refuses_other_uses,
    survives_checkpoints,
)
from support.strategies.data.sharded_states import (
    clips_as_one,
    fills_buffers_on_meta,
    gives_plain_states,
    loads,
    reads_as_torch,
    saves,
    scales_as_one,
)
from support.workers import on_ranks, on_threads

CONTRACTS = [
    survives_checkpoints,
    differentiates_gradients,
    leaves_hooks_to_others,
    keeps_views_of_complex_parameters,
    refuses_other_uses,
    converts,
    gives_plain_states,
    clips_as_one,
    scales_as_one,
    fills_buffers_on_meta,
]


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda one: one.__name__)
def test_on_threads(contract: Any) -> None:
    for workers in (2, 4) if contract is clips_as_one else (1, 3):
        on_threads(workers, contract)


@needs_mpi
@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda one: one.__name__)
def test_on_ranks(contract: Any) -> None:
    on_ranks(2, contract, *([(3,)] if contract is survives_checkpoints else []))


@pytest.mark.parametrize("prefetch", [1, 2, 7])
def test_prefetch_on_threads(prefetch: int) -> None:
    on_threads(3, prefetches, prefetch)


@needs_mpi
def test_prefetch_on_ranks() -> None:
    on_ranks(2, prefetches, 1)
    on_ranks(2, prefetches, 2, windows=False)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_folders_of_other_numbers_of_workers(tmp_path: Path) -> None:
    on_threads(3, saves, str(tmp_path))
    reads_as_torch(str(tmp_path))
    for workers in (1, 2, 4):
        on_threads(workers, loads, str(tmp_path))


@needs_mpi
def test_folders_of_ranks(tmp_path: Path) -> None:
    on_ranks(2, saves, str(tmp_path), (3,))
    on_ranks(1, loads, str(tmp_path), (3,))
