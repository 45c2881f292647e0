"""Solvers with proximal maps and nonlinear ones on workers, their callbacks, checkpoints, errors.

Iterates are compared to 1e-7, since sums over workers are rounded in another order; repeated runs
bit for bit.
"""

from __future__ import annotations

import tempfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.contracts import optimization
from support.contracts.optimization import PROBLEMS
from support.draws import ON_RANKS
from support.requirements import needs_mpi
from support.workers import on_ranks, on_threads

names = st.sampled_from(sorted(PROBLEMS))
shapes = st.lists(st.integers(2, 7), min_size=1, max_size=2).map(tuple)


@given(st.integers(1, 8), names, shapes)
def test_on_threads(workers: int, name: str, shape: tuple[int, ...]) -> None:
    on_threads(workers, optimization.iterates_are_those_of_one_process, name, shape, 3)


@needs_mpi
@ON_RANKS
@given(st.integers(1, 4), names, shapes)
def test_on_ranks(ranks: int, name: str, shape: tuple[int, ...]) -> None:
    on_ranks(ranks, optimization.iterates_are_those_of_one_process, name, shape, 3)


@pytest.mark.parametrize("name", sorted(PROBLEMS))
def test_runs_repeat(name: str) -> None:
    on_threads(3, optimization.repeats, name)


@needs_mpi
def test_runs_on_ranks_repeat() -> None:
    for name in ("primal_dual", "lbfgs"):
        on_ranks(3, optimization.repeats, name)


@given(st.integers(1, 4), names, st.integers(1, 3), st.data())
def test_one_worker_stops_all(workers: int, name: str, at: int, data: st.DataObject) -> None:
    stopper = data.draw(st.integers(0, workers - 1))
    on_threads(workers, optimization.one_worker_stops, name, at, stopper)


@pytest.mark.parametrize("name", sorted(PROBLEMS))
def test_a_run_is_resumed(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        optimization.resumes(None, name, folder)
    with tempfile.TemporaryDirectory() as folder:
        on_threads(2, optimization.resumes, name, folder)


@needs_mpi
def test_a_run_on_ranks_is_resumed() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name in ("admm", "lbfgs"):
            on_ranks(2, optimization.resumes, name, folder)


def test_values_that_differ_between_workers() -> None:
    on_threads(3, optimization.different_values_are_refused)


@pytest.mark.parametrize("name", ["fista", "primal_dual", "admm", "lbfgs", "gauss_newton"])
def test_nan_is_named(name: str) -> None:
    on_threads(3, optimization.nan_is_named, name)


@needs_mpi
def test_nan_is_named_on_ranks() -> None:
    on_ranks(2, optimization.nan_is_named, "fista")
