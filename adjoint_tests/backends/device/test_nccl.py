"""Messages over NCCL: what goes wrong with them, on the simulated device. That they arrive is among
the contracts of `test_device`, and of `test_cupy`."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

import pytest

from support.device import nccl as device_nccl
from support.device.running import on_ranks
from support.requirements import needs_mpi
from support.workers import in_job

pytestmark = [needs_mpi, pytest.mark.timeout(300)]

KIND, WAY = "simulated", "nccl"
named = attrgetter("__name__")
each_of = pytest.mark.parametrize


@each_of("ranks", [2, 3])
def test_slow_copies_do_not_keep_a_start_back(ranks: int) -> None:
    on_ranks(ranks, KIND, WAY, device_nccl.slow_copies_do_not_keep_a_start_back)


@each_of("ranks", [1, 2, 4])
def test_failures_are_heard_and_mended(ranks: int) -> None:
    on_ranks(ranks, KIND, WAY, device_nccl.a_failure_is_heard_and_mended)


@each_of("ranks", [2, 3])
@each_of(
    "contract", [device_nccl.missing_calls_end, device_nccl.errors_of_nccl_are_told], ids=named
)
def test_calls_that_go_wrong_end(contract: Callable[..., None], ranks: int) -> None:
    on_ranks(ranks, KIND, WAY, contract)


@each_of("ranks", [1, 3])
def test_ranks_without_nccl_are_told(ranks: int) -> None:
    in_job(ranks, device_nccl.ranks_without_nccl_are_told)


@each_of("ranks", [1, 3])
def test_ranks_that_fail_to_open_are_told(ranks: int) -> None:
    in_job(ranks, device_nccl.ranks_that_fail_to_open_are_told)
