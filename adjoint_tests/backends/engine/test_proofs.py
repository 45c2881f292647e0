"""What is emitted is proven: the instructions of all workers compute their operator."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import linop
from linop.testing.describing import seeds
from support.contracts import repeated_calls
from support.contracts.proofs import programs, proven_on_ranks
from support.draws import FEW, IN_PROCESS
from support.operators.catalogue import NAMES, build, describe
from support.operators.properties import stays_exact
from support.planning.machine import prove
from support.requirements import needs_mpi
from support.workers import MACHINES, ROADS, on_ranks

EVERY_ROAD: dict[str, dict[str, Any]] = {**ROADS, "machines": {"windows": MACHINES}}
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
