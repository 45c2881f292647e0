"""Plans as SciPy's, PyLops' and PyLops-MPI's operators, on threads and on ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import linop
from linop import Partition, TensorSpace
from linop.errors import ArgumentError, SpaceError
from support.contracts import interop
from support.requirements import needs_mpi
from support.workers import on_ranks, on_threads

CONTRACTS = [interop.solvers_in_step, interop.rectangular, interop.vectors_that_differ]
each_contract = pytest.mark.parametrize("contract", CONTRACTS, ids=lambda c: c.__name__)


@each_contract
@pytest.mark.parametrize("workers", [2, 4])
def test_on_threads(contract: Any, workers: int) -> None:
    on_threads(workers, contract)


@needs_mpi
@each_contract
@pytest.mark.parametrize("ranks", [2, 4])
def test_on_ranks(contract: Any, ranks: int) -> None:
    on_ranks(ranks, contract)


@needs_mpi
def test_pylops_on_ranks() -> None:
    on_ranks(2, interop.through_pylops)


@needs_mpi
def test_pylops_mpi_on_ranks() -> None:
    pytest.importorskip("pylops_mpi")
    on_ranks(2, interop.through_pylops_mpi)


@pytest.mark.parametrize("backend", ["reference", "threads"])
def test_plans_of_one_process(backend: str) -> None:
    A, M = interop.laplacian((2, 2))
    for given in (A, A.compile(linop.backends.get(backend))):
        F = linop.interop.scipy(given)
        assert F.shape == (30, 30) and F.dtype == np.float64
        assert (F.matmat(np.eye(30)) == M).all() and (F.H @ np.ones(30) == M.sum(axis=0)).all()
        P = linop.interop.to_pylops(given)
        assert P.dims == (6, 5) and (P.H @ np.ones((6, 5))).shape == (6, 5)


def test_what_is_no_plan_of_workers() -> None:
    A, _ = interop.laplacian((2, 1))
    with pytest.raises(ArgumentError, match="an operator or a plan expected, given 3"):
        linop.interop.scipy(3)  # type: ignore[arg-type]
    if pytest.importorskip("pylops_mpi"):
        with pytest.raises(ArgumentError, match="the plan of a worker"):
            linop.interop.to_pylops_mpi(A.compile(linop.backends.get("reference")))


def test_replicated_regions_are_no_distributed_arrays() -> None:
    def main(backend: Any) -> None:
        X = TensorSpace((4,), Partition((2,)), axes=[linop.REPLICATED])
        with pytest.raises(SpaceError, match="each number once"):
            linop.interop.from_distributed_array(None, X, backend)

    linop.launch(main, 2)
