"""Plain programs under ``mpiexec``: how they start, what they print, and how they fail.

One worker's failure ends the whole job within seconds: the others would wait for it for ever.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import linop
from linop.backends.mpi import mpirun
from linop.errors import BackendError
from support.job_programs import ENVIRONMENT, mpiexec
from support.requirements import needs_mpi

pytestmark = [needs_mpi, pytest.mark.timeout(200)]

SOON = 10.0
"""Seconds from a failure to the end of the job; there, MPICH gives other ranks up to 5."""


def ended_soon(job: subprocess.CompletedProcess[str]) -> None:
    """The job ended with a failure, soon after the rank that says so."""
    assert job.returncode != 0
    failed = re.search(r"failed at ([\d.]+)", job.stderr)
    assert failed, job.stderr
    assert time.time() - float(failed[1]) < SOON


FAILS = {
    "before it compiles": """
backend = linop.backends.get("mpi")
if backend.worker == ODD:
    fail()
plan = total(backend.workers).compile(backend)
""",
    "in between calls": """
backend = linop.backends.get("mpi")
plan = total(backend.workers).compile(backend)
plan(np.ones(3))
if backend.worker == ODD:
    fail()
plan(np.ones(3))
""",
    "in launch": """
def main(backend):
    plan = total(backend.workers).compile(backend)
    if backend.worker == ODD:
        fail()
    plan(np.ones(3))

linop.launch(main)
""",
    "in a local operator": """
def main(backend):
    X = TensorSpace((3,), Partition((backend.workers,)), axes=(COPIES,))
    region = X.region(ODD)
    A = linop.local(region, region, lambda x: fail(), lambda y: fail())
    rest = [r for r in X.regions if r is not region]
    op = linop.all_reduce(X) @ linop.direct_sum(A, linop.identity(linop.Space(rest)))
    op.compile(backend)(np.ones(3))

linop.launch(main)
""",
}


@pytest.mark.parametrize(("when", "odd"), list(zip(FAILS, [0, 2, 0, 2], strict=True)))
def test_one_worker_that_raises_ends_the_job(when: str, odd: int, program: Path) -> None:
    job = mpiexec(3, program, f"ODD = {odd}\n" + FAILS[when])
    ended_soon(job)
    assert f"linop: worker {odd} ends the job:" in job.stderr
    assert "ValueError: planted" in job.stderr
    assert re.search(r'program\.py", line \d+, in fail\n', job.stderr)


@pytest.mark.parametrize("windows", ["0", "1"])
def test_a_killed_rank_ends_the_job(windows: str, program: Path) -> None:
    """As the kernel does it where memory is short: without a word to MPI."""
    text = f"""
import signal
os.environ["LINOP_WINDOWS"] = "{windows}"
backend = linop.backends.get("mpi")
plan = total(backend.workers).compile(backend)
plan(np.ones(3))
if backend.worker == 1:
    doomed()
    os.kill(os.getpid(), signal.SIGKILL)
plan(np.ones(3))
"""
    ended_soon(mpiexec(3, program, text))


def test_wait_limit_and_debug_come_from_the_environment(program: Path) -> None:
    text = """
os.environ["LINOP_WAIT_LIMIT"] = "3"
os.environ["LINOP_DEBUG"] = "1"
from linop.errors import DeadlockError, ShapeError
backend = linop.backends.get("mpi")
plan = total(2).compile(backend)
for _ in range(2):
    try:
        plan(np.ones(3 + backend.worker))
    except ShapeError as error:
        assert str(error).startswith("worker 1, argument of <6x6 "), error
    plan(np.ones(3))
try:
    plan(np.ones(3)) if backend.worker else time.sleep(6)
except DeadlockError as error:
    say(error)
"""
    job = mpiexec(2, program, text)
    assert job.returncode == 0, job.stderr
    assert "longer than 3 s" in job.stdout and "worker 1 wait" in job.stdout, job.stdout


@pytest.mark.parametrize(("status", "odd"), [("3", 0), ("'with words'", 1)])
def test_one_worker_that_exits_ends_the_job(status: str, odd: int, program: Path) -> None:
    text = f"""
def main(backend):
    plan = total(backend.workers).compile(backend)
    if backend.worker == {odd}:
        doomed()
        sys.exit({status})
    plan(np.ones(3))

linop.launch(main)
"""
    job = mpiexec(2, program, text)
    ended_soon(job)
    if status == "3":
        assert job.returncode == 3
    else:
        assert "with words" in job.stderr


def test_a_plain_program_may_exit_too(program: Path) -> None:
    text = """
backend = linop.backends.get("mpi")
plan = total(backend.workers).compile(backend)
if backend.worker == 1:
    doomed()
    sys.exit(3)
