"""Stages out of the ordinary: pipelines of them are, bit for bit, one process."""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import torch

import linop
from linop.errors import ArgumentError
from support.requirements import needs_mpi
from support.strategies.pipelines.unusual_stages import (
    SHARED,
    SHARED_THRICE,
    beside_one_process,
    casts_as_one_process,
    drops_after_a_change_of_mode,
    drops_at_another_rate,
    drops_the_same,
    evaluates_in_inference_mode,
    hooked,
    in_place,
    names_do_not_matter,
    of_dtype,
    partly_frozen,
    refuses_clipping,
    refuses_later_calls,
    refuses_sizes,
    refuses_tied,
    repeating,
    sharing,
    sharing_thrice,
    steps_with_another_optimizer,
    sums_in_forward,
    thaw,
    with_buffers,
)
from support.workers import on_ranks, on_threads

SCHEDULES = pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])


@pytest.mark.filterwarnings("ignore:Complex modules")
@SCHEDULES
@pytest.mark.parametrize("dtype", [torch.complex128, torch.bfloat16, torch.float16], ids=str)
def test_dtypes(schedule: str, dtype: Any) -> None:
    on_threads(3, beside_one_process, of_dtype(dtype), schedule)


@SCHEDULES
def test_hooks_of_tensors(schedule: str) -> None:
    on_threads(3, beside_one_process, hooked, schedule)


@SCHEDULES
@pytest.mark.parametrize("recompute", [False, True])
def test_buffers(schedule: str, recompute: bool) -> None:
    on_threads(3, beside_one_process, with_buffers, schedule, {"recompute": recompute})


@SCHEDULES
@pytest.mark.parametrize("recompute", [False, True])
def test_modules_with_two_names(schedule: str, recompute: bool) -> None:
    on_threads(3, beside_one_process, repeating, schedule, {"recompute": recompute})


def test_versions_of_modules_with_two_names() -> None:
    on_threads(3, names_do_not_matter, "pipedream")


@SCHEDULES
@pytest.mark.parametrize("recompute", [False, True])
def test_activations_in_place(schedule: str, recompute: bool) -> None:
    on_threads(3, beside_one_process, in_place, schedule, {"recompute": recompute})


@SCHEDULES
@pytest.mark.parametrize("options", [{}, {"max_norm": 2.0}], ids=str)
def test_parameters_thawed_between_steps(schedule: str, options: dict[str, Any]) -> None:
    on_threads(3, beside_one_process, partly_frozen, schedule, options, thaw)


@pytest.mark.parametrize("tied", [(), SHARED], ids=["shared", "tied"])
@pytest.mark.parametrize("most", [None, 2.0])
def test_stages_of_one_worker_share_a_weight(tied: Any, most: float | None) -> None:
    options = {"chunks": 2, "tied": tied, "max_norm": most}
    on_threads(2, beside_one_process, sharing, "interleaved-1f1b", options)


def test_stages_of_several_workers_share_a_weight() -> None:
    with pytest.raises(ArgumentError, match="are one, and in stages of several workers"):
        on_threads(4, beside_one_process, sharing, "1f1b")
    on_threads(4, beside_one_process, sharing, "1f1b", {"tied": SHARED})
    on_threads(4, beside_one_process, sharing_thrice, "1f1b", {"tied": SHARED_THRICE})


def test_threads_share_a_tied_weight() -> None:
    stages = sharing()
    with pytest.raises(ArgumentError, match="are one tensor in the memory of workers 0 and 2"):
        on_threads(4, beside_one_process, lambda: stages, "1f1b", {"tied": SHARED})


def test_dropout() -> None:
    runs = [
        linop.launch(partial(drops_the_same, schedule=schedule, seed=seed), 3, "threads")
        for schedule, seed in (("gpipe", 5), ("1f1b", 5), ("zb-h1", 5), ("gpipe", 6))
    ]
    first, *same, other = [[grad for grads in run for grad in grads] for run in runs]
    for run in same:
        assert all(map(torch.equal, run, first))
    assert not any(map(torch.equal, other[:4], first[:4]))


@needs_mpi
def test_dropout_on_ranks() -> None:
    on_ranks(3, drops_the_same, "1f1b", 5)


def test_an_optimizer_that_is_assigned() -> None:
    on_threads(2, steps_with_another_optimizer)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("recompute", [False, True])
def test_forwards_that_wait(schedule: str, recompute: bool) -> None:
    on_threads(4, sums_in_forward, schedule, recompute)


@needs_mpi
def test_forwards_that_wait_on_ranks() -> None:
    on_ranks(4, sums_in_forward, "1f1b", False)


def test_dropout_after_a_change_of_mode() -> None:
    on_threads(3, drops_after_a_change_of_mode)


def test_rates_of_dropout() -> None:
    on_threads(3, drops_at_another_rate)


def test_evaluation_between_steps() -> None:
    on_threads(2, evaluates_in_inference_mode)


def test_mixed_precision() -> None:
    on_threads(2, casts_as_one_process)


BROKEN = pytest.mark.parametrize(
    "contract", [refuses_later_calls, refuses_clipping, refuses_tied], ids=lambda one: one.__name__
)


@BROKEN
def test_later_calls_of_a_broken_pipeline(contract: Any) -> None:
    on_threads(3, contract)


@needs_mpi
@BROKEN
def test_later_calls_of_a_broken_pipeline_on_ranks(contract: Any) -> None:
    on_ranks(3, contract, wait_limit=20)


def test_sizes_that_are_no_numbers() -> None:
    on_threads(2, refuses_sizes)
