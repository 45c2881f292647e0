"""Faults planted under MPI are found and shrunk, and nothing hangs: tests of `jobs.Job`."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import find, given, settings
from hypothesis import strategies as st

import mpi_breaks
import mpi_checks
import mpi_facts
import mpi_faults
from catalogue import build, describe
from linop.testing.jobs import FailedExampleError, Job
from needs import needs_mpi

pytestmark = [
    needs_mpi,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are looked for in /proc"),
]

Fault = Callable[..., None]
Jobs = dict[int, Job]


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    """Jobs of few ranks and little patience."""
    jobs = {ranks: Job(ranks, watch=2, grace=0.5) for ranks in (1, 2, 3)}
    yield jobs
    for job in jobs.values():
        job.close()


FAULTS = {
    mpi_faults.wrong_adjoint: ["rank 0 failed", "rank 1 failed", "dot-product test on mpi FAILED"],
    mpi_faults.one_rank_asserts: ["rank 0 was stuck", "rank 1 failed", "assert not faulty"],
    mpi_faults.one_rank_raises: ["rank 0 was stuck", "rank 1 failed", "ValueError: planted"],
    mpi_faults.one_rank_skips: ["rank 0 was stuck", "in one_rank_skips", "rank 1 passed"],
    mpi_faults.one_rank_dies: ["rank 1 died"],
}
"""What is said of each."""


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_found_and_shrunk(fault: Fault, jobs: Jobs) -> None:
    last = {}

    @settings(max_examples=20, database=None, derandomize=True)
    @given(ranks=st.integers(1, 3), size=st.integers(0, 5))
    def example(ranks: int, size: int) -> None:
        last.update(ranks=ranks, size=size)
        jobs[ranks].run(fault, size)

    with pytest.raises(FailedExampleError) as failed:
        example()
    assert last == {"ranks": 2, "size": 3}
    for words in FAULTS[fault]:
        assert words in str(failed.value)


def test_a_check_without_fault_passes(jobs: Jobs) -> None:
    for fault in FAULTS:
        jobs[2].run(fault, 2)


def test_a_job_lives_on_after_an_assertion_but_not_after_a_hang(jobs: Jobs) -> None:
    job = jobs[2]
    job.run(mpi_faults.sleeps, 0)
    starts = job.starts
    for _ in range(3):
        with pytest.raises(FailedExampleError) as failed:
            job.run(mpi_faults.prints_and_fails)
        for rank in range(2):
            assert str(failed.value).count(f"rank {rank} was here") == 1
            assert f"planted on rank {rank}" in str(failed.value)
    job.run(mpi_faults.sleeps, 0)
    assert job.starts == starts
    with pytest.raises(FailedExampleError, match="rank 1 was stuck"):
        job.run(mpi_faults.sleeps, 60)
    job.run(mpi_faults.sleeps, 0)
    assert job.starts == starts + 1


@pytest.mark.parametrize("what", mpi_breaks.BREAKS)
def test_the_check_of_operators_can_fail(what: str, jobs: Jobs) -> None:
    shift = find(
        describe("shift", 2),
        lambda description: build("shift", description).cost().messages > 0,
        settings=settings(max_examples=2000, database=None, derandomize=True),
    )
    jobs[2].run(mpi_checks.operator, "shift", shift, 0)
    with pytest.raises(FailedExampleError, match="in operator\n"):
        jobs[2].run(mpi_breaks.broken, what, "shift", shift)


def test_idle_ranks_take_no_time(jobs: Jobs) -> None:
    jobs[2].run(mpi_facts.missing_worker)
    ranks = processes(jobs[2].folder)
    before = sum(map(ticks, ranks))
    time.sleep(2)
    assert sum(map(ticks, ranks)) - before < 0.5 * os.sysconf("SC_CLK_TCK")


def test_nothing_is_left_of_a_closed_job() -> None:
    job = Job(2)
    job.run(mpi_faults.sleeps, 0)
    folder = job.folder
    assert len(processes(folder)) >= 2
    job.close()
    assert not processes(folder)
    assert not folder.exists()


def test_nothing_is_left_when_pytest_is_killed() -> None:
    """The ranks see that their parent is gone."""
    program = f"""if True:
        import os, signal, sys
        sys.path[:0] = {sys.path}
        import mpi_faults
        from linop.testing import jobs
        job = jobs.Job(2)
        job.run(mpi_faults.sleeps, 0)
        print(job.folder, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    killed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    folder = Path(killed.stdout.strip())
    assert folder.is_absolute(), killed.stderr
    end = time.monotonic() + 20
    while processes(folder) and time.monotonic() < end:
        time.sleep(0.1)
    assert not processes(folder)
    shutil.rmtree(folder)


def processes(folder: Path) -> list[Path]:
    """The processes of a job: all have its folder in their command line."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(folder).encode() in (process / "cmdline").read_bytes():
                found.append(process)
    return found


def ticks(process: Path) -> int:
    """The processor time that a process has taken."""
    fields = (process / "stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
