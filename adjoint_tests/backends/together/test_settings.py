"""Settings: their values, the table of them, and that all ranks have the same; and what starts a
program."""

from __future__ import annotations

import ast
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import linop
from linop import backends
from linop.backends import Backend
from linop.backends.mpi import mpirun
from linop.backends.together import settings
from linop.backends.together.settings import SETTINGS, Found
from linop.errors import ArgumentError, BackendError
from support.contracts import settings as settings_contracts
from support.job_programs import ENVIRONMENT
from support.requirements import needs_mpi, needs_torch
from support.workers import in_job

ROOT = Path(__file__).parents[3]
VALID: dict[str, list[tuple[str, Any]]] = {
    "windows": [("0", False), ("1", True)],
    "wait_limit": [("0.5", 0.5), ("inf", float("inf"))],
    "debug": [("0", False), ("1", True)],
    "collectives": [("0", False), ("1", True)],
    "sums": [("fixed", "fixed"), ("any", "any")],
    "way": [("auto", "auto"), ("aware", "aware"), ("staged", "staged"), ("nccl", "nccl")],
    "--linop-workers": [("3", 3)],
    "--linop-backend": [("mpi", "mpi"), ("threads", "threads")],
    "--linop-timeout": [("2.5", 2.5)],
    "LINOP_LOAD_BYTES": [("1", 1), ("100000000000", 10**11)],
    "LINOP_LOAD_DEPTH": [("7", 7)],
    "LINOP_LOAD_TIME": [("2.5", 2.5), ("inf", math.inf)],
}


