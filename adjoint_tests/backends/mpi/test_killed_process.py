"""Processes of torch.distributed without torchrun: one that is killed holds up no other one."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from support.job_programs import ENVIRONMENT, HEAD

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

pytestmark = pytest.mark.timeout(200)
PROGRAM = """
import signal
from linop.errors import LinopError
backend = linop.backends.get("torch")
plan = total(backend.workers).compile(backend)
plan(np.ones(3))
plan.H(np.ones(3))
odd = backend.workers - 1
if backend.worker == odd:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    WAITS
except LinopError as error:
    say(type(error).__name__)
if backend.worker == 0:
    time.sleep(LATE)
elif LATE == 0:
    time.sleep(15)  # and worker 0 keeps the control channel for it
say(f"worker {backend.worker} ends")
"""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.mark.parametrize(("workers", "late"), [(3, 0)])
def test_worker_0_ends(workers: int, late: int, tmp_path: Path) -> None:
    """Long before the limit of 600 s, and not before another one that lives."""
    text = PROGRAM.replace("WAITS", "plan(np.ones(3))").replace("LATE", str(late))
    first, *others = ended(workers, tmp_path / "program.py", text, -signal.SIGKILL)
    assert "worker 0 ends" in first[0], first
    for out, err in others[:-1]:
        assert "ends" in out, err
        assert "has ended" not in err, err


CONTROL = """
import signal
from linop.errors import LinopError
def place(name):
    if name == PLACE and backend.worker == KILLED:
        time.sleep(1)  # others have begun to wait
        os.kill(os.getpid(), signal.SIGKILL)
def main(given):
    global backend
    backend = given
    place("compile")
    plan = total(backend.workers).compile(backend)
    place("first call")
    plan(np.ones(3))
    place("end")
try:
    linop.launch(main)
except LinopError as error:
    say(error)
"""


@pytest.mark.parametrize("place", ["compile", "first call", "end"])
def test_control_waits_for_it_end(place: str, tmp_path: Path) -> None:
    """No connection of gloo's tells of it there."""
    text = CONTROL.replace("PLACE", repr(place)).replace("KILLED", "1")
    for out, err in ended(3, tmp_path / "program.py", text, 0)[::2]:
        assert "worker 1 has ended" in out, out + err


def ended(workers: int, program: Path, text: str, last: int) -> list[tuple[str, str]]:
    """Output and errors of the processes of a program, which end.

    Args:
        last: status of the last one. Worker 0's is 0.
    """
    program.write_text(HEAD + text)
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    jobs = [
        subprocess.Popen(
            [sys.executable, str(program)],
            env=os.environ
            | ENVIRONMENT
            | common
            | {"PYTHONFAULTHANDLER": "1"}
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(workers)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(workers)
    ]
    try:
        said = [job.communicate(timeout=120) for job in [*jobs[1:], jobs[0]]]
    except subprocess.TimeoutExpired:
        running = [job for job in jobs if job.poll() is None]
        for job in running:
            job.send_signal(signal.SIGABRT)
        stacks = {jobs.index(job): job.communicate(timeout=30)[1] for job in running}
        pytest.fail("\n".join(f"worker {w} was stuck:\n{text}" for w, text in stacks.items()))
    finally:
        for job in jobs:
            with contextlib.suppress(ProcessLookupError):
                job.kill()
    assert jobs[-1].returncode == last
    assert jobs[0].returncode == 0, said[-1]
    return [said[-1], *said[:-1]]
