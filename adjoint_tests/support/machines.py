"""Two "machines" on this one, made of namespaces, and programs on ranks of both.

`LINOP_MACHINES` names the folder of the scripts that make them, ``up.sh``, ``on.sh``, ``agent.sh``
and ``down.sh``; they need the right to make namespaces.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from linop.backends.mpi import mpirun
from support.job_programs import ENVIRONMENT, HEAD, PATIENCE

NAMES = "node1", "node2"
TESTS = str(Path(__file__).parents[1])
"""Folder of the package `support`, for the ranks' path."""


class TorchJob(mpirun.Job):
    """torchrun on one of the machines, named in the arguments: ``on.sh NAME PYTHON PROGRAM``."""

    @staticmethod
    def command(workers: int, arguments: Sequence[str]) -> list[str]:
        on, name, python, *program = arguments
        where = ["--nnodes", str(len(NAMES)), "--node-rank", str(NAMES.index(name))]
        where += ["--master-addr", NAMES[0], "--nproc-per-node", str(workers)]
        return [on, name, python, "-m", "torch.distributed.run", *where, *program]


class Machines:
    """Two machines.

    Args:
        scripts: folder of the scripts.
        state: folder of what they write.
    """

    def __init__(self, scripts: Path, state: Path) -> None:
        self.state = state
        self._scripts = scripts
        self._agent = str(scripts / "agent.sh")
        self._env = mpirun.DEFAULTS | os.environ | ENVIRONMENT
        path = os.pathsep.join([TESTS, *filter(None, [ENVIRONMENT.get("PYTHONPATH")])])
        self._env |= {
            "LINOP_NODES": str(state),
            "PYTHONPATH": path,
            "HYDRA_LAUNCHER": "ssh",
            "HYDRA_LAUNCHER_EXEC": self._agent,
            # MPICH's UCX warns of messages that a job with an error did not receive.
            "UCX_LOG_LEVEL": "error",
        }

    def script(self, name: str, *arguments: str) -> str:
        """Run a script; its output.

        Raises:
            CalledProcessError: it failed.
        """
        command = [str(self._scripts / name), *arguments]
        done = subprocess.run(
            command, env=self._env, capture_output=True, text=True, timeout=PATIENCE, check=True
        )
        return done.stdout

    @staticmethod
    def library() -> str:
        """The MPI library of this Python's ``mpiexec``."""
        mpiexec = [mpirun.command(1, [])[0], "--version"]
        said = subprocess.run(mpiexec, capture_output=True, text=True, check=True)
        return "MPICH" if "HYDRA" in said.stdout else "Open MPI"

    def command(self, each: int, arguments: list[str]) -> list[str]:
        """Command that runs a program on `each` ranks of both machines, by this Python's MPI."""
        mpiexec, _, _, *program = mpirun.command(1, arguments)
        on = [str(self._scripts / "on.sh"), NAMES[0], mpiexec]
        hosts, ranks = ",".join(f"{name}:{each}" for name in NAMES), ["-n", str(2 * each)]
        if self.library() == "MPICH":
            return [*on, "-hosts", hosts, *ranks, *program]
        how = ["--prtemca", "plm_ssh_agent", self._agent, "--bind-to", "none", "-H", hosts]
        return [*on, *how, "--map-by", f"ppr:{each}:node:oversubscribe", *ranks, *program]

    def run(
        self, each: int, program: Path, text: str, other: str = "", **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Run the text, after `HEAD`, on `each` ranks of both machines.

        Args:
            other: variables of the second machine only, as a shell has them: ``A=1 B=2``.
        """
        program.write_text(HEAD + text)
        differ = f'[ "$(hostname)" = {NAMES[1]} ] && export {other}; exec "$0" "$@"'
        shell = ["sh", "-c", differ] if other else []
        command = self.command(each, [*shell, sys.executable, str(program)])
        return subprocess.run(
            command,
            env=self._env | env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE * 3,
            check=False,
        )

    def start(
        self, each: int, arguments: list[str], output: IO[str], **env: str
    ) -> subprocess.Popen[str]:
        """Start a program on `each` ranks of both machines."""
        return subprocess.Popen(
            self.command(each, arguments),
            env=self._env | env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def torchrun(
        self, each: int, program: Path, text: str, **env: str
    ) -> list[subprocess.CompletedProcess[str]]:
        """Run the text, after `HEAD`, on `each` processes of both machines, by a torchrun on each;
        what became of the two."""
        program.write_text(HEAD + text)
        pipe = subprocess.PIPE
        with ExitStack() as stack:
            jobs = []
            for name in NAMES:
                command = [str(self._scripts / "on.sh"), name, sys.executable, str(program)]
                job = TorchJob(each, command, env=self._env | env, stdout=pipe, stderr=pipe)
                stack.callback(job.end)
                jobs.append(job)
            said = [job.communicate(timeout=PATIENCE * 2) for job in jobs]
        return [
            subprocess.CompletedProcess(job.args, job.returncode, *texts)
            for job, texts in zip(jobs, said, strict=True)
        ]

    def shared_files(self) -> list[str]:
        """Files of linop in the shared memory of both. MPICH leaves its own where it aborts."""
        each = [self.script("on.sh", name, "ls", "/dev/shm").split() for name in NAMES]
        return [file for files in each for file in files if file.startswith("linop-")]


def missing_machines() -> str:
    """Why there can be no machines; empty if they can be tried."""
    if "LINOP_MACHINES" not in os.environ:
        return "LINOP_MACHINES names no folder with the scripts that make machines"
    absent = [tool for tool in ("unshare", "nsenter", "ip") if shutil.which(tool) is None]
    return f"no {', '.join(absent)} here" if absent else ""


@contextmanager
def two_machines(state: Path) -> Iterator[Machines]:
    """Context with two machines.

    Raises:
        CalledProcessError: namespaces are forbidden here.
    """
    machines = Machines(Path(os.environ["LINOP_MACHINES"]), state)
    try:
        machines.script("up.sh", "2")
        machines.script("on.sh", NAMES[0], "ls", "/dev/shm")
        machines.script("on.sh", NAMES[1], "ls", "/dev/shm")
        yield machines
    finally:
        machines.script("down.sh")
