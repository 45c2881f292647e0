"""Programs that use linop in part, or that a rank has started: what linop leaves as it was, and
which failures still end the job."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from linop.backends.mpi import mpirun
from support.job_programs import mpiexec
from support.requirements import needs_mpi

pytestmark = [needs_mpi, pytest.mark.timeout(200)]

HOOKS = "sys.excepthook, threading.excepthook, sys.exit, SystemExit"


@pytest.mark.parametrize("imports_mpi", [False, True])
def test_nothing_is_replaced_before_the_first_backend(imports_mpi: bool, program: Path) -> None:
    text = f"""
import subprocess, threading
before = eval(os.environ["HOOKS"])
assert sys.excepthook is sys.__excepthook__
{"from mpi4py import MPI" if imports_mpi else ""}
linop.broadcast(TensorSpace((3,), Partition((1,))), Partition((2,))).to_matrix()
assert eval(os.environ["HOOKS"]) == before
linop.backends.get("mpi")
assert sys.excepthook is not before[0] and threading.excepthook is not before[1]
say("done")
"""
    job = mpiexec(2, program, text, HOOKS=HOOKS)
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("done") == 2


@pytest.mark.parametrize(
    ("hook", "waits"),
    [
        ("", "MPI.COMM_WORLD.Barrier()"),
        ("sys.excepthook = lambda *error: say('my hook', 2)", "linop.backends.get('mpi')"),
    ],
)
def test_a_rank_that_dies_before_its_first_backend(hook: str, waits: str, program: Path) -> None:
    text = f"""
from mpi4py import MPI
{hook}
if MPI.COMM_WORLD.rank == 1:
    fail()
{waits}
time.sleep(100)
"""
    job = mpiexec(2, program, text)
    assert job.returncode != 0
    assert ("my hook" if hook else "ValueError: planted") in job.stderr
    assert "linop: worker 1 ends the job" in job.stderr


HANDLED = """
from mpi4py import MPI
import code, traceback
def caught():
    try:
        fail()
    except ValueError as error:  # as test runners do, and debuggers
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
{}
MPI.COMM_WORLD.Barrier()
say("done")
"""


@pytest.mark.parametrize(
    "handles",
    [
        "caught()",
        "code.InteractiveConsole().runcode('1/0')",
        "code.InteractiveConsole(dict(vars())).runsource('fail()')",
    ],
)
def test_an_exception_that_a_program_has_handled_ends_nothing(handles: str, program: Path) -> None:
    job = mpiexec(2, program, HANDLED.format(handles))
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("done") == 2


def test_test_runs_under_mpiexec_are_not_ended(tmp_path: Path) -> None:
    """pytest keeps the exception of a failure that a test expects."""
    from support.job_programs import ENVIRONMENT

    tests = tmp_path / "test_theirs.py"
    tests.write_text(
        "import pytest\nfrom mpi4py import MPI\n\n"
        "@pytest.mark.xfail\ndef test_fails():\n    assert MPI.COMM_WORLD.size < 2\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)]
    job = mpirun.mpiexec(2, command, timeout=100, env=ENVIRONMENT)
    assert job.returncode == 0, job.stdout + job.stderr


@pytest.mark.parametrize("how", ["file", "module", "text"])
def test_programs_of_every_kind_that_die(
    how: str, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from support.job_programs import ENVIRONMENT

    text = (
        "import linop\nfrom mpi4py import MPI\n"
        "MPI.COMM_WORLD.rank or 1 / 0\nMPI.COMM_WORLD.Barrier()\n"
    )
    program.write_text(text)
    ways = {"file": [program.name], "module": ["-m", program.stem], "text": ["-c", text]}
    env = {**ENVIRONMENT, "PYTHONPATH": str(program.parent)}
    command = [sys.executable, *ways[how]]
    monkeypatch.chdir(program.parent)
    job = mpirun.mpiexec(2, command, timeout=100, env=env)
    assert job.returncode != 0
    assert "linop: worker 0 ends the job" in job.stderr


CHILD = """
import subprocess, sys
import linop, numpy as np
from linop import COPIES, Partition, TensorSpace

