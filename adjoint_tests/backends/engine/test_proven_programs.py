"""The instructions that are emitted are proven: those of all workers compute their operator."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import linop
from linop.errors import LinopError
from linop.testing.describing import seeds
from support.contracts import repeated_calls
from support.contracts.plans import OPERATORS
from support.contracts.proofs import (
    FAULTY,
    caught_on_ranks,
    faults_are_caught,
    programs,
    proven_on_ranks,
    runs_as_changed,
)
from support.draws import FEW, IN_PROCESS
from support.operators.catalogue import NAMES, build, describe
from support.operators.properties import stays_exact
from support.planning.exported import Exported
from support.planning.machine import Wrong, prove
from support.requirements import needs_mpi
from support.workers import EVERY_ROAD, on_ranks

names = st.sampled_from(NAMES)


@settings(max_examples=6 * IN_PROCESS)
@given(name=names, data=st.data(), seed=seeds, large=st.booleans())
def test_programs_are_proven(name: str, data: st.DataObject, seed: int, large: bool) -> None:
    op = build(name, data.draw(describe(name), label=name))
    assume(stays_exact(op))
    workers = max(op.stages.workers, default=0) + 1
    with repeated_calls.all_large(large):
        found = linop.launch(lambda backend: programs(backend, op, seed), workers)
    for each in zip(*found, strict=True):
        prove([program for _, program in each], each[0][0], seed=seed)


@settings(max_examples=IN_PROCESS)
@given(name=st.sampled_from(FAULTY), workers=st.integers(2, 4), seed=seeds, large=st.booleans())
def test_faults_in_programs_are_caught(name: str, workers: int, seed: int, large: bool) -> None:
    op = OPERATORS[name](workers)
    with repeated_calls.all_large(large):
        found = linop.launch(lambda backend: programs(backend, op, seed), workers)
    for each in zip(*found, strict=True):
        faults_are_caught([program for _, program in each], each[0][0], seed)


@settings(max_examples=4 * IN_PROCESS)
@given(name=names, data=st.data(), seed=seeds)
def test_programs_that_are_accepted_run_right(name: str, data: st.DataObject, seed: int) -> None:
    """In another order, or without some instruction."""
    op = build(name, data.draw(describe(name), label=name))
    assume(stays_exact(op) and not op.loops)  # the plan of a loop has no instructions of its own
    workers = max(op.stages.workers, default=0) + 1
    which = data.draw(st.integers(0, workers - 1))
    at, to = data.draw(st.tuples(st.integers(0, 30), st.none() | st.integers(0, 30)))

    def changed(instructions: list[Any]) -> list[Any]:
        """With one instruction elsewhere, or left out."""
        if at >= len(instructions):
            return instructions
        rest = [*instructions[:at], *instructions[at + 1 :]]
        return rest if to is None else [*rest[:to], instructions[at], *rest[to:]]

    programs: list[Exported] = []

    def run(backend: Any) -> None:
        change = changed if backend.worker == which else list
        runs_as_changed(backend, op, seed, change, programs)

    try:
        linop.launch(run, workers)
        right = True
    except (LinopError, AssertionError):
        right = False
    try:
        prove(programs, op.stages, seed=seed)
    except Wrong:
        return
    assert right


@needs_mpi
@pytest.mark.parametrize("road", EVERY_ROAD)
@settings(max_examples=FEW)
@given(name=st.sampled_from(FAULTY), seed=seeds, large=st.booleans())
def test_faults_in_programs_of_ranks_are_caught(
    road: str, name: str, seed: int, large: bool
) -> None:
    contract: tuple[Any, ...] = caught_on_ranks, name, seed
    on_ranks(3, repeated_calls.as_if_large, large, *contract, **EVERY_ROAD[road])


@needs_mpi
@pytest.mark.parametrize("road", EVERY_ROAD)
@settings(max_examples=4 * FEW)
@given(name=names, data=st.data(), seed=seeds, large=st.booleans())
def test_programs_of_ranks_are_proven(
    road: str, name: str, data: st.DataObject, seed: int, large: bool
) -> None:
    description = data.draw(describe(name, 3), label=name)
    assume(stays_exact(build(name, description)))
    contract: tuple[Any, ...] = proven_on_ranks, name, description, seed
    on_ranks(3, repeated_calls.as_if_large, large, *contract, **EVERY_ROAD[road])
