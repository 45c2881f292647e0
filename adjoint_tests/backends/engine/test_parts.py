"""Backends of some of the workers have plans, calls and waits of their own."""

from __future__ import annotations

import importlib.util

import pytest

from support.contracts.parts import ends_a_failed_part, refuses_parts, sums_in_parts
from support.requirements import needs_mpi
from support.workers import on_ranks, on_threads


@pytest.mark.parametrize("workers", [3, 4])
def test_parts_of_threads(workers: int) -> None:
    on_threads(workers, sums_in_parts)
    on_threads(workers, refuses_parts)
    on_threads(workers, ends_a_failed_part)


@needs_mpi
@pytest.mark.parametrize("workers", [3, 4])
def test_parts_of_ranks(workers: int) -> None:
    on_ranks(workers, sums_in_parts)
    on_ranks(workers, sums_in_parts, windows=False)
    on_ranks(workers, refuses_parts)
    on_ranks(workers, ends_a_failed_part)


def test_parts_of_processes() -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed: pip install 'linop-algebra[torch]'")
    from support.torchrun import on_torchrun

    on_torchrun(4, sums_in_parts)
    on_torchrun(4, refuses_parts)
    on_torchrun(4, ends_a_failed_part)
