"""The stand-in for Python is to others what its fork is."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from support import preloaded

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="no servers but on Linux")


def ran(code: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [*preloaded.python(), "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def test_arguments_folder_environment_and_output(tmp_path: Path) -> None:
    code = "import os, sys; print(sys.argv, os.getcwd(), os.environ['MINE']); os.write(2, b'1\\n')"
    done = ran(code, "a", "b c", cwd=tmp_path, env=os.environ | {"MINE": "here"})
    assert done.stdout.split("\n")[0] == f"['-c', 'a', 'b c'] {tmp_path} here"
    assert done.stderr == "1\n" and done.returncode == 0


def test_modules_are_there_before_the_program() -> None:
    assert ran("import sys; print('scipy.sparse' in sys.modules)").stdout == "True\n"


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("import sys; sys.exit(7)", 7),
        ("raise ValueError('planted')", 1),
        ("import os; os._exit(3)", 3),
        ("import os; os.abort()", -signal.SIGABRT),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
    ],
)
def test_statuses(code: str, status: int) -> None:
    assert ran(code).returncode == status


def test_what_is_registered_at_exit_runs() -> None:
    assert ran("import atexit; atexit.register(print, 'end')").stdout == "end\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGABRT, signal.SIGKILL])
def test_signals_end_the_fork(number: int) -> None:
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(100)"
    command = [*preloaded.python(), "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        process = Path(f"/proc/{job.stdout.readline().strip()}")
        assert process.exists() and process.name != str(job.pid)
        job.send_signal(number)
        assert job.wait() == -number
        late = time.monotonic() + 60
        while process.exists() and time.monotonic() < late:
            time.sleep(0.01)
        assert not process.exists()


@pytest.mark.parametrize("number", range(preloaded.SERVERS))
def test_clients_that_are_killed_end_no_server(number: int) -> None:
    """At any time, as before they have heard the number of their fork."""
    of_it = os.environ | {"RANK": str(number)}
    parent = "import os; print(open(f'/proc/{os.getppid()}/cmdline').read())"
    assert "server.py" in ran(parent, env=of_it).stdout
    path = str(Path(preloaded.python()[-1]) / str(number))
    order = repr((["-c", "pass"], dict(of_it), os.getcwd())).encode()
    with open(os.devnull, "r+b") as file:
        for _ in range(20):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
                link.connect(path)
                socket.send_fds(link, [order], [file.fileno()] * 3)
    assert "server.py" in ran(parent, env=of_it).stdout


def test_another_hash_seed_is_of_another_python() -> None:
    done = ran("import sys; print(hash('a'))", env=os.environ | {"PYTHONHASHSEED": "11"})
    plain = subprocess.run(
        [sys.executable, "-c", "print(hash('a'))"],
        env=os.environ | {"PYTHONHASHSEED": "11"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == plain.stdout


def fails_on_one(rank: int, folder: str) -> None:
    (Path(folder) / str(rank)).touch()
    if rank == 1:
        raise ValueError("planted")
    time.sleep(1000)


def test_a_function_that_fails_on_one_ends_all(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"status: \{1: 1\}"):
        preloaded.spawn(fails_on_one, (str(tmp_path),), 2)
    assert (tmp_path / "1").exists()
