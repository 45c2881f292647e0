"""Tests that hang: `test_spmd_pytest` runs each by pytest, and wants it to end."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import linop
from linop.backends import Backend

FEW = settings(max_examples=12, database=None)
SIZES = st.integers(0, 5)


def began() -> None:
    """Say when the part begins that hangs."""
    Path(os.environ["LINOP_TEST_BEGAN"]).write_text(str(time.time()))


def loop_in_c() -> None:
    """Without giving the interpreter to any other thread."""
    began()
    re.match(r"(a+)+$", "a" * 64 + "b")


@FEW
@given(n=SIZES)
@linop.testing.spmd(workers=(1, 2), timeout=1.5)
def test_rank_0_waits_for_one_that_failed(comm: Any, n: int) -> None:
    if n >= 3 and comm.size >= 2:
        began()
        if comm.rank == 1:
            raise ValueError("planted")
        comm.Recv(bytearray(1), 1)


@linop.testing.spmd(workers=(1, 2), timeout=1.5)
def test_all_wait(comm: Any) -> None:
    if comm.size >= 2:
        began()
        comm.Recv(bytearray(1), 1 - comm.rank)


@linop.testing.spmd(workers=2, timeout=1.5)
def test_rank_0_loops_in_c(backend: Backend) -> None:
    if backend.worker == 0:
        loop_in_c()


@FEW
@given(n=SIZES)
@linop.testing.spmd(workers=(1, 2), timeout=1.5)
def test_rank_1_loops_in_c(backend: Backend, n: int) -> None:
    if n >= 3 and backend.worker == 1:
        loop_in_c()


@pytest.mark.timeout(1.5)
@linop.testing.spmd(workers=2)
def test_pytest_is_less_patient(backend: Backend) -> None:
    began()
    while backend.worker == 1:
        time.sleep(0.1)


@linop.testing.spmd(workers=2, timeout=1.5)
def test_rank_1_loops_in_python(backend: Backend) -> None:
    while backend.worker == 1:
        time.sleep(0.1)
