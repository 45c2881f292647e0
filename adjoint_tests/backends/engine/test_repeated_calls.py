"""Every mode of a call, several times, on every layout: the contracts of
`support.contracts.repeated_calls`, on threads, the reference and ranks."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import linop
from linop.testing.describing import seeds
from support.contracts import plans as plan_contracts
from support.contracts import repeated_calls
from support.draws import ON_RANKS
from support.operators.catalogue import NAMES, build, describe
from support.operators.properties import stays_exact
from support.requirements import needs_mpi
from support.workers import ROADS, on_ranks

spmd = pytest.mark.parametrize("backend", ["threads", "reference"])
roads = pytest.mark.parametrize("road", ROADS)
operators = pytest.mark.parametrize("what", plan_contracts.OPERATORS)
lengths = pytest.mark.parametrize("length", repeated_calls.LENGTHS)
functions = pytest.mark.parametrize("name", repeated_calls.FUNCTIONS)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data(), seed=seeds, large=st.booleans())
def test_the_catalogue(name: str, data: st.DataObject, seed: int, large: bool) -> None:
    description = data.draw(describe(name), label=name)
    op = build(name, description)
    assume(stays_exact(op))
    workers = max(op.stages.workers, default=0) + 1
    with repeated_calls.all_large(large):
        linop.launch(lambda b: repeated_calls.of_the_catalogue(b, name, description, seed), workers)


@spmd
@operators
def test_operators_of_several_workers(backend: str, what: str) -> None:
    linop.launch(lambda b: repeated_calls.of_several_workers(b, what, 1), 3, backend)


@spmd
@functions
@lengths
@pytest.mark.parametrize("where", repeated_calls.WHERE)
def test_local_functions(backend: str, name: str, where: str, length: int) -> None:
    # Long lists take their time: short ones go the way of large arrays instead.
    lists = name == "sequence" and length > 3
    with repeated_calls.all_large(lists):
        n = 3 if lists else length
        linop.launch(lambda b: repeated_calls.local_functions(b, name, where, n), 2, backend)


@spmd
@lengths
def test_a_workspace_of_several_maps(backend: str, length: int) -> None:
    linop.launch(lambda b: repeated_calls.one_buffer_for_all(b, length), 2, backend)


@spmd
@lengths
def test_arguments_are_read_only(backend: str, length: int) -> None:
    linop.launch(lambda b: repeated_calls.arguments_are_read_only(b, length), 1, backend)


def test_a_halo_in_place() -> None:
    linop.launch(repeated_calls.a_halo_in_place, 2)


@needs_mpi
@pytest.mark.parametrize("name", NAMES)
@ON_RANKS
@given(data=st.data(), seed=seeds, large=st.booleans(), road=st.sampled_from(list(ROADS)))
def test_the_catalogue_on_ranks(
    name: str, data: st.DataObject, seed: int, large: bool, road: str
) -> None:
    description = data.draw(describe(name, 3), label=name)
    assume(stays_exact(build(name, description)))
    contract = (repeated_calls.of_the_catalogue, name, description, seed)
    on_ranks(3, repeated_calls.as_if_large, large, *contract, **ROADS[road])


@needs_mpi
@roads
@operators
def test_operators_of_several_ranks(road: str, what: str) -> None:
    on_ranks(3, repeated_calls.of_several_workers, what, 1, **ROADS[road])


@needs_mpi
@functions
@pytest.mark.parametrize("where", ["before", "around"])
def test_local_functions_on_ranks(name: str, where: str) -> None:
    for road in ("windows", "messages"):
        contract = (repeated_calls.local_functions, name, where, 3)
        on_ranks(3, repeated_calls.as_if_large, True, *contract, **ROADS[road])


@needs_mpi
@roads
def test_a_halo_in_place_on_ranks(road: str) -> None:
    on_ranks(3, repeated_calls.a_halo_in_place, **ROADS[road])


@needs_mpi
@pytest.mark.parametrize("ranks", [2, 3])
def test_buffers_live_as_long_as_requests(ranks: int) -> None:
    calls = max(5, settings().max_examples // 5)
    contract = repeated_calls.buffers_live_as_long_as_requests
    on_ranks(ranks, contract, calls, **ROADS["collectives"])
