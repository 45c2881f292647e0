"""The emitter makes of instructions what they say."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import linop
from linop.testing.describing import seeds
from support.contracts import repeated_calls
from support.contracts.instructions import calls_do_what_instructions_say
from support.draws import FEW, IN_PROCESS
from support.operators.catalogue import NAMES, build, describe
from support.operators.properties import stays_exact
from support.requirements import needs_mpi
from support.workers import EVERY_ROAD, on_ranks

names = st.sampled_from(NAMES)


@pytest.mark.slow
@settings(max_examples=6 * IN_PROCESS)
@given(name=names, data=st.data(), seed=seeds, large=st.booleans())
def test_calls_do_what_instructions_say(
    name: str, data: st.DataObject, seed: int, large: bool
) -> None:
    description = data.draw(describe(name), label=name)
    op = build(name, description)
    assume(stays_exact(op))
    workers = max(op.stages.workers, default=0) + 1
    with repeated_calls.all_large(large):
        linop.launch(lambda b: calls_do_what_instructions_say(b, name, description, seed), workers)


@needs_mpi
@pytest.mark.parametrize("road", EVERY_ROAD)
@settings(max_examples=4 * FEW)
@given(name=names, data=st.data(), seed=seeds, large=st.booleans())
def test_calls_do_what_instructions_say_on_ranks(
    road: str, name: str, data: st.DataObject, seed: int, large: bool
) -> None:
    description = data.draw(describe(name, 3), label=name)
    assume(stays_exact(build(name, description)))
    contract: tuple[Any, ...] = calls_do_what_instructions_say, name, description, seed
    on_ranks(3, repeated_calls.as_if_large, large, *contract, **EVERY_ROAD[road])
