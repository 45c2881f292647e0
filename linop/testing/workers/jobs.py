"""Persistent MPI jobs for property tests: the parent's side, in pytest's process.

Hypothesis runs in pytest's process. A `PersistentJob` is an ``mpiexec`` of ranks
(`linop.testing.workers.rank`) that runs one example after the other. Each rank has a socket to the
parent: it can report while others are stuck, no MPI call is needed between examples, and an idle
rank sleeps.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import os
import pickle
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache
from multiprocessing import AuthenticationError
from multiprocessing.connection import (
    Connection,
    answer_challenge,
    deliver_challenge,
    wait,
)
from pathlib import Path
from typing import Any

from linop.backends.mpi import mpirun
from linop.errors import MissingExtraError
from linop.testing.workers.outcome import Answers, FailedExampleError, Outcome
from linop.testing.workers.rank import FINISH, KEY, OUTPUT, Answer, socket_in

__all__ = ["FailedExampleError", "PersistentJob", "job", "missing_mpi"]

WATCH = 30.0
"""Default timeout of an example, in seconds."""
HURRY = 5.0
"""Timeout in seconds after a first timeout, since the example is going to be shrunk."""
GRACE = 1.0
"""Seconds that the other ranks have left once one has failed, since they may wait for it."""
START = 200.0
"""Timeout in seconds of the start of a job, and of the import of a check's module."""
ENDING = 3.0
"""Seconds that the ranks of an unusable job have to print their stacks before they are killed."""
SPENT = 200
"""Failed examples after which a job is restarted: their communicators are never freed."""

MPIEXEC = "mpiexec"
"""File in a job's folder with the output of mpiexec, and of ranks before they open their own."""
_HEAD, _TAIL = 4_000, 12_000
"""Bytes of a rank's output that a report shows, from its begin and from its end."""

Check = Callable[..., None]
"""Called on every rank as ``check(comm, *arguments)``; picklable."""


