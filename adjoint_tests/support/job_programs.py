"""Programs, as texts, on ranks: under an ``mpiexec`` of their own, or in a job that runs one after
the other, since starting ranks takes longer than most programs do."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import linop
from linop.backends.mpi import mpirun
from linop.backends.together import builds
from support.workers import in_job

HOME = Path(linop.__file__).parents[1]
"""Folder of linop: site-packages, or a checkout, which the program has to be told of."""
ENVIRONMENT = {} if HOME.name == "site-packages" else {"PYTHONPATH": str(HOME)}
PATIENCE = 60.0
"""Seconds until a program that does not end is killed."""

HEAD = """
import os, sys, time
import numpy as np
import linop
from linop import COPIES, Partition, TensorSpace

def total(workers):
    return linop.all_reduce(TensorSpace((3,), Partition((workers,)), axes=(COPIES,)))

def say(words, file=1):
    # Lines of several ranks are mixed up where they are not written at once.
    os.write(file, f"{words}\\n".encode())

def doomed():
    say(f"failed at {time.time()}", 2)

def fail():
    doomed()
    raise ValueError("planted")
"""


def other_sources(folder: Path) -> None:
    """Put a copy of linop in a folder, of the same version, that pickles other control messages."""
    for package in builds.folders():
        shutil.copytree(package, folder / package.relative_to(HOME), dirs_exist_ok=True)
    found = next(folder.rglob("control_channel.py"))
    text = found.read_text()
    found.write_text(text.replace("((self.epoch, item))", "((item, self.epoch))"))
    assert found.read_text() != text


def mpiexec(
    ranks: int, program: Path, text: str, patience: float = PATIENCE, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run the text, after `HEAD`, as a program on so many ranks.

    Args:
        program: the file that it is written to.
        patience: seconds until it is killed.
        env: environment variables of the ranks.
    """
    program.write_text(HEAD + text)
    arguments = [sys.executable, str(program)]
    return mpirun.mpiexec(ranks, arguments, timeout=patience, env=ENVIRONMENT | env)


def run_text(comm: Any, head: str, text: str) -> None:
    """Run a program on a rank of a job. It finds its communicator, which is its own, as `comm`."""
    exec(compile(head + text, "<program>", "exec"), {"comm": comm, "__name__": "program"})


PLANS = """
from linop.errors import BackendError, LinopError
from mpi4py import MPI

def large(workers, size=40_000):
    return linop.all_reduce(TensorSpace((size,), Partition((workers,)), axes=(COPIES,)))

def spread(workers, size=40_000, root=0):
    return linop.broadcast(TensorSpace((size,), Partition((1,), [root])), Partition((workers,)))

def raised(call):
    try:
        call()
    except LinopError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("an error expected")

comm = globals().get("comm", MPI.COMM_WORLD)
me, n = comm.rank, comm.size
"""
"""After `HEAD`: operators, and this rank of COMM_WORLD, or of the job's communicator."""


def runs(ranks: int, program: Path, text: str) -> list[str]:
    """Output of a program that ends well."""
    job = mpiexec(ranks, program, PLANS + text)
    assert job.returncode == 0, job.stderr
    return sorted(job.stdout.splitlines())


def runs_beside_others(ranks: int, text: str) -> None:
    """Run a program in the job that other programs run in, too."""
    in_job(ranks, run_text, HEAD + PLANS, text)