@pytest.mark.parametrize("one", SETTINGS, ids=lambda one: one.variable)
def test_variables_hold_where_no_argument_is_given(
    one: settings.Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(one.variable, raising=False)
    assert one.found().checked() == one.default
    for text, value in VALID[one.name]:
        monkeypatch.setenv(one.variable, text)
        assert one.found() == Found(value, f"{one.variable}={text}")
        for _, other in VALID[one.name]:
            assert one.found(other) == Found(other, f"{one.name}={other!r}")
    for text in ("no such", "-1", "nan", "2e400j"):
        monkeypatch.setenv(one.variable, text)
        with pytest.raises(ArgumentError) as wrong:
            one.found().checked()
        assert str(wrong.value) == f"{one.variable}: expected {one.expected}, given {text!r}"
    monkeypatch.setenv(one.variable, "")
    assert one.found().checked() == one.default
    with pytest.raises(ArgumentError, match=f"^{one.name}: expected"):
        one.found([]).checked()


def test_the_documentation_has_the_table() -> None:
    lines = (ROOT / "docs" / "settings.md").read_text().splitlines()
    assert [line for line in lines if line.startswith("|")] == settings.table()


def test_no_other_module_reads_a_variable() -> None:
    """Nor is there a variable that is not in the table."""
    known, found = {one.variable for one in SETTINGS}, {}
    for folder in ("linop", "backends", "layers"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and str(node.value).startswith("LINOP_"):
                    found.setdefault(str(node.value), set()).add(path.name)
    marks = {"LINOP_JOB"}  # of processes, and nothing that users set
    assert {name: where for name, where in found.items() if name not in marks} == {
        name: {"settings.py"} for name in known
    }


def test_differences_say_who_has_what() -> None:
    plain = settings.found("mpi", debug=None, sums=None)
    debug = settings.found("mpi", debug=True, sums=None)
    assert settings.alike([plain, settings.found("mpi", debug=False, sums="fixed")]) == {
        "backend": "mpi",
        "debug": False,
        "sums": "fixed",
    }
    with pytest.raises(BackendError) as differ:
        settings.alike([plain, debug, plain, plain, plain])
    assert str(differ.value).startswith(
        "workers have different settings: debug=False by default on workers 0, 2–4 and debug=True "
        "on worker 1. Give all workers the same, as arguments or"
    )
    with pytest.raises(
        ArgumentError, match=r"(?m)^worker 1: sums: expected fixed, any, exact or tree, given 3$"
    ):
        settings.alike([plain, settings.found("mpi", sums=3, debug=True)])


# On ranks


@needs_mpi
@pytest.mark.parametrize(
    "contract",
    [
        settings_contracts.differences_are_errors,
        settings_contracts.wrong_values_are_told,
        settings_contracts.equal_values_need_not_be_said_alike,
        settings_contracts.other_backends_are_told,
        settings_contracts.other_sources_are_told,
    ],
)
def test_all_ranks_have_the_same_settings(contract: Any) -> None:
    for ranks in (1, 3) if contract is settings_contracts.wrong_values_are_told else (2, 3):
        in_job(ranks, contract)


OSC = """
import os
from mpi4py import MPI
import linop
backend = linop.backends.get("mpi")
assert backend._pool is not None
os.write(1, (os.environ["OMPI_MCA_osc"] + "\\n").encode())  # at once: lines of ranks mix
"""


@needs_mpi
@pytest.mark.parametrize("given", [None, "^ucx,rdma"])
def test_users_of_open_mpi_see_no_error_of_a_component(given: str | None, tmp_path: Path) -> None:
    """Though mpi4py was imported first, and no variable is set; one that is set stays."""
    program = tmp_path / "program.py"
    program.write_text(OSC)
    environment = mpirun.DEFAULTS | os.environ | ENVIRONMENT
    environment.pop("OMPI_MCA_osc", None)
    if given is not None:
        environment["OMPI_MCA_osc"] = given
    done = subprocess.run(
        mpirun.command(2, [sys.executable, str(program)]),
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [given or "^ucx"] * 2
    assert "osc" not in done.stderr.lower(), done.stderr


# What starts a program


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
MPIEXEC = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_RANK", "PMIX_RANK", "MPI_LOCALNRANKS")


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment of a process that torchrun has started."""
    for name in MPIEXEC:
        monkeypatch.delenv(name, raising=False)
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def never(backend: Backend) -> None:
    raise AssertionError("this has run")


@pytest.mark.parametrize("backend", ["mpi", "cupy"])
@pytest.mark.parametrize("workers", [None, 2])
def test_mpi_under_torchrun_is_refused(
    backend: str, workers: int | None, torchrun: pytest.MonkeyPatch
) -> None:
    words = (
        r"^launch: this is one of several processes of torch\.distributed "
        rf"\(TORCHELASTIC_RUN_ID=none, RANK=1, WORLD_SIZE=2\), which backend '{backend}' cannot "
    )
    with pytest.raises(BackendError, match=words):
        linop.launch(never, workers, backend=backend)
    torchrun.delenv("TORCHELASTIC_RUN_ID")
    with pytest.raises(BackendError, match=r"distributed \(RANK=1, WORLD_SIZE=2\)"):
        linop.launch(never, workers, backend=backend)


@needs_torch
@pytest.mark.parametrize("backend", [None, "torch"])
def test_a_process_group_needs_torchruns_variables(
    backend: str | None, torchrun: pytest.MonkeyPatch
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        torchrun.delenv(name, raising=False)
    words = r"needs a process group: start .* torchrun, .*not set: MASTER_ADDR, MASTER_PORT"
    with pytest.raises(BackendError, match=words):
        linop.launch(never, backend=backend)


def test_what_is_no_job_of_torchrun_runs(torchrun: pytest.MonkeyPatch) -> None:
    """One process; or threads that are asked for; or variables of something else."""
    assert linop.launch(lambda backend: backend.worker, 2, backend="threads") == [0, 1]
    for size in ("1", "", "many"):
        torchrun.setenv("WORLD_SIZE", size)
        assert linop.launch(lambda backend: backend.worker, 2) == [0, 1]
    torchrun.setenv("WORLD_SIZE", "2")
    torchrun.delenv("RANK")
    torchrun.delenv("TORCHELASTIC_RUN_ID")
    assert linop.launch(lambda backend: backend.worker, 2) == [0, 1]


@needs_mpi
def test_torchruns_variables_under_mpiexec_are_no_matter(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import linop\nlinop.launch(lambda b: print(b.workers))\n")
    command = [sys.executable, str(program)]
    env = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE")}
    done = mpirun.mpiexec(2, command, timeout=60, env=ENVIRONMENT | env)
    assert done.stdout.split() == ["2", "2"], done.stderr


def test_torchrun_may_be_started_by_an_mpiexec(torchrun: pytest.MonkeyPatch) -> None:
    """Or by ``srun --mpi=pmix``, whose variables its processes inherit."""
    assert backends.in_torch_job()
    for name in MPIEXEC:
        torchrun.setenv(name, "1")
    assert backends.in_torch_job() and not backends.in_mpi_job()
    torchrun.delenv("TORCHELASTIC_RUN_ID")
    assert backends.in_mpi_job() and not backends.in_torch_job()


def test_tasks_of_slurm_without_mpi_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless one worker is asked for, or threads are; one task, or a shell of Slurm's, is no
    matter."""
    for name in (*MPIEXEC, *TORCHRUN):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert linop.launch(lambda backend: backend.workers) == [1]
    monkeypatch.setenv("SLURM_PROCID", "0")
    with pytest.raises(
        BackendError, match=r"^launch: srun started 4 tasks without MPI: each would "
    ):
        linop.launch(never)
    with pytest.raises(
        BackendError, match=r"the whole program, on 4 threads\. .* backend='threads', workers=4"
    ):
        linop.launch(never, 4)
    assert linop.launch(lambda backend: backend.workers, 1) == [1]
    assert linop.launch(lambda backend: backend.workers, 2, "threads") == [2, 2]
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert linop.launch(lambda backend: backend.workers, 2) == [2, 2]
    assert linop.launch(lambda backend: backend.workers) == [1]


@needs_mpi
def test_processes_that_mpi_does_not_join_are_refused(program: Path) -> None:
    """As under ``srun --mpi=pmi2`` with Open MPI, here with a variable alone."""
    text = "import linop\nlinop.launch(lambda b: print(b.workers))\n"
    program.write_text(text)
    command = [
        sys.executable,
        "-c",
        f"import os; from mpi4py import MPI; "
        f"os.environ['PMI_SIZE'] = '4'; exec(open({str(program)!r}).read())",
    ]
    done = mpirun.mpiexec(1, command, timeout=60, env=ENVIRONMENT)
    assert "launch: 4 processes were started, and this MPI library finds one" in done.stderr
    assert done.returncode != 0