plan(np.ones(3))
"""
    ended_soon(mpiexec(2, program, text))


def test_all_workers_may_exit_with_a_status(program: Path) -> None:
    job = mpiexec(2, program, "linop.launch(lambda backend: None)\nsys.exit(0)\n")
    assert job.returncode == 0
    assert job.stderr == ""


def test_launch_runs_on_the_ranks(program: Path) -> None:
    text = """
results = linop.launch(lambda backend: (backend.name, backend.worker, backend.workers), workers=4)
say(results)
"""
    job = mpiexec(4, program, text)
    assert job.returncode == 0, job.stderr
    wanted = [
        str([("mpi", rank, 4) if worker == rank else None for worker in range(4)])
        for rank in range(4)
    ]
    assert sorted(job.stdout.splitlines()) == sorted(wanted)


def test_launch_leaves_out_ranks_that_are_too_many(program: Path) -> None:
    text = """
def main(backend):
    plan = total(2).compile(backend)
    return backend.workers, plan(np.ones(3)).tolist()

for _ in range(3):
    results = linop.launch(main, workers=2)
say([r for r in results if r])
"""
    job = mpiexec(3, program, text)
    assert job.returncode == 0, job.stderr
    assert sorted(job.stdout.splitlines()) == ["[(2, [2.0, 2.0, 2.0])]"] * 2 + ["[]"]


def test_launch_with_fewer_ranks_than_workers_is_refused_on_all(program: Path) -> None:
    text = """
from linop.errors import BackendError
try:
    linop.launch(lambda backend: None, workers=4)
except BackendError as error:
    say(error)
"""
    job = mpiexec(2, program, text)
    assert job.returncode == 0, job.stderr
    words = "launch: 4 workers wanted, and the job has 2 ranks; start it with mpiexec -n 4"
    assert job.stdout.splitlines() == [words] * 2


SAME = """
def main(backend):
    X = TensorSpace((5, 7), Partition((2, 2)))
    H = linop.halo_exchange(X, (3, 3), padding=1)
    op = H.H @ H + 0.1 * linop.identity(X)
    plan = op.compile(backend)
    y = backend.vector(op.codomain, op.codomain.random(3).arrays)
    x, *_, cost = linop.solvers.cgls(plan, y, niter=5)
    report = linop.testing.check_adjoint(op, backend)
    arrays = {name: array.tobytes().hex() for name, array in x.arrays.items()}
    say([backend.worker, backend.workers, arrays, cost, report.error])

linop.launch(main, workers=4)
"""


def test_the_same_text_prints_the_same_on_threads_and_ranks(program: Path) -> None:
    ranks = mpiexec(4, program, SAME)
    assert ranks.returncode == 0, ranks.stderr
    alone = [sys.executable, str(program)]
    environment = os.environ | ENVIRONMENT
    threads = subprocess.run(alone, env=environment, capture_output=True, text=True, check=True)
    assert sorted(ranks.stdout.splitlines()) == sorted(threads.stdout.splitlines())
    assert len(threads.stdout.splitlines()) == 4


def test_a_job_that_does_not_end_is_killed_and_shows_its_stacks(program: Path) -> None:
    program.write_text(
        "import time\n\ndef wait():\n    print('here', flush=True)\n    time.sleep(99)\n\nwait()\n"
    )
    with pytest.raises(BackendError, match=r"no end after 3 s, killed") as late:
        mpirun.mpiexec(2, [sys.executable, str(program)], timeout=3)
    assert "here" in str(late.value)
    assert "in wait" in str(late.value)


def test_a_missing_mpiexec_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(linop.errors.MissingExtraError, match=r"pip install 'linop-algebra\[mpi\]'"):
        mpirun.command(2, [])


def test_the_mpiexec_beside_python_comes_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for folder in ("beside", "path"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mpiexec").touch(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "beside" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    command = mpirun.command(3, ["python", "x.py"])
    assert command == [str(tmp_path / "beside" / "mpiexec"), "-n", "3", "python", "x.py"]
    (tmp_path / "beside" / "mpiexec").unlink()
    assert mpirun.command(1, [])[0] == str(tmp_path / "path" / "mpiexec")


def test_a_launcher_that_fails_by_chance_is_started_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launcher = tmp_path / "mpiexec"
    launcher.write_text(
        f"#!/bin/sh\necho start >> {tmp_path}/starts\n"
        f"[ $(wc -l < {tmp_path}/starts) -gt 1 ] && exec echo ran\n"
        'echo "The PMIx server\'s listener thread failed to start. We cannot" >&2\nexit 1\n'
    )
    launcher.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    job = mpirun.mpiexec(2, ["x"], timeout=60)
    assert (job.returncode, job.stdout) == (0, "ran\n")
    assert len((tmp_path / "starts").read_text().split()) == 2
