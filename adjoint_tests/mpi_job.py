"""Property tests over MPI, the parent's side: jobs that take one example after the other.

Hypothesis runs in pytest's own process. A `Job` is an ``mpiexec`` of workers (`mpi_worker`) that
lives on between examples; every rank has its own socket to the parent, so that a rank can report
while others are stuck, and an idle rank sleeps. A rank that fails, dies, or does not answer in time
is always the same failure, `FailedExampleError`: a fault that shows as the one or the other by
chance would be two faults to Hypothesis. The next example then starts a new job.
"""

from __future__ import annotations

import atexit
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from linop.backends import mpirun
from mpi_worker import READY, Failed, Passed

WORKER = Path(__file__).with_name("mpi_worker.py")
START = 60.0
"""Seconds in which a job has to start, and to import the module of a check."""
HURRY = 5.0
"""The watch after an example was stuck for all of the first: shrinking it would take for ever."""

Check = Callable[..., None]
"""Called on every rank as ``check(comm, *arguments)``; a function of a module."""
Answer = Passed | Failed | None
"""None: the rank's process has ended."""


class FailedExampleError(AssertionError):
    """Some rank failed, died, or was stuck; the message has the words and the stacks of all."""


class Job:
    """An MPI job that runs examples.

    Args:
        ranks: how many.
        watch: seconds in which an example has to end.
        grace: seconds that are left once a rank has failed: the others may wait for it for ever.
    """

    def __init__(self, ranks: int, watch: float = 30.0, grace: float = 1.0) -> None:
        self.ranks = ranks
        self.watch = watch
        self.grace = grace
        self._running: Ranks | None = None

    def run(self, check: Check, *arguments: Any) -> None:
        """Run ``check(comm, *arguments)`` on every rank, on a communicator of its own.

        Raises:
            FailedExampleError: not every rank returned from it in time.
        """
        if self._running is None:
            self._running = Ranks(self.ranks)
        answers = self._running.ask(check, arguments, self.watch, self.grace)
        if all(isinstance(answer, Passed) for answer in answers.values()) and self._all(answers):
            return
        report = self._report(answers)
        raise FailedExampleError(report)

    def close(self) -> None:
        """End the job; the next example starts another."""
        if self._running is not None:
            self._running.end()
            self._running = None

    def _all(self, answers: dict[int, Answer]) -> bool:
        return len(answers) == self.ranks

    def _report(self, answers: dict[int, Answer]) -> str:
        assert self._running is not None
        running = self._running
        if not any(isinstance(answer, Failed) or answer is None for answer in answers.values()):
            self.watch = min(self.watch, HURRY)
        words = [self._words(rank, answers) for rank in range(self.ranks)]
        clean = self._all(answers) and all(a is not None and a.clean for a in answers.values())
        if not clean:
            # A receive may be left behind whose buffer is gone: nothing can run there any more.
            running.stop()
            words += running.stacks()
        words.append(running.output())
        if not clean:
            self.close()
        return "\n".join([f"failed on a job of {self.ranks} ranks", *filter(None, words)])

    def _words(self, rank: int, answers: dict[int, Answer]) -> str:
        if rank not in answers:
            return f"--- rank {rank} was stuck"
        answer = answers[rank]
        if answer is None:
            return f"--- rank {rank} died"
        return f"--- rank {rank} " + (f"failed: {answer.text}" if answer.text else "passed")
