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
from linop.testing.workers.jobs import job
from support.layers import agreement
from support.layers import contracts as layer_contracts
from support.requirements import needs_mpi

facts = pytest.mark.parametrize("fact", agreement.FACTS, ids=lambda fact: fact.__name__)


@facts
@pytest.mark.parametrize("workers", [2, 3])
def test_on_threads(fact: Callable[..., None], workers: int) -> None:
    anomalies = fact is agreement.anomalies_may_be_detected
    with torch.autograd.set_detect_anomaly(anomalies):  # of the process
        linop.launch(fact, workers)


@needs_mpi
@pytest.mark.timeout(300)
@facts
def test_on_ranks(fact: Callable[..., None]) -> None:
    job(2).run(layer_contracts.on_rank, fact)
