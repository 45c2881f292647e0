"""Sums of integers wrap around wherever they are made: MPI's own may not."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.job_programs import mpiexec
from support.requirements import needs_mpi

pytestmark = [needs_mpi, pytest.mark.timeout(120)]

PROGRAM = """
from mpi4py import MPI

comm = MPI.COMM_WORLD
backend = linop.backends.get("mpi", windows=False, collectives=True, wait_limit=20)
for dtype in ("int8", "uint8", "int16", "uint16", "int32", "uint64", ">i4"):
    ends = np.iinfo(dtype)
    for size in (1, 16, 33, 5000):
        X = TensorSpace((size,), Partition((comm.size,)), dtype, axes=(COPIES,))
        rows = np.random.default_rng(size).integers(
            ends.min, ends.max, (comm.size, size), ends.dtype.newbyteorder("="), endpoint=True
        ).astype(dtype)
        y = linop.all_reduce(X).compile(backend)(rows[comm.rank])
        assert (y == rows.sum(axis=0, dtype=y.dtype.type)).all(), (dtype, size)
"""


@pytest.mark.parametrize("ranks", [2, 4])
def test_sums_of_integers_wrap_around(ranks: int, tmp_path: Path) -> None:
    job = mpiexec(ranks, tmp_path / "program.py", PROGRAM)
    assert job.returncode == 0, job.stderr
