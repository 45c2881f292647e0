"""LeNet-5, the U-Net and others as pipelines whose stages are on several workers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import torch

from support.requirements import needs_mpi
from support.strategies.pipelines.cut_networks import (
    close,
    computes_in_lower_precision,
    gradients_are_those_without_a_schedule,
    ties_weights_of_cut_stages,
    trains_and_goes_on,
    workers,
)
from support.strategies.pipelines.wrong_cut_stages import WRONG, fails_in_a_step
from support.strategies.pipelines.wrong_pipelines import Wrong, all_raise
from support.workers import on_ranks, on_threads

WATCH = 120.0
"""Seconds: torch imports some modules at first use, which takes long on busy machines."""


@pytest.mark.parametrize(
    ("name", "grids", "schedule"),
    [
        ("lenet5", 0, "1f1b"),
        ("lenet5", 1, "gpipe"),
        ("lenet5", 1, "zb-h1"),
        ("unet3d", 0, "gpipe"),
        ("unet3d", 1, "1f1b"),
        ("unet3d", 2, "1f1b"),
    ],
)
def test_gradients_on_threads(name: str, grids: int, schedule: str) -> None:
    count = workers(name, grids)
    on_threads(count, gradients_are_those_without_a_schedule, name, grids, schedule)


@needs_mpi
def test_gradients_on_ranks() -> None:
    on_ranks(4, gradients_are_those_without_a_schedule, "unet3d", 0, "gpipe", watch=WATCH)


@pytest.mark.parametrize(("name", "schedule"), [("lenet5", "gpipe"), ("unet3d", "1f1b")])
def test_training_on_threads(name: str, schedule: str, tmp_path: Path) -> None:
    on_threads(4, trains_and_goes_on, name, 0, 1, schedule, str(tmp_path))


@needs_mpi
def test_training_on_ranks(tmp_path: Path) -> None:
    on_ranks(4, trains_and_goes_on, "lenet5", 1, 0, "1f1b", str(tmp_path), watch=WATCH)


@pytest.mark.parametrize("contract", [ties_weights_of_cut_stages, computes_in_lower_precision])
def test_model_on_threads(contract: Any) -> None:
    for count in (4, 5):
        on_threads(count, contract)


@needs_mpi
@pytest.mark.parametrize("contract", [ties_weights_of_cut_stages, computes_in_lower_precision])
def test_model_on_ranks(contract: Any) -> None:
    on_ranks(4, contract, watch=WATCH)


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong[0].__name__)
def test_wrong_stages(wrong: Wrong) -> None:
    on_threads(wrong[3], all_raise, wrong, True)


@needs_mpi
def test_wrong_stages_on_ranks() -> None:
    for wrong in WRONG:
        on_ranks(wrong[3], all_raise, wrong, True, watch=WATCH)


@pytest.mark.parametrize("back", [False, True])
def test_errors_in_cut_stages(back: bool) -> None:
    for worker in (0, 1):
        on_threads(3, fails_in_a_step, worker, 4, back)


@needs_mpi
@pytest.mark.parametrize("back", [False, True])
def test_errors_in_cut_stages_on_ranks(back: bool) -> None:
    for worker in (0, 1):
        on_ranks(3, fails_in_a_step, worker, 4, back, watch=WATCH)


def test_another_value_is_not_close() -> None:
    one = torch.ones(2, dtype=torch.float64)
    close("this", one, one + 1e-13)
    with pytest.raises(AssertionError, match="that"):
        close("that", one, one + 1e-11)
