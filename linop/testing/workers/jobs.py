"""Property tests across ranks, the parent's side: jobs that take one example after the other.

Hypothesis runs in pytest's own process. A `Job` is an ``mpiexec`` of ranks
(`linop.testing.workers.rank`) that lives on between examples. Every rank has a socket to the
parent: so a rank can report while others are stuck, nothing of MPI is needed between examples, and
an idle rank sleeps.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import pickle
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

from linop.backends.jobs import mpirun
from linop.errors import MissingExtraError
from linop.testing.workers.outcome import Answers, FailedExampleError, Outcome
from linop.testing.workers.rank import FINISH, OUTPUT, Answer, socket_in

__all__ = ["FailedExampleError", "Job", "job", "missing_mpi"]

WATCH = 30.0
"""Seconds in which an example has to end, where nobody says otherwise."""
HURRY = 5.0
"""The same, once an example was stuck for all of that: it is yet to be shrunk."""
GRACE = 1.0
"""Seconds left to the others once a rank has failed: they may wait for it for ever."""
START = 60.0
"""Seconds in which a job has to start, and to import the module of a check."""
ENDING = 3.0
"""Seconds in which the ranks of a lost job may print their stacks, before they are killed."""
SPENT = 200
"""Failed examples after which a job is started anew: their communicators are never freed."""

MPIEXEC = "mpiexec"
"""File in a job's folder: what is printed there before the ranks have their own."""
_HEAD, _TAIL = 4_000, 12_000
"""Bytes from the begin and the end of what a rank has printed that a report shows."""

Check = Callable[..., None]
"""Called on every rank as ``check(comm, *arguments)``; a function of a module."""


