"""MPI jobs of benchmarks: their start, the rows that they print, and tables of these."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.harness.report import markdown_lines
from benchmarks.harness.task import MARK
from linop.backends.mpi import mpirun

ROOT = Path(__file__).resolve().parents[2]
JOB_SECONDS = 1200.0
console = Console(width=None if sys.stdout.isatty() else 200)


def run_job(ranks: int, command: Sequence[str], counter: Path | None = None) -> Iterator[Any]:
    """Run a job; the rows that its rank 0 prints, as they arrive.

    Args:
        command: command line of a rank.
        counter: library of `benchmarks.harness.counting` to preload, or None.

    Raises:
        RuntimeError: the job failed; with the end of its stderr.
    """
    env = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    env |= {"OMP_NUM_THREADS": "1"} | ({"LD_PRELOAD": str(counter)} if counter else {})
    with (
        tempfile.TemporaryFile("w+") as said,
        mpirun.Job(ranks, command, env=env, stdout=subprocess.PIPE, stderr=said) as job,
    ):
        watch = threading.Timer(JOB_SECONDS, job.end)
        watch.start()
        try:
            assert job.stdout is not None
            for line in job.stdout:
                if line.startswith(MARK):
                    yield json.loads(line.removeprefix(MARK))
            status = job.wait()
        finally:
            watch.cancel()
            job.end()
        if status:
            said.seek(0)
            tail = said.read()[-3000:]
            raise RuntimeError(f"the job with {ranks} ranks ended with status {status}:\n{tail}")


Program = Callable[..., Iterator[Any]]
"""Program of a rank, ``program(comm, *arguments)``: all ranks yield rows, those of rank 0 count."""


def rows(ranks: int, program: Program, *arguments: Any) -> Iterator[Any]:
    """Run a function of a benchmark's script in a job; the rows that it yields, as they arrive.

    Args:
        arguments: after the communicator; as JSON has them.

    Raises:
        SystemExit: the job failed; with the end of its stderr.
    """
    path = Path(program.__code__.co_filename).resolve().relative_to(ROOT).with_suffix("")
    of = [".".join(path.parts), program.__name__, json.dumps(arguments)]
    try:
        yield from run_job(ranks, [sys.executable, "-m", "benchmarks.harness.program", *of])
    except RuntimeError as error:
        raise SystemExit(str(error)) from None


def show(ranks: int, header: Sequence[str], program: Program, *arguments: Any) -> None:
    """Run a function of a script in a job, and print its rows as a table in Markdown."""
    for line in markdown_lines(header, rows(ranks, program, *arguments)):
        print(line, flush=True)
