"""Inner products say whose they are: on threads, ranks and under torchrun."""

from __future__ import annotations

import importlib.util

import pytest
from hypothesis import given
from hypothesis import strategies as st

import linop
from support.contracts import inner_products as contracts
from support.requirements import needs_mpi
from support.workers import on_ranks, on_threads

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None,
    reason="torch is not installed: pip install 'linop-algebra[torch]'",
)


@pytest.mark.parametrize("backend", ["threads", "reference"])
@given(data=st.data(), workers=st.integers(1, 4))
def test_only_the_same_are_added(backend: str, data: st.DataObject, workers: int) -> None:
    kinds, rounds = data.draw(contracts.questions(workers))
    linop.launch(lambda b: contracts.only_the_same_are_added(b, kinds, rounds), workers, backend)


@needs_mpi
@pytest.mark.parametrize("windows", [True, False])
@given(asked=contracts.questions(3))
def test_on_ranks(windows: bool, asked: tuple) -> None:  # type: ignore[type-arg]
    on_ranks(3, contracts.only_the_same_are_added, *asked, windows=windows)


@needs_torch
@given(asked=contracts.questions(2))
def test_on_processes(asked: tuple) -> None:  # type: ignore[type-arg]
    from support.torchrun import on_torchrun

    on_torchrun(2, contracts.only_the_same_are_added, *asked)


@given(workers=st.integers(1, 3), threads=st.integers(1, 3))
def test_threads_of_a_worker(workers: int, threads: int) -> None:
    on_threads(workers, contracts.threads_of_a_worker, threads, 2)


@needs_mpi
@pytest.mark.parametrize("windows", [True, False])
def test_threads_of_a_rank(windows: bool) -> None:
    on_ranks(3, contracts.threads_of_a_worker, 3, 4, windows=windows)


@needs_torch
def test_threads_of_a_process() -> None:
    from support.torchrun import on_torchrun

    on_torchrun(2, contracts.threads_of_a_worker, 2, 3)