@cache
def missing_mpi() -> str:
    """Why there is no MPI here; empty if there is. It is not started to find out."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed: pip install 'linop-algebra[mpi]'"
    try:
        mpirun.command(1, [])
    except MissingExtraError as error:
        return str(error)
    return ""


@cache
def job(ranks: int) -> Job:
    """The one job of so many ranks, which lives until this process ends."""
    shared = Job(ranks)
    atexit.register(shared.close)
    return shared


class Job:
    """An MPI job that runs examples. The first one starts it, and the next after one that left it
    unusable.

    Args:
        ranks: how many.
        watch: seconds in which an example has to end.
        grace: seconds left to the others once a rank has failed.
    """

    def __init__(self, ranks: int, watch: float = WATCH, grace: float = GRACE) -> None:
        self.ranks = ranks
        self.watch = watch
        self.grace = grace
        self.starts = 0
        """How often it was started."""
        self._ranks: Ranks | None = None
        self._spare: Ranks | None = None
        self._failed = 0

    def run(self, check: Check, *arguments: Any) -> None:
        """Run ``check(comm, *arguments)`` on every rank, on a communicator of its own.

        Raises:
            FailedExampleError: not every rank returned from it in time.
        """
        __tracebackhide__ = True
        outcome = self.ask(getattr(check, "__name__", str(check)), check, arguments)
        if outcome.timed_out:
            self.watch = min(self.watch, HURRY)
        outcome.settle()

    def ask(
        self, example: str, check: Check, arguments: tuple[Any, ...], watch: float | None = None
    ) -> Outcome:
        """What every rank says of ``check(comm, *arguments)``.

        Args:
            example: its name, for reports.
            check: is imported on the ranks before the watch begins.
            arguments: picklable.
            watch: seconds in which it has to end; by default the job's.
        """
        data = pickle.dumps((check, arguments))
        watch = self.watch if watch is None else watch
        ranks = self._running()
        begin = time.monotonic()
        try:
            answers = ranks.ask(data, watch, min(self.grace, watch / 3))
        except BaseException:  # pytest's own timeout, say: answers to this would come later
            self.close()
            raise
        outcome = Outcome(example, self.ranks, answers)
        if outcome.alike:
            return outcome
        self._failed += 1
        if not outcome.usable:
            ranks.job.end(ENDING)
        said, note = ranks.said(answers)
        seconds = time.monotonic() - begin
        outcome = Outcome(example, self.ranks, answers, said, note, seconds=seconds)
        if not outcome.usable or self._failed >= SPENT:
            ranks.close()
            self._ranks = None
        return outcome

    def _running(self) -> Ranks:
        """The ranks, started if need be. Where some were lost, the next are started ahead: more
        will be, until the example is shrunk."""
        if self._ranks is None:
            self.starts += 1
            self._failed = 0
            ranks, self._spare = self._spare or Ranks(self.ranks), None
            ranks.meet()
            self._ranks = ranks
        if self.starts > 1 and self._spare is None:
            self._spare = Ranks(self.ranks)
        return self._ranks

    @property
    def folder(self) -> Path:
        """Of the running job; every rank has it in its command line."""
        assert self._ranks is not None, "not running"
        return self._ranks.folder

    def close(self) -> None:
        """End the job and all its processes."""
        for ranks in filter(None, [self._ranks, self._spare]):
            ranks.close()
        self._ranks = self._spare = None


class Ranks:
    """The ranks of a job that is just starting."""

    def __init__(self, count: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="linop-")
        self.folder = Path(self._folder.name)
        self.links: dict[int, Connection] = {}
        """The connection to each rank."""
        self._count = count
        self._read: dict[str, int] = {}
        script = str(Path(__file__).with_name("rank.py"))
        # -P: the script's folder is not on the path, whose modules are no standard library.
        arguments = [sys.executable, "-P", script, str(self.folder)]
        # Only this user can enter the folder, and so send a rank what it is going to unpickle.
        self._server = socket.socket(socket.AF_UNIX)
        with socket_in(self.folder) as address:
            self._server.bind(address)
        self._server.listen(count)
        with (self.folder / MPIEXEC).open("wb") as output:
            self.job = mpirun.Job(count, arguments, stdout=output, stderr=subprocess.STDOUT)

    def meet(self) -> None:
        """Wait until all have started.

        Raises:
            RuntimeError: they do not; the message has their output.
        """
        try:
            links = [self._accept() for _ in range(self._count)]
            for link in links:
                link.send(sys.path)
            self.links = {link.recv(): link for link in links}
        except (EOFError, OSError) as error:
            self.job.end()
            words = self.printed(MPIEXEC)
            self.close()
            raise RuntimeError(f"an MPI job does not start: {error}\n{words}") from error

    def _accept(self) -> Connection:
        self._server.settimeout(0.2)
        late = time.monotonic() + START
        while self.job.poll() is None and time.monotonic() < late:
            with contextlib.suppress(TimeoutError):
                return Connection(self._server.accept()[0].detach())
        raise OSError("a rank is missing")

    def ask(self, data: bytes, watch: float, grace: float) -> Answers:
        """What every rank says of a pickled check and its arguments."""
        self._tell((sys.path, data))
        imported = self._answers(START, grace)
        if not self._all(imported, {"passed"}):
            return imported
        ran = self._answers(watch, grace)
        if not self._all(ran, {"passed", "rejected", "skipped"}):
            return ran
        self._tell(FINISH)
        finished = self._answers(watch, grace)
        return ran if self._all(finished, {"passed"}) else finished

    def _tell(self, order: Any) -> None:
        for link in self.links.values():
            with contextlib.suppress(OSError):  # it died after its last example: `recv` will tell
                link.send(order)

    def _all(self, answers: Answers, kinds: set[str]) -> bool:
        given = [answers.get(rank) for rank in self.links]
        return all(answer is not None and answer.kind in kinds for answer in given)

    def _answers(self, seconds: float, grace: float) -> Answers:
        """One answer of every rank, as far as they come in time."""
        answers: Answers = {}
        end = time.monotonic() + seconds
        waiting = {link: rank for rank, link in self.links.items()}
        while waiting and (left := end - time.monotonic()) > 0:
            for link in wait(list(waiting), left):
                assert isinstance(link, Connection)
                answer = answers[waiting.pop(link)] = _received(link)
                if answer is None or not answer.passed:
                    end = min(end, time.monotonic() + grace)
        return answers

    def said(self, answers: Answers) -> tuple[dict[int, str], str]:
        """What every rank has printed, which has its stack where it was stuck; and mpiexec."""
        printed = {}
        for rank in sorted(self.links):
            printed[rank] = self.printed(OUTPUT.format(rank))
            if answers.get(rank) is not None:  # idle when the job was ended: where, says nothing
                printed[rank] = printed[rank].partition("Fatal Python error: Aborted")[0]
        words = self.printed(MPIEXEC)
        return printed, f"mpiexec said:\n{words}" if words.strip() else ""

    def printed(self, name: str) -> str:
        """What has come into a file since it was asked for last; of much, its begin and end."""
        with (self.folder / name).open("rb") as file:
            begin = self._read.get(name, 0)
            self._read[name] = end = file.seek(0, 2)
            file.seek(begin)
            data = file.read(min(end - begin, _HEAD + _TAIL))
            if end - begin > _HEAD + _TAIL:
                file.seek(end - _TAIL)
                left = end - begin - _HEAD - _TAIL
                data = data[:_HEAD] + b"\n[... %d bytes ...]\n" % left + file.read(_TAIL)
        return re.sub(r"\nExtension modules: .*", "", data.decode(errors="replace"))

    def close(self) -> None:
        """End the job: politely, if it still runs."""
        self._tell(None)
        self._server.close()
        if self.links and self.job.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.job.wait(5)
        self.job.end()
        for link in self.links.values():
            link.close()
        self._folder.cleanup()


def _received(link: Connection) -> Answer | None:
    try:
        answer: Answer = link.recv()
    except (EOFError, OSError):
        return None
    return answer
