"""ResNet-18 cut in space, beside data parallel, is its sequential twin."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

from support.requirements import needs_mpi
from support.strategies.resnets import is_its_twin
from support.workers import on_ranks, on_threads

WATCH = 120.0
"""Seconds: torch imports some modules at first use, which takes long on busy machines."""
# Blocks are of different lengths, and shorter than halos; the last ones are empty on some workers.
CASES = [((2, 2, 2), False, 33), ((2, 2, 2), True, 33)]


@pytest.mark.parametrize(("grid", "replicas", "size"), CASES)
def test_resnet_on_threads(grid: Any, replicas: bool, size: int) -> None:
    dp, rows, columns = grid
    on_threads(dp * rows * columns, is_its_twin, grid, replicas, size)


@needs_mpi
def test_resnet_on_ranks() -> None:
    on_ranks(4, is_its_twin, (2, 1, 2), True, 33, watch=WATCH)