@cache
def missing_mpi() -> str:
    """The reason why MPI is unavailable; empty if it is available. MPI is not started."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed: pip install 'linop-algebra[mpi]'"
    try:
        mpirun.command(1, [])
    except MissingExtraError as error:
        return str(error)
    return ""


def _this_python() -> Sequence[str]:
    return [sys.executable]


PYTHON: Callable[[], Sequence[str]] = _this_python
"""Command line of Python in the jobs of `job`, or of what stands in for it."""
_JOBS: dict[int, PersistentJob] = {}


def job(ranks: int) -> PersistentJob:
    """The job of so many ranks that this process shares; it is closed when the process exits."""
    _close_at_exit()
    if ranks not in _JOBS:
        _JOBS[ranks] = PersistentJob(ranks, python=PYTHON())
    return _JOBS[ranks]


def close_idle(seconds: float) -> None:
    """Close the jobs of `job` that have run nothing for so long: each rank holds the memory of all
    that it has imported, and the next example starts them again."""
    for ranks, shared in list(_JOBS.items()):
        if time.monotonic() - shared.used >= seconds:
            _JOBS.pop(ranks).close()


@cache
def _close_at_exit() -> None:
    atexit.register(close_idle, 0.0)


class PersistentJob:
    """A persistent MPI job that runs examples. It starts with the first example, and again after an
    example that left it unusable.

    Args:
        ranks: the number of ranks.
        watch: timeout of an example, in seconds.
        grace: seconds that the other ranks have left once one has failed.
        python: the command line of Python on ranks; by default this one.
    """

    def __init__(
        self,
        ranks: int,
        watch: float = WATCH,
        grace: float = GRACE,
        python: Sequence[str] | None = None,
    ) -> None:
        self.ranks = ranks
        self.python = python or _this_python()
        self.watch = watch
        self.grace = grace
        self.starts = 0
        """Number of starts."""
        self.used = time.monotonic()
        """Time of the last example."""
        self._ranks: RankConnections | None = None
        self._spare: RankConnections | None = None
        self._failed = 0

    def run(self, check: Check, *arguments: Any, watch: float | None = None) -> None:
        """Run ``check(comm, *arguments)`` on every rank, on a new communicator.

        Args:
            check: picklable; its module is imported on the ranks before the timeout begins.
            arguments: picklable.
            watch: timeout in seconds; by default the job's.

        Raises:
            FailedExampleError: a rank failed, died, or did not return in time.
        """
        __tracebackhide__ = True
        outcome = self.ask(getattr(check, "__name__", str(check)), check, arguments, watch)
        if outcome.timed_out:
            self.watch = min(self.watch, HURRY)
        outcome.settle()

    def ask(
        self, example: str, check: Check, arguments: tuple[Any, ...], watch: float | None = None
    ) -> Outcome:
        """The outcome of ``check(comm, *arguments)`` on every rank.

        Args:
            example: its name, for reports.
            check: picklable; its module is imported on the ranks before the timeout begins.
            arguments: picklable.
            watch: timeout in seconds; by default the job's.
        """
        data = pickle.dumps((check, arguments))
        watch = self.watch if watch is None else watch
        ranks = self._running()
        begin = time.monotonic()
        try:
            answers = ranks.ask(data, watch, min(self.grace, watch / 3))
        except BaseException:  # such as pytest's own timeout: answers would arrive later
            self.close()
            raise
        self.used = time.monotonic()
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

    def _running(self) -> RankConnections:
        """The running ranks, started on first use. After a restart, spare ranks are started ahead,
        since shrinking is likely to need them."""
        if self._ranks is None:
            self.starts += 1
            self._failed = 0
            self._ranks = self._met()
        if self.starts > 1 and self._spare is None:
            self._spare = RankConnections(self.ranks, self.python)
        return self._ranks

    def _met(self) -> RankConnections:
        """Ranks that have started; a launcher that fails by chance is started again."""
        for left in reversed(range(mpirun.STARTS)):
            ranks, self._spare = self._spare or RankConnections(self.ranks, self.python), None
            try:
                ranks.meet()
                break
            except RuntimeError as error:
                if not left or not mpirun.by_chance(str(error)):
                    raise
        return ranks

    @property
    def folder(self) -> Path:
        """The folder of the running job, which is in the command line of every rank."""
        assert self._ranks is not None, "not running"
        return self._ranks.folder

    def close(self) -> None:
        """End the job, and all processes of it."""
        for ranks in filter(None, [self._ranks, self._spare]):
            ranks.close()
        self._ranks = self._spare = None


class RankConnections:
    """The ranks of one ``mpiexec``, and the connections to them. It is started when this is built;
    `meet` waits for it.

    Args:
        count: the number of ranks.
        python: the command line of Python.
    """

    def __init__(self, count: int, python: Sequence[str] | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="linop-")
        self.folder = Path(self._folder.name)
        self.links: dict[int, Connection] = {}
        """The connection to each rank."""
        self._count = count
        self._read: dict[str, int] = {}
        script = str(Path(__file__).with_name("rank.py"))
        # -P: keeps the script's folder, whose modules would shadow others, off the path.
        arguments = [*(python or _this_python()), "-P", script, str(self.folder)]
        # Only this user can enter the folder, and ranks and parent prove that they know its key: so
        # nobody else can send them data to unpickle.
        self._key = secrets.token_bytes(32)
        opened = os.open(self.folder / KEY, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(opened, "wb") as file:
            file.write(self._key)
        self._server = socket.socket(socket.AF_UNIX)
        with socket_in(self.folder) as address:
            self._server.bind(address)
        self._server.listen(count)
        with (self.folder / MPIEXEC).open("wb") as output:
            self.job = mpirun.Job(count, arguments, stdout=output, stderr=subprocess.STDOUT)

    def meet(self) -> None:
        """Wait until all ranks have started and connected.

        Raises:
            RuntimeError: they do not within `START` seconds; the message has their output.
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
                return self._known(Connection(self._server.accept()[0].detach()))
        raise OSError("a rank is missing")

    def _known(self, link: Connection) -> Connection:
        """A connection whose other end knows the key of the job.

        Raises:
            OSError: it does not.
        """
        try:
            deliver_challenge(link, self._key)
            answer_challenge(link, self._key)
        except AuthenticationError as error:
            link.close()
            raise OSError(f"somebody else connects: {error}") from None
        return link

    def ask(self, data: bytes, watch: float, grace: float) -> Answers:
        """Run a pickled (check, arguments) on every rank: import, run, and, if no rank failed, look
        for messages and threads that it left behind.

        Args:
            watch: timeout of the run, in seconds.
            grace: seconds that the other ranks have left once one has failed.

        Returns:
            The answers of the first of these three phases that failed, or of the run.
        """
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
            with contextlib.suppress(OSError):  # the rank is dead: `recv` will report it
                link.send(order)

    def _all(self, answers: Answers, kinds: set[str]) -> bool:
        given = [answers.get(rank) for rank in self.links]
        return all(answer is not None and answer.kind in kinds for answer in given)

    def _answers(self, seconds: float, grace: float) -> Answers:
        """One answer of every rank, as far as they arrive in time."""
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
        """The output of every rank, with its stack if it was stuck, and the output of mpiexec."""
        printed = {}
        for rank in sorted(self.links):
            printed[rank] = self.printed(OUTPUT.format(rank))
            if answers.get(rank) is not None:  # idle when the job was ended: drop its stack
                printed[rank] = printed[rank].partition("Fatal Python error: Aborted")[0]
        words = self.printed(MPIEXEC)
        return printed, f"mpiexec said:\n{words}" if words.strip() else ""

    def printed(self, name: str) -> str:
        """The text added to a file of the job's folder since the last call; if it is long, its
        begin and end."""
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
        """Ask the ranks to exit, and end the job if they do not within 5 seconds."""
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
