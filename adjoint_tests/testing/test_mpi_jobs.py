"""Jobs that take one example after the other: they live on, and nothing is left of them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import find, settings

from linop.backends.mpi import mpirun
from linop.testing.describing import Description
from linop.testing.workers import jobs
from linop.testing.workers.jobs import FailedExampleError, PersistentJob
from support.contracts import mpi as mpi_contracts
from support.contracts import mpi_operators
from support.operators.catalogue import build, describe
from support.requirements import needs_mpi
from support.spmd import library_faults

pytestmark = [
    needs_mpi,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are looked for in /proc"),
]


@pytest.fixture(scope="module")
def job() -> Iterator[PersistentJob]:
    """A job of two ranks and little patience."""
    job = PersistentJob(2, watch=2, grace=0.5)
    yield job
    job.close()


def test_a_job_lives_on_after_an_assertion_but_not_after_a_hang(job: PersistentJob) -> None:
    job.run(mpi_contracts.sleeps, 0)
    starts = job.starts
    for _ in range(3):
        with pytest.raises(FailedExampleError) as failed:
            job.run(mpi_contracts.prints_and_fails)
        for rank in range(2):
            assert str(failed.value).count(f"rank {rank} was here") == 1
            assert f"planted on rank {rank}" in str(failed.value)
    job.run(mpi_contracts.sleeps, 0)
    assert job.starts == starts
    with pytest.raises(FailedExampleError, match="ranks 0, 1 were stuck"):
        job.run(mpi_contracts.sleeps, 60)
    job.run(mpi_contracts.sleeps, 0)
    assert job.starts == starts + 1


def test_a_job_that_has_lost_a_rank_is_not_used_again(job: PersistentJob) -> None:
    for _ in range(2):
        with pytest.raises(FailedExampleError, match="rank 1 died"):
            job.run(mpi_contracts.dies_on_rank_1)
        job.run(mpi_contracts.sleeps, 0)


def test_jobs_without_work_end() -> None:
    """Their memory is others'; the next example starts them again."""
    shared = jobs.job(2)
    shared.run(mpi_contracts.sleeps, 0)
    folder = shared.folder
    jobs.close_idle(60.0)
    assert jobs.job(2) is shared and shared.folder == folder
    jobs.close_idle(0.0)
    assert not folder.exists() and not processes(folder)
    jobs.job(2).run(mpi_contracts.sleeps, 0)
    assert jobs.job(2).folder != folder


def test_an_answer_that_comes_after_an_interruption_is_for_nobody(job: PersistentJob) -> None:
    """As by pytest's own timeout, which raises in the middle of an example."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(KeyboardInterrupt):
            job.run(mpi_contracts.sleeps, 1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    with pytest.raises(FailedExampleError, match="planted"):
        job.run(mpi_contracts.prints_and_fails)


def test_failed_examples_use_up_a_job(job: PersistentJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their communicators cannot be freed."""
    monkeypatch.setattr(jobs, "SPENT", 2)
    job.close()
    starts = job.starts
    for _ in range(3):
        with pytest.raises(FailedExampleError, match="planted"):
            job.run(mpi_contracts.prints_and_fails)
    assert job.starts == starts + 2


def test_a_job_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs.sys, "executable", "/nowhere/python")
    with pytest.raises(RuntimeError, match=r"(?s)an MPI job does not start: .*/nowhere/python"):
        PersistentJob(2).run(mpi_contracts.sleeps, 0)


@pytest.fixture(scope="module")
def shift() -> Description:
    """A small shift with messages."""
    return find(
        describe("shift", 2),
        lambda description: build("shift", description).cost().messages > 0,
        settings=settings(max_examples=2000, database=None, derandomize=True),
    )


@pytest.mark.parametrize("failures", [2, 3])
def test_a_launcher_that_fails_by_chance_is_started_again(
    monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    right, calls = mpirun.Job.command, list[int]()

    def command(workers: int, arguments: Sequence[str]) -> list[str]:
        calls.append(workers)
        if len(calls) > failures:
            return right(workers, arguments)
        return ["sh", "-c", f'echo "{mpirun._UNSTARTED}"; exit 1']

    monkeypatch.setattr(mpirun.Job, "command", staticmethod(command))
    own = PersistentJob(2)
    try:
        with pytest.raises(RuntimeError) if failures == mpirun.STARTS else contextlib.nullcontext():
            own.run(mpi_contracts.sleeps, 0)
    finally:
        own.close()
    assert len(calls) == 3


@pytest.mark.parametrize("what", library_faults.BREAKS)
def test_the_check_of_operators_can_fail(what: str, shift: Description, job: PersistentJob) -> None:
    job.run(mpi_operators.operator, "shift", shift, 0)
    with pytest.raises(FailedExampleError, match="in operator\n"):
        job.run(library_faults.broken, what, "shift", shift)


def test_idle_ranks_take_no_time(job: PersistentJob) -> None:
    job.run(mpi_contracts.missing_worker)
    ranks = processes(job.folder)
    before = sum(map(ticks, ranks))
    time.sleep(2)
    assert sum(map(ticks, ranks)) - before < 0.5 * os.sysconf("SC_CLK_TCK")


def test_nothing_is_left_of_a_closed_job() -> None:
    job = PersistentJob(2)
    job.run(mpi_contracts.sleeps, 0)
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
        from support.contracts import mpi as mpi_contracts
        from linop.testing.workers import jobs
        job = jobs.PersistentJob(2)
        job.run(mpi_contracts.sleeps, 0)
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


def test_a_temporary_folder_with_a_long_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of a socket may have 107 bytes; that of the folder that it is in, any."""
    folder = tmp_path / ("x" * 150)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    ranks = jobs.RankConnections(2)
    try:
        ranks.meet()
        assert sorted(ranks.links) == [0, 1]
    finally:
        ranks.close()
