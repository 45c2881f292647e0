"""The whole catalogue on 1, 2, 3 and 4 ranks of MPI, and what programs rely on there.

Hypothesis draws in this process; the examples run in MPI jobs (`linop.testing.workers.jobs`). How
plain programs start and fail is in `test_mpi_programs`; that this machinery finds faults, in
`test_spmd`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from linop.testing.describing import seeds
from support.contracts import mpi as mpi_contracts
from support.contracts import mpi_operators
from support.draws import ON_RANKS
from support.operators.catalogue import NAMES, build, describe
from support.operators.properties import stays_exact
from support.requirements import needs_mpi
from support.workers import in_job

pytestmark = [needs_mpi, pytest.mark.timeout(400)]


@pytest.mark.parametrize("name", NAMES)
@ON_RANKS
@given(ranks=st.integers(1, 4), data=st.data(), seed=seeds, messages=st.booleans())
def test_ranks_are_the_reference(
    name: str, ranks: int, data: st.DataObject, seed: int, messages: bool
) -> None:
    description = data.draw(describe(name, ranks), label=name)
    assume(stays_exact(build(name, description)))
    in_job(ranks, mpi_operators.operator, name, description, seed, messages)


every_size = pytest.mark.parametrize("ranks", [1, 2, 3, 4])


@every_size
@pytest.mark.parametrize(
    "contract",
    [
        mpi_contracts.missing_worker,
        mpi_contracts.other_communicators,
        mpi_contracts.messages_apart,
    ],
)
def test_contract(contract: Callable[..., None], ranks: int) -> None:
    in_job(ranks, contract)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_communicator_is_duplicated_once(ranks: int) -> None:
    in_job(ranks, mpi_contracts.duplicated_once)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("what", mpi_contracts.UNLIKE)
def test_workers_that_built_different_operators_are_told(what: str, ranks: int) -> None:
    for odd in range(ranks):
        in_job(ranks, mpi_contracts.different_operators, what, odd)


@every_size
@pytest.mark.parametrize("shape", [(10,), (3, 4)])
def test_solvers_are_the_same_as_on_threads(shape: tuple[int, ...], ranks: int) -> None:
    in_job(ranks, mpi_contracts.solver, shape)
