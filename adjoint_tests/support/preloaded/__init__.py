"""Processes of Python that have imported already: forks of one process that did it for all.

Importing torch takes seconds of a core, and a job of four ranks did it four times, again after each
pause. `python` is the command line of a stand-in for Python (`client`), which has a waiting process
(`server`) fork, and is to others what the fork is: it passes on environment, files, signals and
exit status. One run of pytest has two servers, of different hash seeds unless PYTHONHASHSEED is
set: ranks of even and odd number do not agree on the order of a set.

Programs that tests run under an mpiexec of their own do not use it: they are about how ranks begin
and end, and one that ends before MPI starts is not noticed by Open MPI if it is a fork.
"""

from __future__ import annotations

import fcntl
import marshal
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from support.preloaded.early import early

SERVERS = 2
_HERE = Path(__file__).parent
_CALL = """
import pickle, sys
with open(sys.argv[1], "rb") as file:
    sys.path[:] = pickle.load(file)
    call, arguments = pickle.load(file)
call(int(sys.argv[2]), *arguments)
"""


def python() -> list[str]:
    """Command line that takes the place of ``python``. Servers are started at the first call.

    It is Python itself under MPICH, and where variables differ that Python reads as it starts.
    """
    if sys.platform != "linux":
        return [sys.executable]
    return [sys.executable, "-I", "-S", str(_HERE / "client.py"), str(_folder())]


def spawn(call: Callable[..., object], arguments: tuple[Any, ...], workers: int) -> None:
    """Run ``call(rank, *arguments)``, which pickle finds by its name, in processes of their own.

    Raises:
        RuntimeError: one of them failed; the others are ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "call"
        data.write_bytes(pickle.dumps(sys.path) + pickle.dumps((call, arguments)))
        command = [*python(), "-c", _CALL, str(data)]
        started = [subprocess.Popen([*command, str(rank)]) for rank in range(workers)]
        try:
            while None in (ended := [one.poll() for one in started]) and not any(ended):
                time.sleep(0.02)
        finally:
            for one in started:
                one.kill()
                one.wait()
        if failed := {rank: status for rank, status in enumerate(ended) if status}:
            raise RuntimeError(f"processes failed, by number with their status: {failed}")


@cache
def _folder() -> Path:
    """The folder of the servers, which all workers of pytest-xdist share."""
    owner = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    folder = Path(tempfile.gettempdir()) / f"linop-{os.getuid()}-{owner}-{_begin(owner)}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} is somebody else's")
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "begun").exists():
            (folder / "environment").write_bytes(marshal.dumps(early(os.environ)))
            for number in range(SERVERS):
                _start(folder, number, owner)
            (folder / "begun").touch()
    return folder


def _start(folder: Path, number: int, owner: int) -> None:
    command = [sys.executable, str(_HERE / "server.py"), str(folder), str(number), str(owner)]
    with (folder / f"output{number}").open("w") as output:
        subprocess.Popen(
            command,
            env=dict(os.environ) | {"PYTHONSAFEPATH": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is pytest's
        )


def _begin(process: int) -> str:
    """Time of its start, in ticks: numbers of processes come again."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
