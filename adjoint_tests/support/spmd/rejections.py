"""More faults for `support.spmd.faults`: properties that reject examples, or skip. Ranks import the
module of a property before its watch begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import assume

from support.spmd.faults import fault, faulty

if TYPE_CHECKING:
    from mpi4py import MPI


@fault("rank 0 passed", "rank 1 rejected the example")
def assumes_on_one_rank(comm: MPI.Comm, size: int) -> None:
    assume(not faulty(comm, size))


@fault("rank 0 passed", "rank 1 skipped the test", "planted")
def skips_on_one_rank(comm: MPI.Comm, size: int) -> None:
    if faulty(comm, size):
        pytest.skip("planted")


@fault("filter", minimum=None, sizes=10**6)
def rejects_everything(size: int) -> None:
    """Hypothesis's own health check fails."""
    assume(size < 0)
