"""Property tests over MPI, the parent's side: jobs that take one example after the other.

Hypothesis runs in pytest's own process. A `Job` is an ``mpiexec`` of workers (`mpi_worker`) that
lives on between examples. Every rank has a socket to the parent: so a rank can report while others
are stuck, nothing of MPI is needed between examples, and an idle rank sleeps.

A rank that fails, dies, or does not answer in time: all are the one `FailedExampleError`, raised in
one place. To Hypothesis, a fault that shows now as this and now as that would be several.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

from linop.backends import mpirun
from linop.errors import MissingExtraError
from mpi_worker import OUTPUT, SOCKET, Answer

START = 60.0
"""Seconds in which a job has to start, and to import the module of a check."""
HURRY = 5.0
"""The watch, once an example was stuck for all of the first: it is yet to be shrunk."""

MPIEXEC = "mpiexec"
"""File in a job's folder: what is printed there before the ranks have their own."""

Check = Callable[..., None]
"""Called on every rank as ``check(comm, *arguments)``; a function of a module."""
Answers = dict[int, Answer | None]
"""By rank; None is a rank that died, and one that is missing was stuck."""


def _missing() -> str:
    """Why there is no MPI here; empty if there is. It is not started to find out."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed: pip install 'linop-algebra[mpi]'"
    try:
        mpirun.command(1, [])
    except MissingExtraError as error:
        return str(error)
    return ""


needs_mpi = pytest.mark.skipif(bool(_missing()), reason=_missing() or "MPI is there")


class FailedExampleError(AssertionError):
    """Some rank failed, died, or was stuck; the message has the words or the stack of each."""


@cache
def job(ranks: int) -> Job:
    """The one job of so many ranks, which lives until pytest ends."""
    shared = Job(ranks)
    atexit.register(shared.close)
    return shared


class Job:
    """An MPI job that runs examples. The first one starts it, and the next after one that left it
    unusable.

    Args:
        ranks: how many.
        watch: seconds in which an example has to end.
        grace: seconds left to the others once a rank has failed: they may wait for it for ever.
    """

    def __init__(self, ranks: int, watch: float = 30.0, grace: float = 1.0) -> None:
        self.ranks = ranks
        self.watch = watch
        self.grace = grace
        self.starts = 0
        """How often it was started."""
        self._ranks: Ranks | None = None

    def run(self, check: Check, *arguments: Any) -> None:
        """Run ``check(comm, *arguments)`` on every rank, on a communicator of its own.

        Raises:
            FailedExampleError: not every rank returned from it in time.
        """
        if self._ranks is None:
            self.starts += 1
            self._ranks = Ranks(self.ranks)
        answers = self._ranks.ask(check, arguments, self.watch, self.grace)
        if len(answers) == self.ranks and all(map(passed, answers.values())):
            return
        usable = len(answers) == self.ranks and all(a and a.usable for a in answers.values())
        if not usable:
            self._ranks.job.end()
            if all(map(passed, answers.values())):
                self.watch = min(self.watch, HURRY)
        report = self._ranks.report(answers)
        if not usable:
            self.close()
        raise FailedExampleError(report)

    @property
    def folder(self) -> Path:
        """Of the running job; every rank has it in its command line."""
        assert self._ranks is not None, "not running"
        return self._ranks.folder

    def close(self) -> None:
        """End the job and all its processes."""
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None


class Ranks:
    """The ranks of a running job.

    Raises:
        RuntimeError: it does not start; the message has its output.
    """

    def __init__(self, count: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="linop-")
        self.folder = Path(self._folder.name)
        self.links: dict[int, Connection] = {}
        """The connection to each rank."""
        self._read: dict[str, int] = {}
        worker = str(Path(__file__).with_name("mpi_worker.py"))
        arguments = [sys.executable, worker, str(self.folder)]
        # Only this user can enter the folder, and so send a rank what it is going to unpickle.
        with socket.socket(socket.AF_UNIX) as server, (self.folder / MPIEXEC).open("wb") as output:
            server.bind(str(self.folder / SOCKET))
            server.listen(count)
            server.settimeout(0.2)
            self.job = mpirun.Job(count, arguments, stdout=output, stderr=subprocess.STDOUT)
            try:
                self._greet([self._accept(server) for _ in range(count)])
            except (EOFError, OSError) as error:
                self.job.end()
                words = self.printed(MPIEXEC)
                self.close()
                raise RuntimeError(f"an MPI job does not start: {error}\n{words}") from error

    def _accept(self, server: socket.socket) -> Connection:
        late = time.monotonic() + START
        while self.job.poll() is None and time.monotonic() < late:
            with contextlib.suppress(TimeoutError):
                return Connection(server.accept()[0].detach())
        raise OSError("a rank is missing")

    def _greet(self, links: list[Connection]) -> None:
        for link in links:
            link.send(sys.path)
        self.links = {link.recv(): link for link in links}

    def ask(self, check: Check, arguments: tuple[Any, ...], watch: float, grace: float) -> Answers:
        """What every rank says of an example."""
        for link in self.links.values():
            with contextlib.suppress(OSError):  # it died after its last example: `recv` will tell
                link.send((check, arguments))
        imported = self._answers(START, grace)
        if any(answer is None or answer.error for answer in imported.values()):
            return imported
        return self._answers(watch, grace)

    def _answers(self, seconds: float, grace: float) -> Answers:
        """One answer of every rank, as far as they come in time."""
        answers: Answers = {}
        end = time.monotonic() + seconds
        waiting = {link: rank for rank, link in self.links.items()}
        while waiting and (left := end - time.monotonic()) > 0:
            for link in wait(list(waiting), left):
                assert isinstance(link, Connection)
                rank = waiting.pop(link)
                try:
                    answers[rank] = link.recv()
                except (EOFError, OSError):
                    answers[rank] = None
                if not passed(answers[rank]):
                    end = min(end, time.monotonic() + grace)
        return answers

    def report(self, answers: Answers) -> str:
        """What every rank said and printed, or where it was; and what mpiexec says."""
        lines = [f"an example failed on {len(self.links)} ranks"]
        for rank in sorted(self.links):
            answer = answers.get(rank)
            state = "was stuck" if rank not in answers else "died"
            if answer is not None:
                state = "failed" if answer.error else "passed"
            words = answer.error if answer is not None else ""
            printed = self.printed(OUTPUT.format(rank))
            if rank in answers:  # it was idle when the job was ended: where, says nothing
                printed = printed.partition("Fatal Python error: Aborted")[0]
            lines += [f"--- rank {rank} {state}", words, printed]
        lines += ["--- mpiexec", self.printed(MPIEXEC)]
        return "\n".join(line.rstrip() for line in lines if line)

    def printed(self, name: str) -> str:
        """What has come into a file since it was asked for last."""
        with (self.folder / name).open("rb") as file:
            file.seek(self._read.get(name, 0))
            text = file.read().decode(errors="replace")
            self._read[name] = file.tell()
        return re.sub(r"\nExtension modules: .*", "", text)

    def close(self) -> None:
        """End the job: politely, if it still runs."""
        for link in self.links.values():
            with contextlib.suppress(OSError):
                link.send(None)
        if self.job.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.job.wait(5)
        self.job.end()
        for link in self.links.values():
            link.close()
        self._folder.cleanup()


def passed(answer: Answer | None) -> bool:
    """Whether a rank passed."""
    return answer is not None and not answer.error
