"""MPI jobs of benchmarks: their start, and the rows that they print."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.harness.task import MARK, Task
from linop.backends.jobs import mpirun

ROOT = Path(__file__).resolve().parents[2]
JOB_SECONDS = 1200.0
console = Console(width=None if sys.stdout.isatty() else 200)


def run_job(ranks: int, task: Task, counter: Path | None) -> Iterator[dict[str, Any]]:
    """Run a job; the rows that its rank 0 prints, as they arrive.

    Args:
        counter: library of `benchmarks.harness.counting` to preload, or None.

    Raises:
        RuntimeError: the job failed; with the end of its stderr.
    """
    env = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    env |= {"OMP_NUM_THREADS": "1"} | ({"LD_PRELOAD": str(counter)} if counter else {})
    with (
        tempfile.TemporaryFile("w+") as said,
        mpirun.Job(ranks, task.command(), env=env, stdout=subprocess.PIPE, stderr=said) as job,
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


def printed(ranks: int, script: str, *arguments: object) -> str:
    """Output of a script that ranks run, in which rank 0 prints.

    Raises:
        SystemExit: the job failed; with its stderr.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, script, *map(str, arguments)]
    job = mpirun.mpiexec(ranks, command, timeout=JOB_SECONDS, env=env)
    if job.returncode:
        raise SystemExit(job.stderr)
    return job.stdout
