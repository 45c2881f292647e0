"""Tests in every form that ``@linop.testing.spmd`` has: `test_spmd_pytest` runs this by pytest, on
ranks, on threads, and under ``mpiexec``. It is not collected by itself."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import linop
from linop.backends import Backend, in_mpi_job
from support.contracts.plans import total

FEW = settings(max_examples=12, database=None)
SIZES = st.integers(0, 5)


@dataclasses.dataclass(frozen=True)
class Description:
    """Of this module: the ranks find its class."""

    size: int


@linop.testing.spmd(workers=2)
def test_once(backend: Backend) -> None:
    assert backend.workers == 2
    assert linop.backends.current() is backend
    plan = total(2).compile(backend)
    assert plan(np.ones(5)).tolist() == [2] * 5


@linop.testing.spmd(workers=2)
def test_anywhere() -> None:
    assert linop.backends.current().workers == 2


@linop.testing.spmd(workers=(2, 1))
def test_on_each(backend: Backend) -> None:
    assert backend.workers in (1, 2)


@linop.testing.spmd(workers=range(1, 3))
@FEW
@given(n=SIZES)
def test_outside(backend: Backend, n: int) -> None:
    assert total(backend.workers or 1, n).compile(backend)(np.ones(n)).shape == (n,)


@FEW
@given(n=SIZES)
@example(n=5)
@linop.testing.spmd(workers=(1, 2, 4))
def test_inside(n: int, backend: Backend) -> None:
    assert backend.workers in (1, 2)


@FEW
@linop.testing.spmd(workers=st.integers(1, 2))
@example(5)
@given(SIZES)
def test_a_strategy_of_workers(n: int) -> None:
    assert linop.backends.current().workers in (1, 2)


@linop.testing.spmd(workers=st.integers(1, 2))
def test_a_strategy_alone(backend: Backend) -> None:
    assert backend.workers in (1, 2)


@pytest.mark.parametrize("description", [Description(2), Description(3)])
@linop.testing.spmd(workers=2)
def test_parameters_and_fixtures(
    tmp_path: Path, backend: Backend, description: Description
) -> None:
    assert description.size in (2, 3)
    (tmp_path / str(backend.worker)).write_text("")
    assert tmp_path.is_dir()


@FEW
@given(n=SIZES)
@linop.testing.spmd(workers=2)
def test_assumes(n: int) -> None:
    assume(n != 1)


@linop.testing.spmd(workers=2)
def test_skips() -> None:
    pytest.skip("all of them")


@linop.testing.spmd(workers=2)
def test_wants_a_communicator(comm: Any, backend: Backend) -> None:
    assert comm.allgather(backend.worker) == [0, 1]


@linop.testing.spmd(workers=4)
def test_on_four() -> None:
    pass


@linop.testing.spmd(workers=2, backend="threads")
def test_on_threads(backend: Backend) -> None:
    assert backend.name == "threads"


def test_mpi_is_started_under_mpiexec_alone() -> None:
    assert in_mpi_job() or "mpi4py.MPI" not in sys.modules


FAILS = pytest.mark.skipif("LINOP_TEST_FAILS" not in os.environ, reason="meant to fail")


@FAILS
@FEW
@given(n=SIZES)
@linop.testing.spmd(workers=(1, 2))
def test_fails(backend: Backend, n: int) -> None:
    assert not faulty(backend, n), "planted"


@FAILS
@linop.testing.spmd(workers=range(1, 3))
@FEW
@given(n=SIZES)
def test_fails_outside(backend: Backend, n: int) -> None:
    assert not faulty(backend, n), "planted"


def faulty(backend: Backend, n: int) -> bool:
    """True on the last worker, from two workers and size 3 on."""
    assert backend.worker is not None and backend.workers is not None
    return n >= 3 and backend.workers >= 2 and backend.worker == backend.workers - 1
