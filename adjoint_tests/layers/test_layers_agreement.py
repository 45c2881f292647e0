"""Layers that differ between workers say so in the network's words, on threads and on ranks."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import torch

import linop
from support.layers import agreement
from support.requirements import needs_mpi
from support.workers import on_ranks

contracts = pytest.mark.parametrize(
    "contract", agreement.CONTRACTS, ids=lambda contract: contract.__name__
)


@contracts
@pytest.mark.parametrize("workers", [2, 3])
def test_on_threads(contract: Callable[..., None], workers: int) -> None:
    anomalies = contract is agreement.anomalies_may_be_detected
    with torch.autograd.set_detect_anomaly(anomalies):  # of the process
        linop.launch(contract, workers)


@needs_mpi
@pytest.mark.timeout(300)
@contracts
def test_on_ranks(contract: Callable[..., None]) -> None:
    on_ranks(2, contract, wait_limit=10)
