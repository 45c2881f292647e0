"""Programs, as texts, on ranks: under an ``mpiexec`` of their own, or in a job that runs one after
the other, since starting ranks takes longer than most programs do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import linop
from linop.backends.jobs import mpirun

HOME = Path(linop.__file__).parents[1]
"""Where linop is: in site-packages, or in a checkout, which the program has to be told of."""
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


def mpiexec(ranks: int, program: Path, text: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the text, after `HEAD`, as a program on so many ranks.

    Args:
        program: the file that it is written to.
        env: environment variables of the ranks.
    """
    program.write_text(HEAD + text)
    arguments = [sys.executable, str(program)]
    return mpirun.mpiexec(ranks, arguments, timeout=PATIENCE, env=ENVIRONMENT | env)


def run_text(comm: Any, head: str, text: str) -> None:
    """Run a program on a rank of a job. It finds its communicator, which is its own, as `comm`."""
    exec(compile(head + text, "<program>", "exec"), {"comm": comm, "__name__": "program"})
