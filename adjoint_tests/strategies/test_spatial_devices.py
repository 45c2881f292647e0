"""Models that are cut in space in a device's memory: a simulated one, and a GPU."""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

from support.device.running import on_ranks, on_threads
from support.requirements import needs_gpu, needs_mpi, needs_torch_on_gpu
from support.strategies.spatial import unet_on_a_device


def test_unet_on_a_simulated_device() -> None:
    on_threads(2, "simulated", unet_on_a_device, (2, 1))


@pytest.mark.gpu
@needs_gpu
@needs_torch_on_gpu
@needs_mpi
@pytest.mark.timeout(400)
def test_unet_on_a_gpu() -> None:
    """On ranks: torch runs the backward passes of a device on one thread of a process."""
    on_ranks(2, "cupy", "staged", unet_on_a_device, (2, 1))
