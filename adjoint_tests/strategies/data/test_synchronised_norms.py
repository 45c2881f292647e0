"""Norms over all workers' rows in pipelines, in evaluation, alone, and in copies for torch."""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import torch

from support.strategies.data.synchronised_norms import (
    are_alone_in_evaluation,
    are_in_stages,
    are_torchs_in_copies,
    have_buffers_in_stages,
    train_alone,
)
from support.workers import on_threads


@pytest.mark.parametrize("name", ["gpipe", "zb-h1"])
def test_in_stages_of_replicas(name: str) -> None:
    on_threads(4, are_in_stages, name)


def test_buffers_in_stages_of_replicas() -> None:
    on_threads(4, have_buffers_in_stages)


@pytest.mark.parametrize("workers", [1, 2])
def test_evaluation_is_of_each_worker(workers: int) -> None:
    on_threads(workers, are_alone_in_evaluation)


@pytest.mark.parametrize("workers", [1, 2])
def test_copies_for_torch(workers: int) -> None:
    on_threads(workers, are_torchs_in_copies)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_one_worker_beside_torch_distributed() -> None:
    if torch.distributed.is_initialized():
        pytest.skip("torch.distributed has been initialised")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        on_threads(1, train_alone)
    finally:
        torch.distributed.destroy_process_group()
