"""examples/unet3d.py: a network with halos, resampling and skip connections, cut in space."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import torch

from support.layers.cases import same
from support.layers.networks import unet_trains_as_its_twin
from support.requirements import needs_mpi
from support.workers import on_ranks, on_threads

STEPS = 20
TOLERANCE = 1e-10
"""Sums in another order grow in Adam, slowly."""

# Blocks of different lengths. At the bottom the halo of a block is as long as its neighbour, and of
# the last case's four blocks there one is empty.
CASES = [((2, 2, 1), (12, 20, 4)), ((1, 1, 4), (4, 8, 20)), ((1, 1, 4), (8, 4, 12))]


@pytest.mark.parametrize(("grid", "shape"), CASES)
def test_training_on_threads(grid: Any, shape: Any) -> None:
    on_threads(4, unet_trains_as_its_twin, grid, shape, 3, TOLERANCE)  # threads take long


@needs_mpi
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("grid", "shape"), CASES)
def test_training_on_ranks(grid: Any, shape: Any) -> None:
    on_ranks(4, unet_trains_as_its_twin, grid, shape, STEPS, TOLERANCE, watch=200)


def test_another_value_is_not_the_same() -> None:
    ones = torch.ones(3, dtype=torch.float64)
    same(ones, ones + TOLERANCE / 2, TOLERANCE)
    with pytest.raises(AssertionError):
        same(ones, ones + 2 * TOLERANCE, TOLERANCE)
