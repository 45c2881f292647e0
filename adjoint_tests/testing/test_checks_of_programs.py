"""The checks for users in programs of many workers: on threads, and on ranks."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import linop
import linop.testing as lt
from linop import Region, Space
from linop.errors import MissingExtraError
from linop.testing import pair
from linop.testing.workers.jobs import FailedExampleError
from support.requirements import needs_mpi
from support.spmd import check_programs
from support.spmd.check_programs import COMPLEX
from support.workers import in_job


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_program_of_threads_passes(workers: int) -> None:
    reports = check_programs.on_threads(workers, 3)
    assert all(map(all, reports)), reports[0]
    assert reports == [reports[0]] * workers


@pytest.mark.parametrize("fault", check_programs.FAULTS)
def test_a_fault_of_one_thread_is_reported_by_all(fault: str) -> None:
    reports = check_programs.on_threads(2, 3, fault)
    words = [[str(report) for report in mine] for mine in reports]
    assert words[0] == words[1]
    assert check_programs.FAULTS[fault] in words[0][0]


def test_an_exception_on_one_thread_is_raised_on_all() -> None:
    heard = {}

    def main(backend: Any) -> None:
        def forward(x: np.ndarray) -> np.ndarray:
            if backend.worker == 1:
                raise ValueError("planted")
            return x.copy()

        try:
            lt.check_linear(pair(forward, None, 3, 3), backend)
        except (ValueError, linop.LinopError) as error:
            heard[backend.worker] = f"{type(error).__name__}: {error}"

    linop.launch(main, workers=2)
    words = "worker 1, in the forward function of <6x6 forward>: ValueError('planted')"
    assert heard == {0: f"BackendError: {words}", 1: "ValueError: planted"}


def test_copies_that_differ_are_named() -> None:
    """A gradient of replicated weights that somebody forgot to sum over the workers."""
    weights = Space(Region("w", 3, (0, 1)))
    outputs = Space([Region("y0", 3, 0), Region("y1", 3, 1)])

    def main(backend: Any) -> lt.Report:
        return lt.check_adjoint(pair(np.copy, np.copy, weights, outputs), backend)

    first, second = linop.launch(main, workers=2)
    assert first == second
    assert "gives w, which is replicated, other values on worker 1 than on worker 0" in str(first)


def test_a_matrix_is_that_of_the_first_worker() -> None:
    def main(backend: Any) -> list[lt.Report]:
        wrong = lt.check_adjoint(COMPLEX, backend, adjoint=COMPLEX.T)
        return [*check_programs.checked(backend, COMPLEX), wrong]

    for *right, wrong in linop.launch(main, workers=3):
        assert all(right)
        assert not wrong


@needs_mpi
@pytest.mark.parametrize("ranks", [2, 3])
def test_programs_of_ranks_pass(ranks: int) -> None:
    in_job(ranks, check_programs.on_ranks, 3)
    in_job(ranks, check_programs.plans_and_matrices)


@needs_mpi
@settings(max_examples=15)
@given(ranks=st.integers(1, 3), seed=st.integers(0, 2**16))
def test_any_wrong_entry_is_named_under_mpi(ranks: int, seed: int) -> None:
    in_job(ranks, check_programs.any_wrong_entry, seed)


@needs_mpi
@pytest.mark.parametrize("fault", [*check_programs.FAULTS, "raises"])
def test_a_fault_of_one_rank_is_reported_by_all(fault: str) -> None:
    with pytest.raises(FailedExampleError) as failed:
        in_job(2, check_programs.on_ranks, 3, fault)
    words = check_programs.FAULTS.get(fault, "ValueError: planted")
    assert words in str(failed.value)
    both = ("ranks 0, 1 failed", "rank 0 failed, rank 1 failed")
    assert str(failed.value).splitlines()[0].endswith(both)


@needs_mpi
@pytest.mark.skipif(find_spec("pylops_mpi") is None, reason="PyLops-MPI is not installed")
def test_pylops_mpi() -> None:
    in_job(2, check_programs.pylops_mpi)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for package, make in (("torch", lt.torch_function), ("pylops_mpi", lt.pylops_mpi_operator)):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(MissingExtraError, match=f"{make.__name__} needs .*: pip install"):
            make(None, 3)
