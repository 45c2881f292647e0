"""Ranks that share a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Gpu = tuple[int, str]
"""The lowest rank on its machine, and its PCI bus id there."""


def gpu_here(cuda: Any, machine: int) -> Gpu:
    """The current device.

    Args:
        cuda: CuPy's submodule of that name.
        machine: the lowest rank on this rank's machine.
    """
    return machine, str(cuda.Device().pci_bus_id)


def sharing(gpus: Sequence[Gpu]) -> list[int]:
    """Ranks that share one GPU, the first that several have; empty if each has its own.

    Args:
        gpus: of all ranks.
    """
    for gpu in gpus:
        ranks = [rank for rank, other in enumerate(gpus) if other == gpu]
        if len(ranks) > 1:
            return ranks
    return []