def main(backend):
    n = backend.workers
    op = linop.all_reduce(TensorSpace((3,), Partition((n,)), axes=(COPIES,)))
    return n, op.compile(backend)(np.ones(3)).tolist()

print("alone:", linop.launch(main))
try:
    print(linop.launch(main, backend=sys.argv[1]))
except linop.LinopError as error:
    print("refused:", error)
"""


@pytest.mark.parametrize("through", ["", "sh -c"])
def test_a_program_that_a_rank_starts(through: str, program: Path) -> None:
    child = program.with_name("child.py")
    child.write_text(CHILD)
    text = f"""
import subprocess
plan = total(2).compile(linop.backends.get("mpi"))
command = [sys.executable, {str(child)!r}, "mpi"]
if {through!r}:
    command = [*{through.split()!r}, " ".join(command) + "; true"]
said = subprocess.run(command, capture_output=True, text=True, timeout=50)
assert "alone: [(1, [1.0, 1.0, 1.0])]" in said.stdout, said
assert "refused: a rank of an MPI job" in said.stdout, said
assert plan(np.ones(3)).tolist() == [2, 2, 2]
"""
    job = mpiexec(2, program, text)
    assert job.returncode == 0, job.stderr


def test_a_script_between_launcher_and_rank(program: Path) -> None:
    """It has the launcher's variables too; what it starts is a rank."""
    from support.job_programs import ENVIRONMENT, HEAD

    program.write_text(HEAD + "assert linop.launch(lambda b: b.workers).count(2) == 1\n")
    wrapper = program.with_name("wrapper.py")
    wrapper.write_text(
        "import subprocess, sys, linop\n"
        f"sys.exit(subprocess.run([sys.executable, {str(program)!r}]).returncode)\n"
    )
    job = mpirun.mpiexec(2, [sys.executable, str(wrapper)], timeout=60, env=ENVIRONMENT)
    assert job.returncode == 0, job.stderr


@pytest.mark.parametrize(
    ("setting", "variables", "words"),
    [
        ("", {"MPI4PY_RC_INITIALIZE": "0"}, "MPI has not been started"),
        ("import mpi4py; mpi4py.rc.initialize = False", {}, "MPI has not been started"),
        ("from mpi4py import MPI; MPI.Finalize()", {}, "MPI has been finalized"),
    ],
)
def test_mpi_that_does_not_run(
    setting: str, variables: dict[str, str], words: str, program: Path
) -> None:
    text = f"""
{setting}
for start in (linop.launch, lambda main: linop.backends.get("mpi")):
    try:
        start(lambda backend: None)
    except linop.errors.BackendError as error:
        say(error)
from mpi4py import MPI
if not MPI.Is_initialized():
    MPI.Init_thread()
    assert linop.launch(lambda b: b.workers).count(2) == 1
    MPI.Finalize()
"""
    job = mpiexec(2, program, text, **variables)
    assert job.returncode == 0, job.stderr
    assert job.stdout.count(words) == 4, job.stdout


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_a_program_that_a_process_of_torchrun_starts(tmp_path: Path) -> None:
    from support.job_programs import HEAD
    from support.torchrun import torchrun

    child = tmp_path / "child.py"
    child.write_text(CHILD)
    text = f"""
import subprocess
linop.launch(lambda backend: None)
said = subprocess.run(
    [sys.executable, {str(child)!r}, "torch"], capture_output=True, text=True, timeout=50
)
assert "alone: [(1, [1.0, 1.0, 1.0])]" in said.stdout, said
assert "refused: a process of torch.distributed" in said.stdout, said
"""
    job = torchrun(2, tmp_path / "program.py", HEAD + text)
    assert job.returncode == 0, job.stderr
