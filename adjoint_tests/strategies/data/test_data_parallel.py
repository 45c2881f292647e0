"""Data parallel training is, exactly on whole numbers, one process; on threads, on ranks, and on
torch's processes."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import torch

from linop import Partition
from linop.errors import DeadlockError, LinopError
from linop.strategies.data.operators import from_server, replication, summation
from support.requirements import needs_mpi
from support.strategies.data.replicas import (
    Case,
    adds_to_gradients,
    changes_dtype,
    checks_itself,
    clips_and_copies,
    composes_with_pipelines,
    delays_updates,
    fails_in_backward,
    has_buffers,
    has_no_parameters,
    has_the_global_mean,
    has_unused,
    is_converted_by_one,
    is_sequential,
    joins,
    keeps_saved_buffers,
    misses_a_batch,
    says_what_is_wrong,
    spreads_nan,
)
from support.strategies.pipelines.tied_replicas import adds_replicas_of_ties
from support.torchrun import on_torchrun
from support.workers import on_ranks, on_threads

CASES = [
    Case(),
    Case(micro=3),
    Case(cap=10**9),
    Case(whole=False, steps=3),
    Case((("algorithm", "ring"),)),
    Case((("server", 0),), whole=False, steps=2),
    Case(dtype="float32"),
]
OTHERS = [
    adds_to_gradients,
    has_unused,
    has_the_global_mean,
    has_buffers,
    keeps_saved_buffers,
    clips_and_copies,
    joins,
]


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_process_on_threads(case: Case, workers: int) -> None:
    on_threads(workers, is_sequential, case)


@needs_mpi
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_one_process_on_ranks(workers: int) -> None:
    for case in CASES:
        on_ranks(workers, is_sequential, case)


@needs_mpi
def test_one_process_on_ranks_without_shared_memory() -> None:
    for case in CASES[:2]:
        on_ranks(2, is_sequential, case, windows=False)


@pytest.mark.parametrize("workers", [3])
def test_one_process_on_torchrun(workers: int) -> None:
    for case in CASES:
        on_torchrun(workers, is_sequential, case)


@pytest.mark.parametrize("contract", OTHERS, ids=lambda one: one.__name__)
def test_on_threads(contract: Any) -> None:
    for workers in (1, 2, 5):
        on_threads(workers, contract)


@needs_mpi
@pytest.mark.parametrize("contract", OTHERS, ids=lambda one: one.__name__)
def test_on_ranks(contract: Any) -> None:
    on_ranks(2, contract)


def test_pipelines_of_replicas() -> None:
    on_threads(4, composes_with_pipelines)
    for name in ("pipedream", "pipedream-2bw"):
        on_threads(4, delays_updates, name)


@pytest.mark.parametrize("steps", ["s", "ss", "ns", "nn", "sns", "snns", "nnsn", "snn"])
def test_tied_weights_of_replicas(steps: str) -> None:
    on_threads(4, adds_replicas_of_ties, steps)


@needs_mpi
def test_pipelines_of_replicas_on_ranks() -> None:
    on_ranks(4, composes_with_pipelines)
    on_ranks(4, adds_replicas_of_ties, "snns")


def test_errors() -> None:
    on_threads(2, says_what_is_wrong)


@needs_mpi
def test_errors_on_ranks() -> None:
    on_ranks(2, says_what_is_wrong)
    on_ranks(2, fails_in_backward)


def test_error_in_backward() -> None:
    for contract in (fails_in_backward, spreads_nan, checks_itself):
        on_threads(2, contract)


def test_other_dtypes_and_no_parameters() -> None:
    for contract in (has_no_parameters, changes_dtype):
        on_threads(2, contract)
    with pytest.raises(LinopError, match=r"torch\.float32|to construct linop.*DataParallel"):
        on_threads(2, is_converted_by_one)


def test_workers_with_different_numbers_of_batches() -> None:
    with pytest.raises(DeadlockError, match=r"worker 1 has ended"):
        on_threads(2, misses_a_batch)


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_operators(workers: int) -> None:
    """Proofs: the ring is E E.H, and the server's operator composed with its adjoint too."""
    group = Partition((workers,))
    E, B = replication(7, torch.float64, group), from_server(7, torch.float64, group, 0)
    both = E @ summation(7, torch.float64, group)
    assert workers == 1 or both.equals(summation(7, torch.float64, group, "ring"))
    assert both.equals(B @ summation(7, torch.float64, group, server=0))
