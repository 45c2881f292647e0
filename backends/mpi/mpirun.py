"""Start MPI jobs on this machine, and end them with all processes they started.

For ``linop verify --backend mpi``, ``linop demo`` and the tests. This module does not import MPI;
`linop.backends.mpi.backend` runs inside a job.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from linop.errors import BackendError, MissingExtraError

DEFAULTS = {
    # Open MPI: as root (in containers), and with more ranks than cores. Other MPIs ignore these.
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    # All ranks are on this machine: looking for a network costs a second at every start.
    "OMPI_MCA_btl": "^ofi",
    # Nor is UCX there, whose component prints an error when a window is made.
    "OMPI_MCA_osc": "^ucx",
    # Jobs that run side by side would be bound to the same first cores.
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    # A rank that is aborted, by MPI or by `end`, prints where it was.
    "PYTHONFAULTHANDLER": "1",
}
_RANK = {b"PMIX_RANK", b"PMI_RANK", b"LOCAL_RANK"}
"""Variables that only ranks have: of MPI's launchers, and of torchrun."""
STARTS = 3
"""Starts of a job whose launcher fails."""
_UNSTARTED = "The PMIx server's listener thread failed to start"
"""Open MPI's error where its launcher fails by chance, before any rank exists: once in about a
thousand starts on a loaded machine."""


def by_chance(said: str) -> bool:
    """True if a launcher that said this failed by chance, before it started a rank."""
    return _UNSTARTED in said


def command(workers: int, arguments: Sequence[str]) -> list[str]:
    """Command line that runs a program on a number of ranks, with the ``mpiexec`` beside this
    Python, which fits its mpi4py, else the one on the PATH.

    Raises:
        MissingExtraError: there is none.
    """
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("mpiexec")
    if found is None:
        raise MissingExtraError(
            "no mpiexec beside Python or on the PATH; it comes with an MPI library: "
            "pip install 'linop-algebra[mpi]'"
        )
    return [found, "-n", str(workers), *arguments]


class Job(subprocess.Popen[str]):
    """A running MPI job; options as for `subprocess.Popen`, but `env` is added to this process's
    environment.

    Attributes:
        command: command line of a program on a number of ranks.
    """

    command = staticmethod(command)

    def __init__(
        self,
        workers: int,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        # Under MPICH every rank leads a session of its own: neither a process group nor a session
        # holds them all, so they are found by this.
        mark = {"LINOP_JOB": uuid.uuid4().hex}
        self._mark = b"LINOP_JOB=" + mark["LINOP_JOB"].encode()
        super().__init__(
            self.command(workers, arguments),
            env=DEFAULTS | os.environ | dict(env or {}) | mark,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches this process only, which then ends the job
            text=True,
            **options,
        )

    def end(self, grace: float = 5) -> None:
        """Kill all processes of the job. Ranks that still run are aborted, so that their stacks are
        written to stderr; mpiexec has `grace` seconds to forward these."""
        if self.poll() is None:
            ranks = [process for process, is_rank in self._processes() if is_rank]
            for process in ranks:
                _kill(process, signal.SIGABRT)
            if not ranks:
                self.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.wait(grace)
        while left := self._processes():
            for process, _ in left:
                _kill(process, signal.SIGKILL)
            time.sleep(0.01)
        self.kill()
        self.wait()

    def _processes(self) -> list[tuple[int, bool]]:
        """Running processes of the job, mpiexec included, each with True if it is a rank; empty
        without /proc."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # another user's, or just ended
                variables = (folder / "environ").read_bytes().split(b"\0")
                if self._mark in variables:
                    names = {variable.partition(b"=")[0] for variable in variables}
                    found.append((int(folder.name), not _RANK.isdisjoint(names)))
        return found


def mpiexec(
    workers: int,
    arguments: Sequence[str],
    *,
    timeout: float,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program on a number of ranks to its end; returns status and output. A launcher that
    fails by chance, before it starts a rank, is started again.

    Args:
        workers: number of ranks.
        arguments: the program and its arguments.
        timeout: in seconds.
        env: variables added to this process's environment.

    Raises:
        MissingExtraError: there is no ``mpiexec``.
        BackendError: the timeout expired. The job is killed; the message has its output so far and
            the stacks of its ranks.
    """
    for _ in range(STARTS):
        done = _run(workers, arguments, timeout, env)
        if not (done.returncode and by_chance(done.stderr)):
            break
    return done


def _run(
    workers: int, arguments: Sequence[str], timeout: float, env: Mapping[str, str] | None
) -> subprocess.CompletedProcess[str]:
    pipe = subprocess.PIPE
    with Job(workers, arguments, env=env, stdout=pipe, stderr=pipe) as job:
        try:
            out, err = job.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            job.end()
            said = "\n".join(job.communicate()).strip() or "nothing"
            raise BackendError(
                f"mpiexec -n {workers} {' '.join(arguments)}: no end after {timeout:g} s, killed. "
                f"The job said:\n{said}"
            ) from None
        finally:
            job.end()
    return subprocess.CompletedProcess(job.args, job.returncode, out, err)


def _kill(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)
