"""Sharded parameters train, bit for bit, as copies do; on threads, on ranks, and on torch's
processes."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

import linop
from linop import COPIES, REPLICATED, Partition, TensorSpace
from support.requirements import needs_mpi
from support.strategies.data.replicas import Case
from support.strategies.data.shards import (
    composes_on_a_mesh,
    counts_batches,
    gives_memory_up,
    is_built_on_meta,
    is_data_parallel,
    says_what_is_wrong,
    ties_weights,
)
from support.torchrun import on_torchrun
from support.workers import on_ranks, on_threads

CASES = [Case(), Case(whole=False, steps=3)]
OTHERS = [gives_memory_up, ties_weights, is_built_on_meta]


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("stage", [2, 3])
def test_data_parallel_on_threads(stage: int, workers: int) -> None:
    for case in CASES:
        on_threads(workers, is_data_parallel, case, stage)


@needs_mpi
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_data_parallel_on_ranks(workers: int) -> None:
    for stage in (2, 3):
        for case in CASES:
            on_ranks(workers, is_data_parallel, case, stage)


def test_data_parallel_on_torchrun() -> None:
    for stage in (2, 3):
        on_torchrun(2, is_data_parallel, CASES[1], stage)


@pytest.mark.parametrize("contract", OTHERS, ids=lambda one: one.__name__)
def test_on_threads(contract: Any) -> None:
    for workers in (2, 3):
        on_threads(workers, contract)


@needs_mpi
@pytest.mark.parametrize("contract", OTHERS, ids=lambda one: one.__name__)
def test_on_ranks(contract: Any) -> None:
    on_ranks(2, contract)


def test_errors() -> None:
    on_threads(2, says_what_is_wrong)


@needs_mpi
def test_errors_on_ranks() -> None:
    on_ranks(2, says_what_is_wrong)


def test_numbers_of_batches() -> None:
    for workers in (2, 3):
        on_threads(workers, counts_batches)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_hybrid_shards(workers: int) -> None:
    on_threads(workers, composes_on_a_mesh)


@needs_mpi
def test_hybrid_shards_on_ranks() -> None:
    on_ranks(4, composes_on_a_mesh)


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("shape", [(7, 3), (2, 4), (6,), (0, 2)], ids=str)
def test_reduce_scatter_is_a_slice_of_the_all_reduce(shape: Any, workers: int) -> None:
    """Proof: G = E G', where G' gathers into one replicated tensor, so that G.H = G'.H E.H; and
    G'.H is a slice, without messages."""
    group = Partition((workers,))
    X = TensorSpace(shape, group, axes=[0])
    G, slices = linop.all_gather(X), linop.all_gather(X, into=REPLICATED).H
    Y = TensorSpace(shape, group, axes=[COPIES])
    E = linop.repartition(Y.like(group, [REPLICATED]), Y)
    assert E.cost().messages == slices.cost().messages == 0
    assert G.H.equals(slices @ E.H)
    assert G.equals(E @ slices.H)
