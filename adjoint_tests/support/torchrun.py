"""Persistent jobs of ``torchrun`` that run one contract after the other: starting one takes
seconds. `support.torchrun_rank` is the program of their ranks.

A job in which a contract failed, or did not return, is ended; the next one starts another.
"""

from __future__ import annotations

import atexit
import contextlib
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from hypothesis import Phase, given, settings

from linop.backends.mpi import mpirun
from support import preloaded
from support.contracts.torchrun import Cases
from support.draws import FEW, seeded
from support.job_programs import ENVIRONMENT
from support.operators.catalogue import NAMES, build, describe

START = 100.0
"""Seconds in which a job has to start."""
WATCH = 75.0
"""Seconds in which a contract has to return."""
EACH = FEW
"""Operators of each factory."""
COUNTS = 1, 2, 3, 4
"""Numbers of workers."""


@cache
def drawn() -> dict[int, Cases]:
    """Operators of every factory, by number of workers."""
    found: dict[int, Cases] = {count: [] for count in COUNTS}

    def some(name: str) -> None:
        @settings(max_examples=EACH, database=None, phases=[Phase.generate])
        @given(description=describe(name))
        def draw(description: Any) -> None:
            workers = max(build(name, description).stages.workers, default=0) + 1
            if workers in found:
                found[workers].append((name, description, len(found[workers])))

        seeded(draw)
        draw()

    for name in NAMES:
        some(name)
    return found


class TorchJob(mpirun.Job):
    """A running job of torchrun."""

    @staticmethod
    def command(workers: int, arguments: Sequence[str]) -> list[str]:
        run = [*preloaded.python(), "-m", "torch.distributed.run", "--nproc-per-node", str(workers)]
        return [*run, "--standalone", "--no-python", *arguments]


def torchrun(ranks: int, program: Path, text: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the text as a program on so many ranks to its end, which has to come within `WATCH`."""
    program.write_text(text)
    pipe = subprocess.PIPE
    arguments = [sys.executable, "-u", str(program)]
    with TorchJob(ranks, arguments, env=ENVIRONMENT | env, stdout=pipe, stderr=pipe) as job:
        try:
            out, err = job.communicate(timeout=WATCH)
        finally:
            job.end()
    return subprocess.CompletedProcess(job.args, job.returncode, out, err)


class Processes:
    """The processes of a job, and connections to them."""

    def __init__(self, count: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="linop-")
        folder = Path(self._folder.name)
        self._output = folder / "output"
        with (
            Listener(str(folder / "socket")) as listener,
            self._output.open("wb") as output,
        ):
            script = str(Path(__file__).with_name("torchrun_rank.py"))
            arguments = [*preloaded.python(), script, str(folder / "socket")]
            self._job = TorchJob(
                count, arguments, env=ENVIRONMENT, stdout=output, stderr=subprocess.STDOUT
            )
            links = [self._accepted(listener) for _ in range(count)]
        self._links: dict[int, Connection] = {link.recv(): link for link in links}
        self.used = time.monotonic()
        """Time of the last contract."""
        for link in links:
            link.send(sys.path)

    def _accepted(self, listener: Any) -> Connection:
        listener._listener._socket.settimeout(0.2)
        late = time.monotonic() + START
        while self._job.poll() is None and time.monotonic() < late:
            with contextlib.suppress(TimeoutError):
                link: Connection = listener.accept()
                return link
        self._job.end()
        raise AssertionError(f"a job does not start:\n{self._output.read_text()}")

    def run(self, data: bytes, watch: float) -> None:
        """Run a pickled contract on all ranks.

        Raises:
            AssertionError: a rank raised, died, or did not return in time; with its traceback.
        """
        end = time.monotonic() + watch
        said = {}
        for link in self._links.values():
            link.send_bytes(data)
        for rank, link in sorted(self._links.items()):
            try:
                came = link.poll(max(0.0, end - time.monotonic()))
                answer = link.recv() if came else f"no end after {watch:g} s"
            except (EOFError, OSError):
                answer = "the process has ended"
            if answer is not None:
                said[rank] = answer
        if said:
            text = "".join(f"rank {rank}: {words}\n" for rank, words in said.items())
            raise AssertionError(text + self._output.read_text(errors="replace")[-4000:])

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._job.wait(5)
        self._job.end(0)
        self._folder.cleanup()


_RUNNING: dict[int, Processes] = {}


def on_torchrun(
    workers: int,
    contract: Callable[..., None],
    *arguments: Any,
    watch: float = WATCH,
    new: bool = False,
    **options: Any,
) -> None:
    """Run a contract on processes of a job of torchrun: on all of 2 or 4 processes, or on the first
    1 or 3 of 4, which are a group.

    Args:
        watch: timeout in seconds.
        new: its backend has not run another contract.
        options: of the backend ``torch``, which is the current one meanwhile.
    """
    _close_at_exit()
    count = 2 if workers == 2 else 4
    if count not in _RUNNING:
        _RUNNING[count] = Processes(count)
    try:
        _RUNNING[count].run(pickle.dumps((contract, workers, arguments, options, new)), watch)
    except BaseException:
        _RUNNING.pop(count).close()
        raise
    _RUNNING[count].used = time.monotonic()


def close_idle(seconds: float) -> None:
    """Close the jobs that have run nothing for so long."""
    for count, one in list(_RUNNING.items()):
        if time.monotonic() - one.used >= seconds:
            _RUNNING.pop(count).close()


@cache
def _close_at_exit() -> None:
    atexit.register(close_idle, 0.0)
