"""pytest's reports of properties across workers: alone, under ``mpiexec``, and on threads."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from linop.backends.mpi import mpirun
from linop.testing import plugin
from support.requirements import needs_mpi

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "adjoint_tests/support/spmd"
FORMS, HANGS = str(PROGRAMS / "forms.py"), str(PROGRAMS / "hangs.py")

TWO = "--linop-workers=2"
WAYS = {
    "alone": (0, [TWO], "13 passed, 2 skipped", "ranks"),
    "mpiexec": (2, [], "13 passed, 2 skipped", "ranks"),
    "threads": (0, [TWO, "--linop-backend=threads"], "12 passed, 3 skipped", "threads"),
}
"""Number of ranks of pytest, its options, what it says at last, and what workers are."""


def pytest_says(ranks: int, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """pytest in another process, or on so many ranks."""
    command = ["-m", "pytest", "-p", "no:cacheprovider", "--color=no", *arguments]
    command = [sys.executable, *command]
    # In CI, pytest's short summary has whole messages: they would be counted twice.
    here = {name: value for name, value in os.environ.items() if name not in ("CI", "BUILD_NUMBER")}
    return subprocess.run(
        mpirun.command(ranks, command) if ranks else command,
        cwd=ROOT,
        env=mpirun.DEFAULTS | here | env,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


@pytest.mark.parametrize(
    "way", [pytest.param(w, marks=needs_mpi) if w != "threads" else w for w in WAYS]
)
def test_all_forms(way: str) -> None:
    """A failure is reported once, with its ranks and example; and tests that ran are counted."""
    ranks, options, ended, workers = WAYS[way]
    said = pytest_says(ranks, FORMS, *options, LINOP_TEST_FAILS="1")
    assert f"2 failed, {ended}" in said.stdout, said.stdout + said.stderr
    assert said.returncode == 1
    for name in ("test_fails", "test_fails_outside"):
        report = f"{name}(n=3) failed on 2 {workers}: rank 0 passed, rank 1 failed\n--- rank 1 "
        assert said.stdout.count(report) == 1, said.stdout
        assert said.stdout.count(f"{name}(\n    n=3,\n)\nworkers=2\n") == 1
    assert said.stdout.count("AssertionError: planted") == 2
    assert "examples on threads: " in said.stdout
    assert ("examples on mpi: " in said.stdout) == (workers == "ranks")
    assert "left out: test_inside on 4, test_on_four on 4" in said.stdout
    assert "it runs on 4 workers, and there are 2" in said.stdout
    if workers == "threads":
        assert "1 tests skipped: it wants an MPI communicator, and runs on threads" in said.stdout


def test_the_marker_selects_them() -> None:
    said = pytest_says(0, FORMS, "--collect-only", "-qq", "-m", "not linop_spmd")
    assert "forms.py: 1" in said.stdout, said.stdout


HANG = {
    "test_rank_0_waits_for_one_that_failed": ["rank 1 failed", "ValueError: planted", "on rank 0"],
    "test_all_wait": ["test_all_wait() on rank 0 of 2", "test_all_wait() on rank 1 of 2"],
    "test_rank_0_loops_in_c": ["in loop_in_c", "test_rank_0_loops_in_c() on rank 0 of 2"],
    "test_pytest_is_less_patient": ["the job is ended: test_pytest_is_less_patient() was interr"],
    "test_rank_1_loops_in_c": ["rank 0 passed, rank 1 was stuck", "in loop_in_c", "on rank 1 of 2"],
}
"""Last words of ranks."""


@needs_mpi
@pytest.mark.parametrize("name", HANG)
def test_under_mpiexec_a_hang_ends_the_job(name: str, tmp_path: Path) -> None:
    file = tmp_path / "began"
    said = pytest_says(2, HANGS, "-k", name, LINOP_TEST_BEGAN=str(file))
    took = time.time() - float(file.read_text())
    for words in HANG[name]:
        assert words in said.stdout + said.stderr, said.stdout + said.stderr
    assert said.returncode != 0
    assert took < 1.5 + 5


def test_on_threads_what_hangs_is_left_behind() -> None:
    said = pytest_says(0, HANGS, "--linop-backend=threads", "-k", "loops_in_python")
    assert "failed on 2 threads: rank 0 passed, rank 1 was stuck" in said.stdout, said.stdout
    assert "in test_rank_1_loops_in_python\n    time.sleep(0.1)" in said.stdout
    assert "those that are stuck stay until this process ends" in said.stdout


def test_on_threads_a_loop_in_c_ends_the_process(tmp_path: Path) -> None:
    file = tmp_path / "began"
    threads = ("--linop-backend=threads", "-k", "rank_0_loops_in_c")
    said = pytest_says(0, HANGS, *threads, LINOP_TEST_BEGAN=str(file))
    assert time.time() - float(file.read_text()) < 1.5 + 5
    assert said.returncode != 0
    assert "in loop_in_c" in said.stderr and "in test_rank_0_loops_in_c()" in said.stderr


@needs_mpi
def test_ranks_that_collect_different_tests_are_told() -> None:
    program = f"""if True:
        import os, pytest
        rank = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK"))
        which = "test_once" if rank == "0" else "test_on"
        raise SystemExit(pytest.main([{FORMS!r}, "-k", which, "-p", "no:cacheprovider"]))
    """
    said = mpirun.mpiexec(2, [sys.executable, "-c", program], timeout=100)
    assert "the ranks of this job have collected different tests" in said.stdout + said.stderr
    assert said.returncode != 0


@pytest.mark.parametrize("option, value", [("workers", 0), ("backend", "gpu"), ("timeout", -1.0)])
def test_options_are_checked(option: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("workers", "backend", "timeout"):
        monkeypatch.setattr(plugin.OPTIONS, name, None)
    config: Any = SimpleNamespace(getoption={f"--linop-{option}": value}.get)
    with pytest.raises(pytest.UsageError, match=f"--linop-{option}: expected .*, given {value!r}"):
        plugin.take_options(config)


def test_the_environment_has_options_too() -> None:
    said = pytest_says(0, HANGS, "--collect-only", LINOP_SPMD_BACKEND="gpu")
    assert "LINOP_SPMD_BACKEND: expected mpi or threads, given 'gpu'" in said.stderr


def test_the_plugin_is_light() -> None:
    slow = "{'hypothesis', 'mpi4py', 'torch'} & {*sys.modules}"
    program = ["-c", f"import sys, linop.testing.plugin; print({slow})"]
    said = subprocess.run([sys.executable, *program], capture_output=True, text=True, check=False)
    assert said.stdout.strip() == "set()", said.stderr
