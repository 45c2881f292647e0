"""torch's attention by heads, projections of several parts, inputs by name, terms of low rank."""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip(
        "torch is not installed: pip install 'linop-algebra[torch]'", allow_module_level=True
    )

from support.requirements import needs_mpi
from support.strategies.tensor.attentions import (
    ATTENTIONS,
    REFUSALS,
    WAYS,
    adapts,
    attends,
    converts_by_name,
    encodes,
    generates,
    opens,
    refuses_magnitudes,
    refuses_other_parts,
    takes_parts,
)
from support.workers import on_ranks, on_threads


@pytest.mark.parametrize("name", ATTENTIONS)
def test_torchs_attention_on_threads(name: str) -> None:
    for workers in 1, 2, 3:
        on_threads(workers, attends, name)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_torchs_encoder_on_threads(sequence: bool, first: bool) -> None:
    for workers in 2, 4:
        on_threads(workers, encodes, sequence, first)


@pytest.mark.parametrize(("way", "groups"), WAYS)
def test_parts_on_threads(way: str, groups: int) -> None:
    for workers in (1, 2) if groups == 2 else (1, 2, 3, 4):
        on_threads(workers, takes_parts, way, groups)


@needs_mpi
def test_parts_on_ranks() -> None:
    on_ranks(2, takes_parts, "slices", 2)
    on_ranks(3, attends, "masks")


@pytest.mark.parametrize("way", REFUSALS)
def test_other_parts_are_refused(way: str) -> None:
    on_threads(2, refuses_other_parts, way)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_inputs_by_name_on_threads(workers: int) -> None:
    on_threads(workers, converts_by_name)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_terms_of_low_rank_on_threads(workers: int, sequence: bool) -> None:
    on_threads(workers, adapts, sequence)


def test_magnitudes_beside_terms_of_low_rank() -> None:
    on_threads(2, refuses_magnitudes)


def test_caches_on_threads() -> None:
    for workers in 1, 2, 4:
        on_threads(workers, generates)


def test_parts_that_open_others_on_threads() -> None:
    for workers in 1, 2, 3:
        on_threads(workers, opens)
